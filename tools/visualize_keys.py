"""Draw the keys of an AFT model below a photograph, or the attention of one token.

python -m tools.visualize_keys --checkpoint FILE_OR_DIR --image FILE --out keys.png
python -m tools.visualize_keys --checkpoint FILE_OR_DIR --image FILE --query 4 5 --out attention.png

FILE_OR_DIR is a run or a checkpoint of train.imagenet, or an exported folder. The first picture shows the keys, as
Fig. 9 to 12 of the AFT paper: a row per layer and a column per head, or per channel if the model has no heads. The
second shows the implicit attention of Eq. 3 over the photograph: the weights of all tokens for the token in row 4 and
column 5. Rows, columns, layers and heads count from 1; layers with softmax attention count too. The most likely classes
are next to the photograph (needs matplotlib).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.arguments import CommandParser, add_device, add_size, check_out, parse_positive


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('--checkpoint', type=Path, required=True, help='a checkpoint file, a run or an exported folder')
    parser.add_argument('--image', type=Path, required=True, help='a photograph')
    add_size(parser)
    parser.add_argument(
        '--query', type=int, nargs=2, metavar=('ROW', 'COL'), help='draw the attention of this token instead of keys'
    )
    parser.add_argument('--heads', type=int, nargs='+', help='heads or channels (default: evenly spaced ones)')
    parser.add_argument(
        '--max-heads', type=parse_positive, default=16, help='number of evenly spaced heads (default: 16)'
    )
    parser.add_argument('--layers', type=int, nargs='+', help='layers (default: all)')
    add_device(parser)
    parser.add_argument('--out', type=Path, required=True, help='the PNG')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()

from aft_vision.commandline import run_command
from aft_vision.devices import resolve_device
from aft_vision.models.checkpoint import load_model
from aft_vision.sizes import resize_model
from aft_vision.visualize import (
    capture_mixers,
    draw_implicit_attention,
    draw_key_maps,
    load_photograph,
    predictions,
    save_figure,
)


def main(argv: Sequence[str] | None = None) -> Path:
    """Draw the picture and return its path.

    Raises:
        ValueError: the checkpoint, the image, the size, the query, a head, a layer or the device is not valid.
    """
    args = parse_args(argv)
    check_out(args.out, args.checkpoint, args.image)
    device = resolve_device(args.device)
    model = resize_model(load_model(args.checkpoint, device), args.size)
    photograph = load_photograph(args.image, model, args.size)
    logits, layers = capture_mixers(model, photograph.images.to(device))
    options: dict[str, Any] = {
        'heads': from_one(args.heads),
        'max_heads': args.max_heads,
        'chosen_layers': from_one(args.layers),
        'text': '\n'.join(f'{100 * chance:5.1f}%  {name}' for name, chance in predictions(model, logits)),
    }
    if args.query is None:
        figure = draw_key_maps(photograph, layers, **options)
    else:
        figure = draw_implicit_attention(photograph, layers, (args.query[0] - 1, args.query[1] - 1), **options)
    save_figure(figure, args.out)
    print(f'the {"keys are" if args.query is None else "implicit attention is"} in {args.out}')
    return args.out


def from_one(numbers: Sequence[int] | None) -> list[int] | None:
    """Convert numbers that count from 1 to indices."""
    return None if numbers is None else [number - 1 for number in numbers]


if __name__ == '__main__':
    run_command(main)
