"""Print what the Triton kernels take of a GPU that need not be here: registers, what they spill, and shared memory.

python -m tools.kernel_resources
python -m tools.kernel_resources --capability 8.0 --dtype float32 --operations aft_conv aft_full --batch-size 8 --each

Every kernel of an operation, forward, backward and repair, is compiled for the compute capability in each of the sizes
of tiles that are tried on a device, and put together by the ptxas that comes with Triton. Nothing runs, and no device,
driver or CUDA is needed. A line has the registers of a thread (at most 255; fewer let more programs run side by side),
the bytes of a thread that are spilled for lack of them, and the KiB of shared memory of a program, each from the
smallest to the largest over the sizes; with --each, every size has a line.

Operations have a batch of 32 (--batch-size) without a mask: AFT-full 197 tokens of 384 channels, AFT-conv, AFT-simple
and the one offset a head 14 x 14 tokens, a head per channel where there are heads. Causal ones have 2 sequences of 3072
tokens of 256 channels, AFT-local windows of 32 and of 256. A kernel knows which of its sizes are 1 or divisible by 16,
so the figures change with --batch-size.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tools.arguments import DTYPES, CommandParser

NAMES = (
    'aft_full',
    'aft_conv',
    'aft_local_causal_256',
    'aft_local_causal_32',
    'aft_simple',
    'aft_simple_causal',
    'aft_onehot',
)


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition('.')
    if not (major.isdecimal() and minor.isdecimal()):
        raise argparse.ArgumentTypeError(f'expected a compute capability like 9.0, got {text!r}')
    return int(major), int(minor)


def _batch_size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'expected a batch size from 1, got {text!r}')
    return int(text)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('--capability', type=_capability, default=(9, 0), help='compute capability (default: 9.0)')
    parser.add_argument('--dtype', choices=DTYPES, default='bfloat16', help='of q, k and v (default: bfloat16)')
    parser.add_argument('--operations', nargs='+', choices=NAMES, default=[*NAMES], help='(default: all)')
    parser.add_argument('--batch-size', type=_batch_size, metavar='B', help='(default: 32, and 2 of the causal ones)')
    parser.add_argument('--each', action='store_true', help='a line for each size of tiles')
    parser.add_argument('--json', type=Path, metavar='FILE', help='also write the figures here')
    return parser.parse_args(argv)


# Before the imports that take seconds: --help and a mistyped option are answered at once.
if __name__ == '__main__':
    parse_args()

import torch
from torch import Tensor
from tqdm import tqdm

from aft_vision.commandline import run_command
from tools.machine import PRECISIONS

GRID, KERNEL_SIZE = (14, 14), 11
QKV = tuple[Tensor, Tensor, Tensor]


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Print a line for each kernel, and write all figures as JSON if wanted.

    Returns:
        For each kernel and size of tiles `operation`, `kernel`, `tiles`, `warps`, `registers`, `spilled`, `shared`.

    Raises:
        As `measure_operation`.
    """
    args = parse_args(argv)
    found = []
    for name in args.operations:
        dtype = PRECISIONS[args.dtype] or torch.float32
        rows = measure_operation(name, dtype, args.capability, args.batch_size)
        print(format_rows(name, rows, args.each), flush=True)
        found += rows
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + '\n')
    return found


def measure_operation(
    name: str, dtype: torch.dtype, capability: tuple[int, int], batch_size: int | None = None
) -> list[dict[str, Any]]:
    """Compile the kernels of an operation of OPERATIONS.

    Args:
        dtype: Of q, k and v.
        capability: Of a GPU, (9, 0) for example.
        batch_size: None is that of the operation.

    Returns:
        As of `main`; kernels of its forward come first.

    Raises:
        ValueError: kernels run in Triton's interpreter.
        RuntimeError: Triton cannot compile.
        ImportError: Triton is not installed.
    """
    try:
        from aft_vision.ops.common.resources import measure_resources, recording
    except ModuleNotFoundError as error:
        if error.name != 'triton':
            raise
        raise ImportError('expected Triton, which compiles the kernels: pip install triton') from error

    operation = OPERATIONS[name]
    with recording() as launches:
        operation.launch(operation.draw(dtype, batch_size))
    found: dict[str, dict[str, Any]] = {}
    for each in tqdm(launches, desc=name, leave=False, disable=None):
        for row in measure_resources(each, capability):
            # A kernel that is launched twice, such as a scan of both directions, has a row for each code that it has.
            figures = row._asdict()
            found.setdefault(figures.pop('code'), {'operation': name, **figures})
    return list(found.values())


