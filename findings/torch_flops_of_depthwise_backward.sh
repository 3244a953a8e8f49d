#!/usr/bin/env bash
# torch 2.14.1: the FLOP counter takes the backward pass of a depthwise convolution for that of a full one.
#
# The gradient of the weight is counted as if every channel met every other one, so 32 groups count 32 times too much. One
# guesses twice the forward pass, as it is without groups. Who measures a training step of MobileNet, ConvNeXt or any mixer of
# depthwise convolutions on `FlopCounterMode` meets it: count the forward pass, and take it three times.
#
# Seen: backward pass / forward pass: 1 group 2.0, 32 groups of 32 channels 33.0, 256 of 256 257.0
PACKAGES='torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import torch
from torch.utils.flop_counter import FlopCounterMode


def ratio(channels, groups):
    """The FLOPs of the backward pass over those of the forward pass."""
    layer = torch.nn.Conv2d(channels, channels, 3, padding=1, groups=groups)
    images = torch.randn(2, channels, 8, 8, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        output = layer(images)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    assert forward.get_total_flops() == 2 * output.numel() * channels // groups * 9
    return backward.get_total_flops() / forward.get_total_flops()


seen = ratio(32, 1), ratio(32, 32), ratio(256, 256)
text = 'backward pass / forward pass: 1 group {:.1f}, 32 groups of 32 channels {:.1f}, 256 of 256 {:.1f}'
print(text.format(*seen))
raise SystemExit(seen != (2, 33, 257))
P
