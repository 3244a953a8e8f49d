#!/usr/bin/env bash
# openvino 2026.4.1: a float32 model is computed in bfloat16 on a CPU that has it, AMD Zen 4 included.
#
# `compile_model` takes bfloat16 by itself where the processor has AVX512-BF16 or AMX, so logits keep two to three digits; on
# others they keep seven. One guesses float32, as every other runtime keeps it. Who compares runtimes or machines, or reads
# small differences between logits, meets it: `{'INFERENCE_PRECISION_HINT': 'f32'}`.
#
# Seen: with bfloat16 in the processor: precision bf16, relative error 0.4%; with the hint f32 0.0001%
PACKAGES='openvino==2026.4.1 onnx==1.23.2 onnxscript==0.7.2 torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import re
from pathlib import Path

import openvino
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.Conv2d(64, 64, 3), torch.nn.Conv2d(64, 8, 3)).eval()
images = torch.randn(1, 3, 32, 32)
torch.onnx.export(model, (images,), 'model.onnx', dynamo=True, verbose=False)
exact = model(images).detach().numpy()


def outcome(**options):
    """Return the precision and the relative error."""
    compiled = openvino.Core().compile_model('model.onnx', 'CPU', options)
    precision = compiled.get_property('INFERENCE_PRECISION_HINT').to_string()
    return precision, float(abs(compiled(images.numpy())[0] - exact).max() / abs(exact).max())


has = bool(re.search('avx512_bf16|amx_bf16', Path('/proc/cpuinfo').read_text()))
(precision, error), (_, hinted) = outcome(), outcome(INFERENCE_PRECISION_HINT='f32')
words = 'with' if has else 'without'
print(f'{words} bfloat16 in the processor: precision {precision}, relative error {error:.1%}; with the hint f32 {hinted:.4%}')
raise SystemExit(hinted > 1e-5 or (precision == 'bf16') != has or (error > 1e-4) != has)
P
