#!/usr/bin/env bash
# openvino 2026.4.1: `save_model` stores weights as float16 and clamps those above 65,504, if they are few.
#
# Compression is the default. A tensor with many values out of float16's range stays float32; a few such values are set to
# 65,504 without a word. One guesses that a saved model has the weights that it had. Who has a few very large constants, as
# the exponential of a bias, meets it: `compress_to_fp16=False`.
#
# Seen: 70000 becomes 65504, with compress_to_fp16=False 70000
PACKAGES='openvino==2026.4.1 onnx==1.23.2 onnxscript==0.7.2 torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import numpy as np
import openvino
import torch


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.cat([torch.full((4,), 70000.0), torch.ones(4000)]))

    def forward(self, x):
        return x * self.weight


torch.onnx.export(Scale(), (torch.ones(1, 4004),), 'scale.onnx', dynamo=True, verbose=False)
model = openvino.convert_model('scale.onnx')
seen = []
for options in ({}, {'compress_to_fp16': False}):
    openvino.save_model(model, 'scale.xml', **options)
    seen.append(round(float(openvino.Core().compile_model('scale.xml', 'CPU')(np.ones((1, 4004), np.float32))[0][0, 0])))
print(f'70000 becomes {seen[0]}, with compress_to_fp16=False {seen[1]}')
raise SystemExit(seen != [65504, 70000])
P
