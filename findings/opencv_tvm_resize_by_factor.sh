#!/usr/bin/env bash
# OpenCV 5.0.0, TVM 0.27: an ONNX Resize by a factor uses the ratio of the rounded sizes instead.
#
# `interpolate(x, scale_factor=1.5)` makes 10 of 7 pixels, 1.5 apart as torch, ONNX and onnxruntime have it; OpenCV and TVM take
# 10 / 7, without a word, so pixels shift more and more. One guesses that a factor in the file is the factor that is used. Who
# exports a decoder or a feature pyramid with `scale_factor` and images of odd sizes meets it: give `size`, or
# `recompute_scale_factor=True`, which all three read alike.
#
# Seen: 0, 1, ..., 6 by 1.5, the last four: torch 3.83 4.50 5.17 5.83, OpenCV 4.05 4.75 5.45 6.00, TVM 4.05 4.75 5.45 6.00
PACKAGES='opencv-python-headless==5.0.0.93 apache-tvm==0.27.0.post1 onnx==1.23.2 onnxscript==0.7.2 torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import cv2
import onnx
import torch
import tvm
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx


class Enlarge(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x):
        return torch.nn.functional.interpolate(x, scale_factor=1.5, mode='bilinear', **self.options)


def by_opencv(x):
    net = cv2.dnn.readNetFromONNX('enlarge.onnx')
    net.setInput(x.numpy())
    return torch.from_numpy(net.forward())


def by_tvm(x):
    program = tvm.compile(from_onnx(onnx.load('enlarge.onnx'), keep_params_in_input=False), target='llvm')
    return torch.from_numpy(relax.VirtualMachine(program, tvm.cpu())['main'](tvm.runtime.tensor(x.numpy())).numpy())


def outputs(**options):
    """Return the ramp enlarged by torch, OpenCV and TVM."""
    ramp = torch.arange(7.0).expand(1, 1, 7, 7).contiguous()
    model = Enlarge(**options).eval()
    torch.onnx.export(model, (ramp,), 'enlarge.onnx', dynamo=True, verbose=False)
    return [each[0, 0, 3] for each in (model(ramp), by_opencv(ramp), by_tvm(ramp))]


same = outputs(recompute_scale_factor=True)
seen = outputs()
texts = (' '.join(f'{value:.2f}' for value in each[-4:]) for each in seen)
print('0, 1, ..., 6 by 1.5, the last four: torch {}, OpenCV {}, TVM {}'.format(*texts))
apart = [float((each - seen[0]).abs().max()) for each in seen[1:]]
raise SystemExit(min(apart) < 0.05 or any((each - same[0]).abs().max() > 1e-5 for each in same[1:]))
P
