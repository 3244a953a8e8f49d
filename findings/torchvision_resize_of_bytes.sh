#!/usr/bin/env bash
# torchvision 0.29.1: a uint8 image enlarged by the antialiased bicubic resize is up to two levels from Pillow's.
#
# Both round a sum of bytes times fixed-point weights, so one guesses at most one level. That holds where an image is made
# smaller. Enlarged noise differs by two levels in some pixels. Who compares a pipeline of tensors with one of Pillow, as
# for an exported model, meets it: a bound of one level fails.
#
# Seen: levels apart, smaller 1, larger 2
PACKAGES='torch==2.14.1 torchvision==0.29.1 pillow==13.0.0 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import numpy as np
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F


def apart(shape, size):
    """The largest difference of the two, in levels of 0 to 255."""
    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    pillow = np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BICUBIC)).astype(int)
    tensor = F.resize(torch.from_numpy(image).permute(2, 0, 1), list(size), InterpolationMode.BICUBIC, antialias=True)
    return int(abs(tensor.permute(1, 2, 0).numpy().astype(int) - pillow).max())


smaller, larger = apart((200, 300), (64, 96)), apart((64, 96), (200, 300))
print(f'levels apart, smaller {smaller}, larger {larger}')
raise SystemExit(smaller != 1 or larger != 2)
P
