#!/usr/bin/env bash
# torch 2.14.1: an exported average pooling forgets its `divisor_override`, without a word.
#
# ONNX's AveragePool has no divisor of its own, and the exporter writes it as if there were none, so each value is off by a
# constant factor. One guesses an error, or a product behind the pooling. Who sums windows by `divisor_override=1` meets it:
# `avg_pool2d(x, k) * k * k`.
#
# Seen: ones, windows of 2 x 2 with divisor_override=1: torch 4, onnxruntime 1
PACKAGES='onnxruntime==1.32.0 onnx==1.23.2 onnxscript==0.7.2 torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import onnxruntime
import torch

model = torch.nn.AvgPool2d(2, divisor_override=1).eval()
ones = torch.ones(1, 1, 4, 4)
torch.onnx.export(model, (ones,), 'pool.onnx', dynamo=True, verbose=False)
session = onnxruntime.InferenceSession('pool.onnx')
(found,) = session.run(None, {session.get_inputs()[0].name: ones.numpy()})
seen = int(model(ones).max()), int(found.max())
print('ones, windows of 2 x 2 with divisor_override=1: torch {}, onnxruntime {}'.format(*seen))
raise SystemExit(seen != (4, 1))
P
