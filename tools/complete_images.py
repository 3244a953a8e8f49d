"""Complete partly given images with a pixel model (Fig. 4 of the AFT paper).

python -m tools.complete_images --checkpoint FILE --images A.png B.png --out completed.png
python -m tools.complete_images --checkpoint FILE --data CIFAR10 --indices 0 1 2 3 --num-samples 3 --out completed.png
python -m tools.complete_images --checkpoint FILE --images A.png --mask mask.png --out completed.png

FILE is a checkpoint of train.pixel or `save_decoder`. Images are files of the model's image size, or the test images of
--data: CIFAR10 in any format of train.pixel. --mask selects the given part: top-half, bottom-half, left-half,
right-half, or an image file that is white where a pixel is given.

All other sub-pixels are sampled in raster order, each from the ones before it, so the model does not see given pixels
further below. The sheet has a column for each image: the given part on grey, the completions, and with --originals the
image itself.

Completion i has the seed --seed plus i, independent of the batch. With --folder each completion is also written there,
named by its seed, after its batch.
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
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument('--images', type=Path, nargs='+', help='image files')
    source.add_argument('--data', type=Path, help='CIFAR10 in any format of train.pixel, for its test images')
    add('--indices', type=int, nargs='+', help='indices of the images of --data (default: the first 8)')
    halves = 'top-half, bottom-half, left-half, right-half'
    add('--mask', default='top-half', help=f'{halves}, or an image file (default: top-half)')
    add('--num-samples', type=parse_positive, default=1, help='completions per image (default: 1)')
    add('--batch-size', type=parse_positive, default=16, help='completions per batch (default: 16)')
    add('--originals', action='store_true', help='add a row with the images themselves')
    add('--scale', type=parse_positive, default=4, help='enlargement of the sheet (default: 4)')
    add('--folder', type=Path, help='also write each completion here, as SEED.png')
    add('--out', type=Path, required=True, help='the PNG')
    args = parser.parse_args(argv)
    if args.images and args.indices:
        parser.error('--indices are of the images of --data, got --images')
    return args


if __name__ == '__main__':
    parse_args()

import numpy as np
import torch
from PIL import Image

from aft_vision.commandline import run_command
from aft_vision.data import open_image, read_cifar10
from aft_vision.models import PixelDecoder, half_mask
from aft_vision.models.pixel import MASKS
from aft_vision.visualize import completion_sheet, load_pixels
from tools.sampling import check_picture, draw_images, load, rules


def main(argv: Sequence[str] | None = None) -> torch.Tensor:
    """Complete the images and write the sheet.

    Returns:
        (images * num_samples, 3, H, W) uint8, the completions of one image in consecutive rows.

    Raises:
        ValueError: the checkpoint, an image, the mask, the device or another option is not valid.
    """
    args = parse_args(argv)
    check_picture(args.out, args.checkpoint, Path(args.mask), *(args.images or ()))
    model = load(args, 'pixel')
    assert isinstance(model, PixelDecoder)
    images = model.check_images(read_images(args, model.img_size))
    mask = read_mask(args.mask, model.img_size)

    def draw(numbers: list[int]) -> torch.Tensor:
        chosen = images[[i // args.num_samples for i in numbers]]
        return model.complete_images(chosen, mask, seed=[args.seed + i for i in numbers], **rules(args))

    completed = draw_images(draw, len(images) * args.num_samples, args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    completion_sheet(images, mask, completed, args.scale, args.originals).save(args.out)
    print(f'{len(completed)} completed images are in {args.out}')
    return completed


def read_images(args: argparse.Namespace, img_size: tuple[int, int]) -> torch.Tensor:
    """Read the chosen images, (N, 3, H, W) uint8."""
    if args.images is not None:
        return load_pixels(args.images, img_size)
    images = read_cifar10(args.data, 'test')
    if images.shape[1:3] != img_size:
        made, found = (f'{height} x {width}' for height, width in (img_size, images.shape[1:3]))
        raise ValueError(
            f'expected images of {made} pixels (H x W), as {args.checkpoint} has, got {found} in {args.data}'
        )
    indices = list(range(min(8, len(images)))) if args.indices is None else args.indices
    outside = [index for index in indices if not 0 <= index < len(images)]
    if outside:
        raise ValueError(f'expected indices from 0 to {len(images) - 1}, got {outside[0]}')
    return torch.from_numpy(images[indices]).permute(0, 3, 1, 2)


def read_mask(text: str, img_size: tuple[int, int]) -> torch.Tensor:
    """Read the mask (H, W) by name, or from an image file that is white where a pixel is given."""
    if text in MASKS:
        return half_mask(text, img_size)
    if not Path(text).exists():
        raise ValueError(f'the mask must be one of {", ".join(MASKS)}, or an image file, got {text}, which is neither')
    mask = torch.from_numpy(np.array(open_image(text).convert('L'))) >= 128
    with Image.open(text) as image:
        # What an editor has erased keeps its colour.
        if image.has_transparency_data and np.array(image.convert('RGBA'))[..., 3].min() < 255:
            raise ValueError(f'expected a mask of black and white pixels, got {text} with transparent ones')
    if tuple(mask.shape) != img_size:
        raise ValueError(
            f'expected a mask of {img_size[0]} x {img_size[1]} pixels (H x W), got {mask.shape[0]} x {mask.shape[1]}'
        )
    return mask


if __name__ == '__main__':
    run_command(main)
