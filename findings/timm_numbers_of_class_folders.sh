#!/usr/bin/env bash
# timm 1.0.31, torchvision 0.29.1: the two number the classes of a folder differently.
#
# timm sorts by natural order, class2 before class10, and gives a folder without images no number, so those behind it move
# up. torchvision sorts by characters, class10 first, and refuses an empty folder (`allow_empty=True` gives it a number). One
# guesses the order of `sorted`. Who evaluates in one what was trained in the other meets it: the accuracy is that of chance.
#
# Seen: timm {'class2': 0, 'class10': 1}, torchvision {'class1': 0, 'class10': 1, 'class2': 2}, class1 empty
PACKAGES='timm==1.0.31 torch==2.14.1 torchvision==0.29.1 pillow==13.0.0'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
from pathlib import Path

from PIL import Image
from timm.data import create_dataset
from torchvision.datasets import ImageFolder

for name in ('class1', 'class2', 'class10'):
    Path('images', name).mkdir(parents=True)
    if name != 'class1':
        Image.new('RGB', (8, 8)).save(f'images/{name}/0.png')
first = create_dataset('', root='images').reader.class_to_idx
second = ImageFolder('images', allow_empty=True).class_to_idx
print(f'timm {first}, torchvision {second}, class1 empty')
raise SystemExit(first != {'class2': 0, 'class10': 1} or second != {'class1': 0, 'class10': 1, 'class2': 2})
P
