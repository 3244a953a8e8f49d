"""Draw images from a model of pixels.

python -m tools.sample_pixels --checkpoint FILE --out samples.png
python -m tools.sample_pixels --checkpoint FILE --num-images 64 --batch-size 16 --top-p 0.95 --out samples.png
python -m tools.sample_pixels --checkpoint FILE --num-images 64 --folder samples --out samples.png

FILE is a checkpoint of train.pixel, or of `save_decoder`. The images are drawn sub-pixel by sub-pixel, in raster order,
and stand in rows on one sheet, enlarged. A batch takes little longer than one image, so larger batches are faster per
image until the processor is busy.

Image i has the seed --seed plus i, whatever the batch. With --folder each is also written there as it is, under its
seed, and an image that exists is not drawn again: after an interrupt the same command draws the others.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tools.arguments import CommandParser, add_sampling


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    add_sampling(parser)
    add = parser.add_argument
    add('--num-images', type=int, default=16, help='images to draw (default: 16)')
    add('--batch-size', type=int, default=16, help='images drawn together (default: 16)')
    add('--columns', type=int, help='images in a row of the sheet (default: as many as rows)')
    add('--scale', type=int, default=4, help='enlargement of the sheet (default: 4)')
    add('--folder', type=Path, help='also write each image here, as SEED.png; those that exist are kept')
    add('--out', type=Path, required=True, help='the PNG')
    args = parser.parse_args(argv)
    if args.num_images < 1 or args.batch_size < 1:
        parser.error('--num-images and --batch-size must be at least 1')
    return args


# Before the imports that take seconds: --help and a mistyped option are answered at once.
if __name__ == '__main__':
    parse_args()

import torch

from aft_vision.commandline import run_command
from aft_vision.models import PixelDecoder
from aft_vision.visualize import image_sheet
from tools.sampling import draw_images, load, rules


def main(argv: Sequence[str] | None = None) -> torch.Tensor:
    """Draw the images and write the sheet.

    Returns:
        (num_images, 3, H, W) uint8.

    Raises:
        ValueError: the checkpoint, an image of the folder, the device or another option is not valid.
    """
    args = parse_args(argv)
    model = load(args, 'pixel')
    assert isinstance(model, PixelDecoder)

    def draw(numbers: list[int]) -> torch.Tensor:
        return model.sample_images(len(numbers), seed=[args.seed + i for i in numbers], **rules(args))

    images = draw_images(draw, args.num_images, args, list(model.state_dict().values()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    image_sheet(images, args.columns, args.scale).save(args.out)
    print(f'{len(images)} images are in {args.out}')
    return images


if __name__ == '__main__':
    run_command(main)
