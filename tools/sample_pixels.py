"""Sample images from a pixel model, or complete partly given ones (AFT Fig. 4).

python -m tools.sample_pixels --checkpoint FILE --num-images 64 --top-p 0.95 --out samples.png
python -m tools.sample_pixels --checkpoint FILE --images A.png FOLDER --mask left-half --out completed.png
python -m tools.sample_pixels --checkpoint FILE --data CIFAR10 --indices 0 1 2 3 --num-samples 3 --out completed.png

FILE is a checkpoint of train.pixel or `save_decoder`. The images are sampled sub-pixel by sub-pixel in raster order and
written to one enlarged sheet. A batch takes little longer than one image, so larger batches are faster per image until
the processor is saturated.

--images takes files of the model's image size, and folders that are searched for them; those that cannot be decoded are
named and left out. --data takes the test images of CIFAR10 in any format of train.pixel. --mask selects the given part:
top-half, bottom-half, left-half, right-half, or an image file that is white where a pixel is given. The model does not
see given pixels below the one that it samples. The sheet then has a column for each image: the given part on grey, the
completions, and with --originals the image itself.

Image i has the seed --seed plus i, independent of the batch. With --folder each image is also written there, named by
its seed, after its batch: after an interruption, --seed with the first missing one samples the rest.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.arguments import add_sampling, check_out, parse_positive
from train.command_line import CommandParser, run_command


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    add_sampling(parser)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        '--images', type=Path, nargs='+', metavar='IMAGE', help='images to complete, or folders of them'
    )
    source.add_argument('--data', type=Path, help='CIFAR10 in any format of train.pixel, to complete its test images')
    halves = 'top-half, bottom-half, left-half, right-half'
    completing = [
        add('--mask', default='top-half', help=f'{halves}, or an image file (default: top-half)'),
        add('--num-samples', type=parse_positive, default=1, help='completions per image (default: 1)'),
        add('--originals', action='store_true', help='add a row with the images themselves'),
        add('--indices', type=int, nargs='+', help='indices of the images of --data (default: the first 8)'),
    ]
    sampling = [
        add('--num-images', type=parse_positive, default=16, help='images to sample (default: 16)'),
        add('--columns', type=parse_positive, help='images per row of the sheet (default: as many as rows)'),
    ]
    add('--batch-size', type=parse_positive, default=16, help='images per batch (default: 16)')
    add('--scale', type=parse_positive, default=4, help='enlargement of the sheet (default: 4)')
    add('--folder', type=Path, help='also write each image here, as SEED.png')
    add('--out', type=Path, required=True, help='the PNG')
    args = parser.parse_args(argv)
    completes = args.images or args.data
    for option in sampling if completes else completing:
        if getattr(args, option.dest) != option.default:
            how = 'without' if completes else 'with'
            parser.error(f'{option.option_strings[0]} is for use {how} --images or --data')
    if args.images and args.indices:
        parser.error('--indices are of the images of --data, got --images')
    return args


if __name__ == '__main__':
    parse_args()

import numpy as np
import torch
from PIL import Image

from aft_vision.data import open_image, read_cifar10
from aft_vision.files import replacing, replacing_output
from aft_vision.models import PixelDecoder, half_mask
from aft_vision.models.pixel import MASKS
from aft_vision.visualize import SkippedImages, completion_sheet, image_sheet, list_photographs, load_pixels
from tools.sampling import load_for, sampling_rules


def main(argv: Sequence[str] | None = None) -> torch.Tensor:
    """Sample or complete the images and write the sheet.

    Returns:
        (num_images, 3, H, W) uint8, or (images * num_samples, 3, H, W), the completions of one image in consecutive
        rows.

    Raises:
        ValueError: the checkpoint, an image, the mask, the device or another option is not valid.
    """
    args = parse_args(argv)
    args.images = list_photographs(args.images or ())
    check_out(args.out, args.checkpoint, Path(args.mask), *args.images)
    if Image.registered_extensions().get(args.out.suffix.lower()) not in Image.SAVE:
        raise ValueError(
            f'expected the file of a picture, such as {args.out.with_suffix(".png")}, got --out {args.out}'
        )
    model = load_for(args, 'pixel')
    assert isinstance(model, PixelDecoder)
    skipped = SkippedImages()
    if args.images or args.data:
        images = model.check_images(read_images(args, model.img_size, skipped))
        mask = read_mask(args.mask, model.img_size)

        def complete(numbers: list[int]) -> torch.Tensor:
            chosen = images[[i // args.num_samples for i in numbers]]
            return model.complete_images(chosen, mask, seed=[args.seed + i for i in numbers], **sampling_rules(args))

        drawn = draw_images(complete, len(images) * args.num_samples, args)
        sheet = completion_sheet(images, mask, drawn, args.scale, args.originals)
    else:

        def sample(numbers: list[int]) -> torch.Tensor:
            return model.sample_images(len(numbers), seed=[args.seed + i for i in numbers], **sampling_rules(args))

        drawn = draw_images(sample, args.num_images, args)
        sheet = image_sheet(drawn, args.columns, args.scale)
    with replacing_output(args.out) as file:
        sheet.save(file)
    left_out = skipped.describe()
    print(f'{len(drawn)} images are in {args.out}{f"; {left_out}" if left_out else ""}')
    return drawn


def draw_images(draw: Callable[[list[int]], torch.Tensor], count: int, args: argparse.Namespace) -> torch.Tensor:
    """Sample images in batches; with --folder write each batch there when it is done.

    Args:
        draw: Returns images (n, 3, H, W) uint8 with these numbers, each with the seed --seed plus its number.
        count: Number of images.

    Returns:
        (count, 3, H, W) uint8.

    Raises:
        ValueError: --out is one of the files in the folder.
    """
    paths = [] if args.folder is None else [args.folder / f'{args.seed + i:04}.png' for i in range(count)]
    if args.out.resolve() in {path.resolve() for path in paths}:
        raise ValueError(f'expected another file than those in --folder, got --out {args.out}, which is one of them')
    batches = []
    for start in range(0, count, args.batch_size):
        batches.append(draw(list(range(count))[start : start + args.batch_size]).cpu())
        for image, path in zip(batches[-1], paths[start:], strict=False):
            with replacing(path) as part:
                Image.fromarray(image.permute(1, 2, 0).numpy()).save(part, 'PNG')
    return torch.cat(batches)


def read_images(args: argparse.Namespace, img_size: tuple[int, int], skipped: SkippedImages) -> torch.Tensor:
    """Read the images to complete, (N, 3, H, W) uint8, except those that cannot be decoded."""
    if args.images:
        return load_pixels(args.images, img_size, skipped)
    images = read_cifar10(args.data, 'test')
    if images.shape[1:3] != img_size:
        made, stored = (f'{height} x {width}' for height, width in (img_size, images.shape[1:3]))
        raise ValueError(
            f'expected images of {made} pixels (H x W), as {args.checkpoint} has, got {stored} in {args.data}'
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
