"""Write an image data set to FFCV files, which the trainer reads faster than folders.

python -m tools.write_ffcv --data IMAGENET --out IMAGENET_FFCV --max-resolution 500 --raw-share 0.5
aft-vision train --config ... data.dir=IMAGENET_FFCV

Each split becomes OUT/SPLIT.beton, with its class names in OUT/SPLIT.json. DATA is a folder or tar file with
train/CLASS and val/CLASS; with --name, a data set of torchvision or Hugging Face by timm's name. Needs FFCV:
apt-get install libopencv-dev libturbojpeg0-dev pkg-config, then pip install 'aft-vision[ffcv]'.

Images are encoded again as JPEG, so they differ slightly from their source. --max-resolution is the longest side:
ImageNet's images at 500 have a shorter side of about 375 pixels, enough for crops at 224. Images that cannot be decoded
are named, counted and left out.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tools.arguments import add_decoding, add_overwrite, check_new, decoding, parse_positive
from train.command_line import CommandParser, run_command


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('--data', default='', help='folder, tar file, or root of a named data set')
    parser.add_argument('--name', default='', help='torch/... or hfds/... data set')
    parser.add_argument('--out', type=Path, required=True, help='folder of the .beton files')
    parser.add_argument('--splits', nargs='+', default=['train', 'val'], help='splits to write (default: train val)')
    parser.add_argument('--max-resolution', type=int, metavar='PX', help='longest side; larger images are resized')
    parser.add_argument('--jpeg-quality', type=int, default=90, metavar='1-100', help='(default: 90)')
    parser.add_argument(
        '--raw-share', type=float, default=0.0, metavar='0-1', help='share stored as pixels (default: 0)'
    )
    parser.add_argument('--seed', type=int, default=0, help='seed of the draw of that share (default: 0)')
    parser.add_argument('--workers', type=int, help='encoding processes (default: one per core)')
    parser.add_argument('--input-key', help='column of the image, of a named data set')
    parser.add_argument('--target-key', help='column of the class')
    parser.add_argument('--num-classes', type=parse_positive, help='number of classes, if a named data set lacks it')
    parser.add_argument('--download', action='store_true', help='download a named data set if it is missing')
    add_decoding(parser)
    # Of earlier commands: images that cannot be decoded are always left out.
    parser.add_argument('--skip-corrupt', action='store_true', help=argparse.SUPPRESS)
    add_overwrite(parser)
    parser.add_argument('--quiet', action='store_true', help='no progress bar')
    args = parser.parse_args(argv)
    for option in ('input_key', 'target_key', 'num_classes', 'download'):
        if getattr(args, option) and not args.name:
            parser.error(f'--{option.replace("_", "-")} belongs to a data set of --name')
    return args


if __name__ == '__main__':
    parse_args()

from aft_vision.cores import count_cores
from aft_vision.data.datasets import Source, Split, check_same_classes, open_eval_split
from aft_vision.data.images import describe_skipped
from aft_vision.data.layout import MissingSplitError


def main(argv: Sequence[str] | None = None) -> None:
    """Write one file per split, and print its path.

    Raises:
        ValueError: a split or an option is not valid, train and val have different classes, or a written file
            differs from its source.
        FileExistsError: a file exists and --overwrite is not given.
    """
    args = parse_args(argv)
    # Imported here, so that --help works without FFCV.
    from aft_vision.data.ffcv.writer import BetonOptions, write_beton

    options = BetonOptions(args.max_resolution, args.jpeg_quality, args.raw_share, args.seed)
    paths = {name: args.out / f'{name}.beton' for name in args.splits}
    written = [file for path in paths.values() for file in (path, path.with_suffix('.json'))]
    check_new(args, *written)
    # Open all splits first, so that nothing is written if one is missing.
    splits = {path: open_split(args, name) for name, path in paths.items()}
    if paths.keys() >= {'train', 'val'}:
        check_same_classes(*(splits[paths[name]].class_names for name in ('train', 'val')))
    workers = count_cores() if args.workers is None else args.workers
    for path, split in splits.items():
        images = write_beton(split, path, options, workers, progress=not args.quiet)
        left_out = describe_skipped(len(split.dataset) - images)
        size = f'{path.stat().st_size / 2**20:.1f} MiB'
        print(f'{path}: {images} images, {size}{f"; {left_out}" if left_out else ""}')


def open_split(args: argparse.Namespace, name: str) -> Split:
    """Open any split for evaluation, so that a skipped image is left out and not replaced.

    Raises:
        ValueError: the split or an option is not valid.
    """
    try:
        source = Source(
            dir=args.data,
            name=args.name,
            # `val` means the evaluation split of any name.
            eval_split=None if name == 'val' else name,
            download=args.download,
            num_classes=args.num_classes,
            input_key=args.input_key,
            target_key=args.target_key,
            max_image_pixels=decoding(args).max_pixels,
            bits=decoding(args).bits,
            on_corrupt_image='skip',
        )
        return open_eval_split(source)
    except MissingSplitError as error:
        raise ValueError(f'{error}; --splits names those to write') from error


if __name__ == '__main__':
    run_command(main)
