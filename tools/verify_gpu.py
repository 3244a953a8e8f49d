"""Compare the Triton kernels with the torch forms on the GPU, in value and in every gradient, and record the result.

python -m tools.verify_gpu
python -m tools.verify_gpu --operators conv full --dtypes bfloat16

Each operator is compared with its torch form in float64, at a small odd shape and at the shapes of models, in each type
(half types also with the float32 bias of autocast), with each tile size of its tuner, on normal inputs and on keys and
biases that underflow. Without a record for the kind of device, the first use of an operator makes only the small
comparison. This command makes all of them in advance and replaces the record. A kernel that disagrees is not used.

The exit status is 0 if all agree, 1 if any does not, and 2 after an error, such as no GPU that Triton supports.
"""

import argparse
from collections.abc import Sequence

from tools.arguments import DTYPES, CommandParser

OPERATORS = ('full', 'simple', 'conv', 'onehot', 'local_causal', 'simple_causal')
# (B, grid, D, channels of a head, window) of vision models, and of text.
IMAGE, TEXT = (8, (14, 14), 384), (2, (1, 3072), 256)
SHAPES = {
    'full': [(8, (1, 197), 384, 1, 1)],
    'simple': [(*IMAGE, 1, 1)],
    'conv': [(*IMAGE, 1, 11), (*IMAGE, 24, 11)],
    'onehot': [(*IMAGE, 1, 11), (*IMAGE, 24, 11)],
    'local_causal': [(*TEXT, 1, 32), (*TEXT, 1, 256)],
    'simple_causal': [(*TEXT, 1, 1)],
}
# Operators with a position bias.
BIASED = ('full', 'conv', 'onehot', 'local_causal')


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('--operators', nargs='+', choices=OPERATORS, default=[*OPERATORS], help='(default: all)')
    parser.add_argument(
        '--dtypes', nargs='+', choices=DTYPES, default=[*DTYPES], help='types of q, k and v (default: all)'
    )
    return parser.parse_args(argv)


# Before the slow imports, so that --help and errors of the command line are immediate.
if __name__ == '__main__':
    parse_args()

import torch

from aft_vision.commandline import run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each operator and type.

    Raises:
        ValueError: no kernel can run here.
        SystemExit: a kernel does not agree; the code is 1.
    """
    args = parse_args(argv)
    reason = find_obstacle()
    if reason is not None:
        raise ValueError(f'nothing was verified: {reason}')
    from aft_vision.ops.common import verify

    device = torch.device('cuda', torch.cuda.current_device())
    failures = 0
    for name in args.operators:
        shapes = [verify.Shape(*shape) for shape in SHAPES[name]]
        for dtype in args.dtypes:
            for bias in find_bias_types(name, dtype):
                types = [getattr(torch, x) for x in (dtype, dtype, dtype, bias)]
                # One type for all if they are equal.
                found = verify.verify(name, tuple(types if bias != dtype else types[:1]), device, verify.SMALL, *shapes)
                failures += found is not None
                label = dtype if bias == dtype else f'{dtype}, {bias} bias'
                print(f'{name:14} {label:23} {"agrees" if found is None else f"not used: {found}"}', flush=True)
    print(f'recorded for {verify.device_name(device)} in {verify.record_path(device)}')
    if failures:
        raise SystemExit(1)


def find_bias_types(name: str, dtype: str) -> list[str]:
    """Return the types of the bias to compare for a type of q, k and v."""
    return [dtype, 'float32'] if name in BIASED and dtype != 'float32' else [dtype]


def find_obstacle() -> str | None:
    """Return why no kernel can run here, or None."""
    from aft_vision.ops.common import launch

    if not torch.cuda.is_available():
        return 'there is no GPU that torch can use'
    if not launch.supports(torch.device('cuda', torch.cuda.current_device())):
        return f'expected Triton (pip install triton) and a GPU of capability {launch.CAPABILITY} or later'
    return launch.failure(torch.device('cuda', torch.cuda.current_device()))


if __name__ == '__main__':
    run_command(main)
