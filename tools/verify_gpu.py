"""Compare the Triton kernels with the torch forms on the GPU, by the tests of a checkout that need one.

python -m tools.verify_gpu
python -m tools.verify_gpu --thorough -n 8 -k 'conv and bfloat16'

Each operator is compared with its torch form in float64 at the shapes of models, in each type (half types also with the
float32 bias of autocast), with each tile size of its tuner, on normal inputs and on keys and biases that underflow.
--thorough adds further shapes (one sequence, odd sizes, long sequences), and checks that a second call gives the same
bits, and so do a captured CUDA graph and torch.compile(fullgraph=True). Other options are those of pytest.

The exit status is 0 if all agree, 1 if any does not, and 2 after an error, such as no GPU that torch can use.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from train.command_line import CommandParser

TESTS = Path(__file__).parents[1] / 'tests'


def parse_args(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line, and return what is left for pytest."""
    parser = CommandParser(__doc__)
    parser.add_argument('--thorough', action='store_true', help='further shapes, repetition, graphs and compilation')
    return parser.parse_known_args(argv)


if __name__ == '__main__':
    parse_args()

import torch

from aft_vision.commandline import run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Run the tests that need a GPU.

    Raises:
        ValueError: there is no GPU, or there are no tests.
        SystemExit: always, with the exit status of pytest.
    """
    args, options = parse_args(argv)
    if not torch.cuda.is_available():
        raise ValueError('nothing was verified: there is no GPU that torch can use')
    if not TESTS.is_dir():
        raise ValueError(f'expected a checkout, whose tests verify the kernels, got no {TESTS}')
    import pytest

    raise SystemExit(pytest.main(['-m', 'gpu' if args.thorough else 'gpu and not slow', *options, str(TESTS)]))


if __name__ == '__main__':
    run_command(main)
