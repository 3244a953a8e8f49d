"""Draw the position biases that a model has learned.

python -m tools.visualize_bias --checkpoint FILE_OR_DIR

FILE_OR_DIR is a checkpoint of train.imagenet (best.pth) or an exported folder. The picture shows exp(w) - 1, as Fig. 1
of the AFT paper: for AFT-conv a row per layer and a column per head, for AFT-full and AFT-local a picture per layer.
Red is above 0, blue below. Writes position_biases.png beside the checkpoint (needs matplotlib).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from aft_vision.evaluate import load_model
from aft_vision.visualize import plot_position_biases


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--checkpoint', type=Path, required=True, help='a checkpoint file or an exported folder')
    parser.add_argument('--max-heads', type=int, default=16, help='heads per layer that are drawn (default: 16)')
    parser.add_argument('--out', type=Path, help='the PNG (default: position_biases.png beside the checkpoint)')
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> Path:
    """Draw the picture and return its path.

    Raises:
        ValueError: the checkpoint is not valid, or its model has no position biases.
    """
    args = parse_args(argv)
    folder = args.checkpoint if args.checkpoint.is_dir() else args.checkpoint.parent
    out = args.out or folder / 'position_biases.png'
    plot_position_biases(load_model(args.checkpoint), out, args.max_heads)
    print(f'the position biases are in {out}')
    return out


if __name__ == '__main__':
    main()
