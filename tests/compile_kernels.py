"""Compile the Triton kernels for GPUs that need not be here, with every size of tiles at the shapes of models.

python tests/compile_kernels.py 8.0 8.6 8.9 9.0 10.0 12.0 --operators full conv --choices 1

An operation fails where one of its kernels cannot be compiled, or where the size of tiles that runs while a graph is
captured needs more shared memory than there is. The exit status is 1 if any fails.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from helpers import load_script
from kernel_checks import KERNELS, draw_inputs, find_operation, run_each, run_form

from aft_vision.errors import first_line
from aft_vision.ops.declaration import Shape

# KiB of shared memory that a program may have, by compute capability (CUDA C++ Programming Guide).
SHARED_MEMORY = {'8.0': 163, '8.6': 99, '8.9': 99, '9.0': 227, '10.0': 227, '12.0': 99}


@contextmanager
def targeting(capability: str) -> Iterator[tuple[dict[str, Any], set[str]]]:
    """Let launches compile and run nothing; give the kernels by their hashes, and the hashes of those too large."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.errors import OutOfResources
    from triton.runtime.jit import JITFunction

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


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('capabilities', nargs='+', choices=SHARED_MEMORY)
    parser.add_argument('--operators', nargs='+', choices=KERNELS, default=KERNELS, help='(default: all)')
    parser.add_argument('--choices', type=int, metavar='N', help='sizes of tiles (default: all)')
    return parser.parse_args(argv)


def main() -> None:
    """Print a line for each operation, type and capability."""
    args = parse_args()
    table = load_script(str(Path(__file__).parent / 'ops' / 'test_gpu.py'))
    failed = False
    for capability in args.capabilities:
        for name, types in (x.values for x in table.every_type() if x.values[0] in args.operators):
            operation, form = find_operation(name)
            failure = ''
            with targeting(capability) as (compiled, refused):
                try:
                    for shape in table.SHAPES[name]:
                        inputs = draw_inputs(operation, Shape(*shape), types, 'cpu')
                        for _ in run_each(partial(run_form, form, inputs), args.choices):
                            pass
                # Each part of the compiler fails in its own way.
                except Exception as error:
                    failed, failure = True, first_line(error)
            kernels = {kernel.name for kernel in compiled.values()}
            print(
                f'{name:14} {types} {capability:>5} {len(compiled)} binaries of {len(kernels)} kernels, '
                f'{len(refused)} too large  {failure}'.rstrip(),
                flush=True,
            )
    raise SystemExit(failed)


if __name__ == '__main__':
    main()
