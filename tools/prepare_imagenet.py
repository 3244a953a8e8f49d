"""Make the class folders of ImageNet from its archives as published, or of Tiny-ImageNet.

python -m tools.prepare_imagenet --archives FOLDER --out IMAGENET
python -m tools.prepare_imagenet --solution LOC_val_solution.csv --out ILSVRC/Data/CLS-LOC
python -m tools.prepare_imagenet --solution tiny-imagenet-200/val/val_annotations.txt --out tiny-imagenet-200
aft-vision train --config ... data.dir=IMAGENET

FOLDER has ILSVRC2012_devkit_t12.tar.gz, and ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar or one of them. They
become IMAGENET/train/CLASS and IMAGENET/val/CLASS. Without the archive of the validation images, those of a flat
IMAGENET/val are moved into class folders.

The copy that Kaggle serves has class folders for training already; with its LOC_val_solution.csv the images of its flat
val are moved into class folders. So are those of Tiny-ImageNet with its val_annotations.txt.

torchvision checks and unpacks the archives; after an interruption the same command starts again. At the end there are
the published 1,281,167 images for training and 50,000 for validation. Needs scipy for the development kit.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from train.command_line import CommandParser, run_command


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument('--archives', type=Path, help='folder of the archives as published')
    source.add_argument('--solution', type=Path, help="Kaggle's LOC_val_solution.csv, or val_annotations.txt")
    parser.add_argument('--out', type=Path, required=True, help='folder of the data set, with train and val')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()

from torchvision.datasets.imagenet import ARCHIVE_META

from aft_vision.data.archives import (
    read_devkit,
    read_solution,
    sort_validation,
    unpack_training,
    unpack_validation,
)

# Images of the 1,000 classes as published.
CLASSES, PUBLISHED = 1000, {'train': 1_281_167, 'val': 50_000}


def main(argv: Sequence[str] | None = None) -> None:
    """Make the folders, and print the number of images of each split.

    Raises:
        ValueError: an archive is missing or not the published one, or images are missing.
    """
    args = parse_args(argv)
    validation = args.out / 'val'
    if args.solution is not None:
        if not validation.is_dir():
            raise ValueError(f'expected the folder val of the validation images in --out {args.out}, got none')
        report(validation, sort_validation(validation, read_solution(args.solution)))
        return
    train, val = (args.archives / ARCHIVE_META[split][0] for split in ('train', 'val'))
    if not (train.is_file() or val.is_file() or validation.is_dir()):
        raise ValueError(f'expected {train.name} or {val.name} in {args.archives}, or a folder {validation}, got none')
    labels = read_devkit(args.archives, args.out)
    if train.is_file():
        report(args.out / 'train', unpack_training(train, args.out / 'train'))
    if val.is_file():
        report(validation, unpack_validation(val, validation, labels))
    elif validation.is_dir():
        report(validation, sort_validation(validation, labels))


def report(folder: Path, images: int) -> None:
    """Print the numbers of images and classes of a split.

    Raises:
        ValueError: it has the 1,000 classes, but not the published number of images.
    """
    classes = sum(path.is_dir() for path in folder.iterdir())
    if classes == CLASSES and images != PUBLISHED[folder.name]:
        raise ValueError(
            f'expected {PUBLISHED[folder.name]} images in {folder}, as published, got {images}; fetch them again'
        )
    print(f'{folder}: {images} images, {classes} classes')


if __name__ == '__main__':
    run_command(main)
