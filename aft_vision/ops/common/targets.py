"""Compiling the kernels of an operator for a kind of GPU that need not be here."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from aft_vision.errors import first_line
from aft_vision.ops.common import verify
from aft_vision.ops.common.tuner import Tuner
from aft_vision.ops.declaration import Operation, Shape

# KiB of shared memory that a program may have, by compute capability (CUDA C++ Programming Guide).
SHARED_MEMORY = {'8.0': 163, '8.6': 99, '8.9': 99, '9.0': 227, '10.0': 227, '12.0': 99}


class Compiled(NamedTuple):
    """The compiled kernels of an operator.

    Attributes:
        kernels: Names of the kernels.
        binaries: How many there are of all sizes of tiles and shapes.
        too_large: How many of them need more shared memory than there is; a tuner leaves those sizes out.
        failure: Why the kernels would not run, in one line, or None.
    """

    kernels: set[str]
    binaries: int
    too_large: int
    failure: str | None


def compile_kernels(
    operation: Operation, types: verify.Types, capability: str, *shapes: Shape, choices: int | None = None
) -> Compiled:
    """Compile the forward and the backward of an operation in Triton, with every size of tiles.

    It fails where one cannot be compiled, or where the sizes of tiles that run while a graph is captured do not fit.

    Args:
        types: those of q, k, v and the bias, or one for all.
        capability: a key of SHARED_MEMORY.
        shapes: of the inputs, whose lengths are constants of some kernels.
        choices: how many sizes of tiles at most; None is all.
    """
    failure = None
    with _targeting(capability) as (compiled, refused):
        try:
            kernels = verify.triton_form(operation)
            for shape in shapes:
                inputs = verify.draw_inputs(operation, shape, types, torch.device('cpu'))
                for _ in Tuner.run_each(partial(verify._run, kernels, inputs), choices):
                    pass
        # Each part of the compiler fails in its own way.
        except Exception as error:
            failure = first_line(error)
    return Compiled({kernel.name for kernel in compiled.values()}, len(compiled), len(refused), failure)


@contextmanager
def _targeting(capability: str) -> Iterator[tuple[dict[str, Any], set[str]]]:
    # Launches compile and run nothing. Yields the kernels by their hashes, and the hashes of those that are too large.
    number, most = int(capability.replace('.', '')), 1024 * SHARED_MEMORY[capability]
    # The number stands for the device too: each has a cache of its own.
    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget('cuda', number, 32),
        get_current_device=lambda: number,
        get_current_stream=lambda device: 0,
    )
    compiled: dict[str, Any] = {}
    refused: set[str] = set()
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        compiled[kernel.hash] = kernel
        if kernel.metadata.shared > most:
            refused.add(kernel.hash)
            raise OutOfResources(kernel.metadata.shared, most, 'shared memory')
        return kernel

    with mock.patch.object(driver, '_active', device), mock.patch.object(JITFunction, 'run', compile_only):
        yield compiled, refused
