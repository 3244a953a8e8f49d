#!/usr/bin/env bash
# litdata 0.2.76: a JPEG that Pillow opened from memory is encoded again, at quality 75.
#
# `optimize` keeps the bytes of a file that Pillow opened by its name. From memory, as when images come out of a tar file or a
# table, it saves the picture by Pillow's defaults. One guesses that the bytes stay, or the pixels. Who converts a data set of
# JPEGs meets it: open the files by name, or store the bytes.
#
# Seen: levels apart after a round trip: opened by name 0, from memory 80
PACKAGES='litdata==0.2.76 pillow==13.0.0 torch==2.14.1 torchvision==0.29.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
cat > convert.py <<'P'
import io
from pathlib import Path

import litdata
import numpy as np
from PIL import Image


def by_name(index):
    return {'image': Image.open('noise.jpg')}


def from_memory(index):
    return {'image': Image.open(io.BytesIO(Path('noise.jpg').read_bytes()))}


if __name__ == '__main__':
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(noise).save('noise.jpg', quality=95)
    pixels, seen = np.asarray(Image.open('noise.jpg')).astype(int), []
    for sample in (by_name, from_memory):
        litdata.optimize(sample, [0], sample.__name__, num_workers=1, chunk_size=1)
        image = np.asarray(litdata.StreamingDataset(sample.__name__)[0]['image']).astype(int)
        seen.append(int(abs(image.transpose(1, 2, 0) - pixels).max()))
    print('levels apart after a round trip: opened by name {}, from memory {}'.format(*seen))
    raise SystemExit(seen[0] != 0 or seen[1] < 10)
P
"$PY" convert.py 2> errors | tail -1
