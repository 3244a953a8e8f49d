#!/usr/bin/env bash
# torch 2.14.1: bicubic `interpolate` uses another cubic with antialiasing than without, also where nothing is reduced.
#
# Antialiasing only widens the kernel where an image is made smaller, so one guesses that it changes nothing where an image
# is enlarged. But the cubic's coefficient is -0.75 without antialiasing (as OpenCV's) and -0.5 with it (as Pillow's), and
# the ONNX exporter writes both. Who resamples position embeddings meets it: timm's are antialiased, others are not.
#
# Seen: enlarged 8 to 16, normal values: differ by up to 0.25; exported coefficients [-0.75, -0.5]
PACKAGES='torch==2.14.1 onnx==1.23.2 onnxscript==0.7.2 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import onnx
import torch
from torch.nn import functional as F


class Resize(torch.nn.Module):
    def __init__(self, antialias):
        super().__init__()
        self.antialias = antialias

    def forward(self, x):
        return F.interpolate(x, size=(16, 16), mode='bicubic', antialias=self.antialias)


x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
difference = (Resize(False)(x) - Resize(True)(x)).abs().max().item()
coefficients = []
for antialias in (False, True):
    torch.onnx.export(Resize(antialias), (x,), 'resize.onnx', dynamo=True, verbose=False)
    (node,) = [node for node in onnx.load('resize.onnx').graph.node if node.op_type == 'Resize']
    coefficients += [each.f for each in node.attribute if each.name == 'cubic_coeff_a']
print(f'enlarged 8 to 16, normal values: differ by up to {difference:.2f}; exported coefficients {coefficients}')
raise SystemExit(difference < 0.1 or coefficients != [-0.75, -0.5])
P
