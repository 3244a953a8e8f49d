#!/usr/bin/env bash
# Pillow 13.0.0, torchvision 0.29.1: two Gaussian blurs of the same sigma differ at the edges by up to 29 levels.
#
# Pillow goes on with the last pixel beyond the edge, torchvision mirrors the image; inside both are within two levels, though
# Pillow's is made of box filters. One guesses two levels everywhere. Who takes an augmentation such as 3-Augment from Pillow
# images to tensors, or tests one against the other, meets it: compare the inside.
#
# Seen: noise, sigma 2: inside 2 levels, at the edges 29
PACKAGES='torch==2.14.1 torchvision==0.29.1 pillow==13.0.0 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import numpy as np
import torch
from PIL import Image, ImageFilter
from torchvision.transforms.v2 import functional as F

image = np.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=np.uint8)
pillow = np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(2))).astype(int)
tensor = F.gaussian_blur(torch.from_numpy(image).permute(2, 0, 1), [13, 13], [2.0, 2.0]).permute(1, 2, 0).numpy()
apart = abs(tensor.astype(int) - pillow)
inside, edges = int(apart[20:-20, 20:-20].max()), int(apart.max())
print(f'noise, sigma 2: inside {inside} levels, at the edges {edges}')
raise SystemExit(inside > 2 or edges < 10)
P
