"""Draw the position biases that a model has learned.

python -m tools.visualize_bias --checkpoint FILE_OR_DIR
python -m tools.visualize_bias --checkpoint AFTER --before BEFORE --layers 1 3 5 7 9 11

FILE_OR_DIR is a run or a checkpoint of train.imagenet, or an exported folder. The picture shows exp(w) - 1, as Fig. 1
of the AFT paper: for AFT-conv a row per layer and a column per head, for AFT-full and AFT-local a picture per layer.
Red is above 0, blue below; each picture has its own scale, written below it, unless --same-scale is given.
--exponentiated draws exp(w), as Fig. 3. --before adds the biases of another checkpoint on the left, such as the one
before regularisation or pruning. Layers and heads count from 1; layers with softmax attention count too.

Writes position_biases.png next to the checkpoint (needs matplotlib).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tools.arguments import CommandParser, check_out, parse_positive


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('--checkpoint', type=Path, required=True, help='a checkpoint file, a run or an exported folder')
    parser.add_argument('--before', type=Path, help='another checkpoint, with its biases on the left')
    parser.add_argument('--max-heads', type=parse_positive, default=16, help='heads to draw per layer (default: 16)')
    parser.add_argument('--heads', type=int, nargs='+', help='heads to draw (default: evenly spaced ones)')
    parser.add_argument('--layers', type=int, nargs='+', help='these layers (default: all)')
    parser.add_argument('--exponentiated', action='store_true', help='draw exp(w) instead of exp(w) - 1')
    parser.add_argument('--same-scale', action='store_true', help='one scale for all pictures')
    parser.add_argument('--out', type=Path, help='the PNG (default: position_biases.png next to the checkpoint)')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()

from aft_vision.commandline import run_command
from aft_vision.models.checkpoint import load_model
from aft_vision.visualize import draw_position_biases, save_figure


def main(argv: Sequence[str] | None = None) -> Path:
    """Draw the picture and return its path.

    Raises:
        ValueError: a checkpoint is not valid, its model has no position biases, the two do not match, or there is no
            such head or layer.
    """
    args = parse_args(argv)
    folder = args.checkpoint if args.checkpoint.is_dir() else args.checkpoint.parent
    out = args.out or folder / 'position_biases.png'
    check_out(out, args.checkpoint, args.before)
    figure = draw_position_biases(
        load_model(args.checkpoint),
        args.max_heads,
        before=load_model(args.before) if args.before else None,
        heads=[head - 1 for head in args.heads] if args.heads else None,
        layers=[layer - 1 for layer in args.layers] if args.layers else None,
        exponentiated=args.exponentiated,
        same_scale=args.same_scale,
    )
    save_figure(figure, out)
    print(f'the position biases are in {out}')
    return out


if __name__ == '__main__':
    run_command(main)