def format_rows(name: str, rows: Sequence[dict[str, Any]], each: bool = False) -> str:
    """The rows of an operation as text: a line for each kernel, or for each size of tiles."""
    lines = [f'{name:50} {"registers":>12} {"spilled":>9} {"KiB":>10}']
    for kernel in dict.fromkeys(row['kernel'] for row in rows):
        own = [row for row in rows if row['kernel'] == kernel]
        if not each or len(own) > 1:
            lines.append(_line(f'  {kernel}', own))
        for row in own if each else ():
            tiles = ', '.join(f'{key} {value}' for key, value in row['tiles'].items())
            words = f'{tiles + ", " if tiles else ""}{row["warps"]} warps'
            lines.append(_line(f'    {words}' if len(own) > 1 else f'  {kernel}, {words}', [row]))
    return '\n'.join(lines)


def _line(words: str, rows: Sequence[dict[str, Any]]) -> str:
    shared = [-(-row['shared'] // 1024) for row in rows]
    columns = [_range([row['registers'] for row in rows]), _range([row['spilled'] for row in rows]), _range(shared)]
    return f'{words:50} {columns[0]:>12} {columns[1]:>9} {columns[2]:>10}'


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f'{low} to {high}'


class Operation(NamedTuple):
    """An operation whose launches are looked at.

    Args:
        shape: (B, T, D).
        launch: Runs its forward and backward on q, k and v.
    """

    shape: tuple[int, int, int]
    launch: Callable[[QKV], None]

    def draw(self, dtype: torch.dtype, batch_size: int | None = None) -> QKV:
        """q, k and v, which have shapes and types and no values."""
        shape = (self.shape[0] if batch_size is None else batch_size, *self.shape[1:])
        q, k, v = (torch.empty(shape, dtype=dtype, device='meta') for _ in 'qkv')
        return q, k, v


def _full(qkv: QKV) -> None:
    from aft_vision.ops.full import triton as full

    bias = torch.empty(qkv[0].shape[1], qkv[0].shape[1], device='meta')
    y, den = full.full_forward(*qkv, bias, None, True)
    full.full_backward(y, y, den, *qkv, bias, None, True)


def _simple(qkv: QKV) -> None:
    from aft_vision.ops.simple import triton as simple

    y, context = simple.simple_forward(*qkv, None, True)
    simple.simple_backward(y, y, context, *qkv, None, False)


def _conv(qkv: QKV) -> None:
    from aft_vision.ops.conv import triton as conv

    kernel = torch.empty(qkv[0].shape[2], KERNEL_SIZE, KERNEL_SIZE, device='meta')
    y, den = conv.conv_forward(*qkv, kernel, GRID, None, True, True)
    conv.conv_backward(y, y, den, *qkv, kernel, GRID, None, True, True)


def _onehot(qkv: QKV) -> None:
    from aft_vision.ops.conv import onehot_triton as onehot

    heads = qkv[0].shape[2]
    offset, weight = torch.empty(heads, 2, dtype=torch.int64, device='meta'), torch.empty(heads, device='meta')
    y, den = onehot.onehot_forward(*qkv, offset, weight, GRID, None, True)
    onehot.onehot_backward(y, y, den, *qkv, offset, weight, GRID, None, True)


def _local_causal(qkv: QKV, window: int) -> None:
    from aft_vision.ops.causal import local_triton as local_causal

    band = torch.empty(qkv[0].shape[1], window, device='meta')
    y, den = local_causal.local_causal_forward(*qkv, band, None, True)
    local_causal.local_causal_backward(y, y, den, *qkv, band, None, True)


def _simple_causal(qkv: QKV) -> None:
    from aft_vision.ops.causal import simple_triton as simple_causal

    y, den = simple_causal.simple_causal_forward(*qkv, None, True)
    simple_causal.simple_causal_backward(y, y, den, *qkv, None, False)


IMAGES, SEQUENCES = (32, GRID[0] * GRID[1], 384), (2, 3072, 256)
OPERATIONS = {
    'aft_full': Operation((32, 197, 384), _full),
    'aft_conv': Operation(IMAGES, _conv),
    'aft_local_causal_256': Operation(SEQUENCES, partial(_local_causal, window=256)),
    'aft_local_causal_32': Operation(SEQUENCES, partial(_local_causal, window=32)),
    'aft_simple': Operation(IMAGES, _simple),
    'aft_simple_causal': Operation(SEQUENCES, _simple_causal),
    'aft_onehot': Operation(IMAGES, _onehot),
}

if __name__ == '__main__':
    run_command(main)
