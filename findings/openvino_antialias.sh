#!/usr/bin/env bash
# openvino 2026.4.1: an antialiased ONNX Resize is read as an ordinary one, without a word.
#
# torch's antialiased bicubic `interpolate` becomes a Resize with `antialias=1`. onnxruntime computes it to the last digit;
# OpenVINO reads the file and leaves the attribute out. One guesses an error or the right result. Who exports a model that
# resizes its input or a position embedding meets it: resize outside the model.
#
# Seen: 40 x 48 to 20 x 24, normal values: onnxruntime differs by 0.000000, OpenVINO by 1.2
PACKAGES='openvino==2026.4.1 onnxruntime==1.32.0 onnx==1.23.2 onnxscript==0.7.2 torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import onnxruntime
import openvino
import torch
from torch.nn import functional as F


class Half(torch.nn.Module):
    def forward(self, x):
        return F.interpolate(x, size=(20, 24), mode='bicubic', antialias=True)


x = torch.randn(1, 3, 40, 48, generator=torch.Generator().manual_seed(0))
torch.onnx.export(Half(), (x,), 'half.onnx', dynamo=True, verbose=False)
session = onnxruntime.InferenceSession('half.onnx')
(first,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
second = openvino.Core().compile_model('half.onnx', 'CPU')(x.numpy())[0]
first, second = (float(abs(each - Half()(x).numpy()).max()) for each in (first, second))
print(f'40 x 48 to 20 x 24, normal values: onnxruntime differs by {first:.6f}, OpenVINO by {second:.1f}')
raise SystemExit(first > 1e-4 or second < 0.1)
P
