#!/usr/bin/env bash
# torchvision 0.29.1: `adjust_hue` changes a Pillow image even by 0, and is up to 14 levels from that of a tensor.
#
# Pillow converts to bytes of hue, saturation and value and back, a tensor is converted in floating point. One guesses a few
# levels, and none for a shift of 0. Who moves colour jitter from Pillow images to tensors, or tests one against the other,
# meets it.
#
# Seen: by 0: Pillow 7 levels from the image, tensor 0; by 0.1: 14 apart
PACKAGES='torch==2.14.1 torchvision==0.29.1 pillow==13.0.0 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import numpy as np
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

image = np.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=np.uint8)


def shifted(hue):
    """The image by Pillow and as a tensor."""
    pillow = np.asarray(F.adjust_hue(Image.fromarray(image), hue)).astype(int)
    return pillow, F.adjust_hue(torch.from_numpy(image).permute(2, 0, 1), hue).permute(1, 2, 0).numpy().astype(int)


still = [int(abs(each - image).max()) for each in shifted(0.0)]
pillow, tensor = shifted(0.1)
apart = int(abs(pillow - tensor).max())
print('by 0: Pillow {} levels from the image, tensor {}; by 0.1: {} apart'.format(*still, apart))
raise SystemExit(still[0] < 2 or still[1] > 1 or apart < 8)
P
