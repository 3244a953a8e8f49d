"""What the Triton kernels take of a GPU, which need not be here: registers, what they spill, and shared memory."""

import contextlib
import io
import itertools
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import Autotuner
from triton.runtime.driver import driver
from triton.runtime.jit import KernelInterface

from aft_vision.ops.common.launch import interprets

# Triton keeps kernels by the number of their device: each one that is made up gets its own.
_devices = itertools.count(1000)


class Launch(NamedTuple):
    """A call of a kernel, that of a tuner or one with a size of its own."""

    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]


class Resources(NamedTuple):
    """What a kernel takes.

    Args:
        kernel: Its module and its name.
        tiles: The constants that a tuner chooses.
        registers: Of a thread.
        spilled: Bytes of a thread that are stored for lack of registers.
        shared: Bytes of shared memory of a program.
        code: Of two launches it is one if their code is: the kernel, its constants, and what is known of its arguments.
    """

    kernel: str
    tiles: dict[str, int]
    warps: int
    registers: int
    spilled: int
    shared: int
    code: str


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Within it kernels are not launched, but noted: tensors may be on `meta`, and no device is needed."""
    found: list[Launch] = []
    launch = KernelInterface.__getitem__

    def note(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **constants: found.append(Launch(kernel, args, constants))

    KernelInterface.__getitem__ = note
    try:
        yield found
    finally:
        KernelInterface.__getitem__ = launch


def measure_resources(launch: Launch, capability: tuple[int, int]) -> list[Resources]:
    """Compile a kernel for GPUs of a compute capability with each of the sizes that its tuner chooses from.

    Raises:
        ValueError: kernels run in Triton's interpreter, which compiles nothing.
        RuntimeError: Triton cannot compile, or what it compiles with gives no such figures.
    """
    if interprets():
        raise ValueError('expected kernels that are compiled, got TRITON_INTERPRET=1')
    is_tuned = isinstance(launch.kernel, Autotuner)
    kernel = launch.kernel.fn if is_tuned else launch.kernel
    configs = launch.kernel.configs if is_tuned else [triton.Config({})]
    args = [x.dtype if isinstance(x, Tensor) else x for x in launch.args]
    found = []
    with _absent_device(capability):
        for config in configs:
            constants = {**launch.constants, **(config.all_kwargs() if is_tuned else {})}
            compiled, log = _assemble(kernel, args, constants)
            found.append(
                Resources(
                    kernel=f'{_operation(kernel)}.{kernel.__name__}',
                    tiles=config.kwargs,
                    warps=compiled.metadata.num_warps,
                    registers=_figure(r'Used (\d+) registers', log),
                    spilled=_figure(r'(\d+) bytes spill stores', log),
                    shared=compiled.metadata.shared,
                    code=compiled.hash,
                )
            )
    return found


def _assemble(kernel: Any, args: list[Any], constants: dict[str, Any]) -> tuple[Any, str]:
    # The kernel, and what ptxas says of it, which Triton does not keep: so nothing that it keeps is taken.
    log = io.StringIO()
    with contextlib.redirect_stdout(log), knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        compiled = kernel.warmup(*args, grid=(1,), **constants)
    return compiled, log.getvalue()


def _figure(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    if found is None:
        raise RuntimeError(f'expected what ptxas says of a kernel to have {pattern!r}, got {log.strip()!r}')
    return int(found[1])


@contextlib.contextmanager
def _absent_device(capability: tuple[int, int]) -> Iterator[None]:
    number, before = next(_devices), driver._active
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: number,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget('cuda', 10 * capability[0] + capability[1], 32),
        )
    )
    try:
        yield
    finally:
        driver.set_active(before)


def _operation(kernel: Any) -> str:
    # Of aft_vision.ops.conv.repair_kernels: conv_repair.
    folder, file = kernel.__module__.split('.')[-2:]
    return folder if file == 'kernels' else f'{folder}_{file.removesuffix("_kernels")}'
