"""Draw images from a model of pixels.

python -m tools.sample_pixels --checkpoint FILE --out samples.png
python -m tools.sample_pixels --checkpoint FILE --num-images 64 --batch-size 16 --top-p 0.95 --out samples.png
python -m tools.sample_pixels --checkpoint FILE --num-images 64 --state samples.state --out samples.png

FILE is a checkpoint of train.pixel, or of `save_decoder`. The images are drawn sub-pixel by sub-pixel, in raster order,
and stand in rows on one sheet, enlarged; --folder also writes each of them as it is. A batch takes little longer than
one image, so larger batches are faster per image until the processor is busy.

Ctrl-C with --state keeps what has been drawn; the same command goes on from there, with the result of a run that was
not interrupted. The file is removed when the images are written.
"""

import argparse
from collections.abc import Sequence
from functools import partial
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
    add('--folder', type=Path, help='also write each image here, as 0000.png and so on')
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
from tools.sampling import draw, load, rules


def main(argv: Sequence[str] | None = None) -> torch.Tensor:
    """Draw the images and write the sheet.

    Returns:
        (num_images, 3, H, W) uint8.

    Raises:
        ValueError: the checkpoint, the state, the device or another option is not valid.
        SystemExit: the run was interrupted.
    """
    args = parse_args(argv)
    model = load(args, 'pixel')
    assert isinstance(model, PixelDecoder)
    sizes = [min(args.batch_size, args.num_images - first) for first in range(0, args.num_images, args.batch_size)]
    samplers = [
        partial(model.image_sampler, num_samples=size, **rules(args, batch)) for batch, size in enumerate(sizes)
    ]
    images = model.to_images(torch.cat(draw(samplers, args, model, dict(sizes=sizes))))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    image_sheet(images, args.columns, args.scale).save(args.out)
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
        for index, image in enumerate(images):
            image_sheet(image[None], scale=1, margin=0).save(args.folder / f'{index:04}.png')
    if args.state is not None:
        args.state.unlink(missing_ok=True)
    print(f'{len(images)} images are in {args.out}')
    return images


if __name__ == '__main__':
    run_command(main)
