#!/usr/bin/env bash
# torch 2.14.1: `set_float32_matmul_precision('medium')` also acts on a CPU, where the processor has AMX.
#
# The setting is known from GPUs, and TF32 is on GPUs only, so one guesses that a CPU ignores it. `high` it does ignore.
# With `medium`, oneDNN is told that it may multiply in bfloat16: with AMX, linear layers are reported to lose about three
# of their seven digits; without it float32 stays. Who sets it for training on a GPU and evaluates on a CPU meets it, on one
# server and not on the next: leave `highest` on CPUs.
#
# Seen: bfloat16 allowed: highest False, high False, medium True; no AMX: error at highest 3e-07, at medium 4e-07
PACKAGES='torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
from pathlib import Path

import torch

torch.manual_seed(0)
layer, x = torch.nn.Linear(512, 512).requires_grad_(False), torch.randn(64, 512)
exact = x.double() @ layer.weight.double().T + layer.bias.double()
allowed, errors = [], []
for precision in ('highest', 'high', 'medium'):
    torch.set_float32_matmul_precision(precision)
    allowed.append(torch.backends.mkldnn.matmul.fp32_precision == 'bf16')
    errors.append(float((layer(x) - exact).norm() / exact.norm()))
has_amx = 'amx_bf16' in Path('/proc/cpuinfo').read_text()
print('bfloat16 allowed: highest {}, high {}, medium {};'.format(*allowed), end=' ')
print(f'{"AMX" if has_amx else "no AMX"}: error at highest {errors[0]:.0e}, at medium {errors[2]:.0e}')
raise SystemExit(allowed != [False, False, True] or errors[0] > 1e-5 or (errors[2] > 1e-4) != has_amx)
P
