#!/usr/bin/env bash
# onnxruntime 1.32.0: dynamic int8 has one scale for the whole batch, so an image's result depends on the others.
#
# `quantize_dynamic` measures the range of an activation at each call, over all rows. Beside rows a hundred times as large,
# a row of a Linear keeps hardly a digit. One guesses a scale for each row, as torchao has it. It also quantises
# convolutions, where one guesses matrix products only. Who serves requests in batches meets it:
# batches of one, or a static quantisation.
#
# Seen: error of a row alone 0.9%, beside large rows 73%; a convolution becomes ConvInteger
PACKAGES='onnxruntime==1.32.0 onnx==1.23.2 onnxscript==0.7.2 torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import onnx
import onnxruntime
import torch
from onnxruntime.quantization import quantize_dynamic

torch.manual_seed(0)
layer = torch.nn.Linear(64, 64)
rows = torch.randn(4, 64)
beside = torch.cat([rows[:1], 100 * rows[1:]])
torch.onnx.export(layer, (rows,), 'layer.onnx', dynamo=True, verbose=False)
# Weights of 7 bits: those of 8 also saturate on processors without VNNI.
quantize_dynamic('layer.onnx', 'int8.onnx', reduce_range=True)
torch.onnx.export(torch.nn.Conv2d(3, 4, 3), (torch.randn(1, 3, 8, 8),), 'convolution.onnx', dynamo=True, verbose=False)
quantize_dynamic('convolution.onnx', 'int8_convolution.onnx')
session = onnxruntime.InferenceSession('int8.onnx')
exact = layer(rows)[0].detach().numpy()


def error(batch):
    """The error of the first row, relative to its largest value."""
    (found,) = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
    return float(abs(found[0] - exact).max() / abs(exact).max())


alone, together = error(rows), error(beside)
operators = {node.op_type for node in onnx.load('int8_convolution.onnx').graph.node}
convolution = 'ConvInteger' if 'ConvInteger' in operators else 'Conv'
print(f'error of a row alone {alone:.1%}, beside large rows {together:.0%}; a convolution becomes {convolution}')
raise SystemExit(together < 10 * alone or convolution != 'ConvInteger')
P
