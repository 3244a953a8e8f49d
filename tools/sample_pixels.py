"""Sample images from a pixel model.

python -m tools.sample_pixels --checkpoint FILE --out samples.png
python -m tools.sample_pixels --checkpoint FILE --num-images 64 --batch-size 16 --top-p 0.95 --out samples.png
python -m tools.sample_pixels --checkpoint FILE --num-images 64 --folder samples --out samples.png

FILE is a checkpoint of train.pixel or `save_decoder`. The images are sampled sub-pixel by sub-pixel in raster order and
written to one enlarged sheet. A batch takes little longer than one image, so larger batches are faster per image until
the processor is saturated.

Image i has the seed --seed plus i, independent of the batch. With --folder each image is also written there, named by
its seed, after its batch: after an interruption, --seed with the first missing one samples the rest.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tools.arguments import CommandParser, add_sampling, parse_positive


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    add_sampling(parser)
    add = parser.add_argument
    add('--num-images', type=parse_positive, default=16, help='images to sample (default: 16)')
    add('--batch-size', type=parse_positive, default=16, help='images per batch (default: 16)')
    add('--columns', type=parse_positive, help='images per row of the sheet (default: as many as rows)')
    add('--scale', type=parse_positive, default=4, help='enlargement of the sheet (default: 4)')
    add('--folder', type=Path, help='also write each image here, as SEED.png')
    add('--out', type=Path, required=True, help='the PNG')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()

import torch

from aft_vision.commandline import run_command
from aft_vision.models import PixelDecoder
from aft_vision.visualize import image_sheet
from tools.sampling import check_picture, draw_images, load, rules


def main(argv: Sequence[str] | None = None) -> torch.Tensor:
    """Sample the images and write the sheet.

    Returns:
        (num_images, 3, H, W) uint8.

    Raises:
        ValueError: the checkpoint, an image of the folder, the device or another option is not valid.
    """
    args = parse_args(argv)
    check_picture(args.out, args.checkpoint)
    model = load(args, 'pixel')
    assert isinstance(model, PixelDecoder)

    def draw(numbers: list[int]) -> torch.Tensor:
        return model.sample_images(len(numbers), seed=[args.seed + i for i in numbers], **rules(args))

    images = draw_images(draw, args.num_images, args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    image_sheet(images, args.columns, args.scale).save(args.out)
    print(f'{len(images)} images are in {args.out}')
    return images


if __name__ == '__main__':
    run_command(main)
