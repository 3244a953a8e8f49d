#!/usr/bin/env bash
# datasets 5.2.0: an Image column rotates by EXIF, which Pillow and timm's readers of files do not.
#
# A photograph of 64 x 48 pixels with the EXIF orientation 6 comes out of `Dataset[...]` with 48 x 64, already turned;
# `PIL.Image.open` leaves it as stored. One guesses that the column only decodes. Whoever trains on a folder and evaluates
# on the same images as a data set of Hugging Face, or the other way, meets it: the two see different images.
#
# Seen: Pillow (64, 48), the column (48, 64)
PACKAGES='datasets==5.2.0 pillow==13.0.0'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import datasets
from PIL import Image

exif = Image.Exif()
exif[0x0112] = 6
Image.new('RGB', (64, 48)).save('turned.jpg', exif=exif)
column = datasets.Dataset.from_dict({'image': ['turned.jpg']}).cast_column('image', datasets.Image())
stored, read = Image.open('turned.jpg').size, column[0]['image'].size
print(f'Pillow {stored}, the column {read}')
raise SystemExit(stored != (64, 48) or read != (48, 64))
P
