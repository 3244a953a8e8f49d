#!/usr/bin/env bash
# Triton 3.8.0 (torch 2.14.1): in the interpreter, bfloat16 is an integer for products and sums, and is cut, not rounded.
#
# TRITON_INTERPRET=1 runs a kernel by NumPy, which has no bfloat16, so a block holds the 16 bits as integers. `tl.dot` of
# bfloat16 blocks multiplies these integers: 16 ones give about 4.2e9 instead of 16. `tl.sum` adds them. A conversion from
# float32 drops the lower bits; on a GPU it rounds to the nearest. One guesses that the interpreter gives the numbers of the
# GPU up to rounding. Whoever tests kernels without a GPU meets it: widen to float32 before products and sums.
#
# Seen: dot of ones 4228120576.0 instead of 16.0; 1.01171875 becomes 1.0078125, nearest is 1.015625
PACKAGES='torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
cat > kernels.py <<'P'
import os

os.environ['TRITON_INTERPRET'] = '1'
import torch
import triton
import triton.language as tl


@triton.jit
def product(a, b, c):
    i = tl.arange(0, 16)
    places = i[:, None] * 16 + i[None, :]
    tl.store(c + places, tl.dot(tl.load(a + places), tl.load(b + places)))


@triton.jit
def convert(a, c):
    i = tl.arange(0, 16)
    tl.store(c + i, tl.load(a + i).to(tl.bfloat16))


ones, result = torch.ones(16, 16, dtype=torch.bfloat16), torch.empty(16, 16)
product[(1,)](ones, ones, result)
value = torch.full((16,), 1.01171875)
cut = torch.empty(16, dtype=torch.bfloat16)
convert[(1,)](value, cut)
print(f'dot of ones {result[0, 0].item()} instead of 16.0;', end=' ')
print(f'{value[0].item()} becomes {cut[0].item()}, nearest is {value.bfloat16()[0].item()}')
raise SystemExit(result[0, 0].item() == 16 or cut[0].item() == value.bfloat16()[0].item())
P
"$PY" kernels.py
