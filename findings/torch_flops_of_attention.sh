#!/usr/bin/env bash
# torch 2.14.1: the FLOP counter counts no attention on a CPU.
#
# `FlopCounterMode` has formulas for the attention kernels of a GPU and none for the CPU's, whose operations it cannot see.
# One guesses that a counter of FLOPs gives the same on every device. Whoever compares a ViT with a model of convolutions or
# other products on a CPU meets it: the ViT looks cheaper than it is. `sdpa_kernel(SDPBackend.MATH)` makes it count.
#
# Seen: attention of 4 heads, 64 tokens, width 32: 0 FLOPs; as products 2097152
PACKAGES='torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

q = torch.randn(1, 4, 64, 32)
with FlopCounterMode(display=False) as fused:
    scaled_dot_product_attention(q, q, q)
with FlopCounterMode(display=False) as products, sdpa_kernel(SDPBackend.MATH):
    scaled_dot_product_attention(q, q, q)
seen = fused.get_total_flops(), products.get_total_flops()
print(f'attention of 4 heads, 64 tokens, width 32: {seen[0]} FLOPs; as products {seen[1]}')
raise SystemExit(seen != (0, 4 * 4 * 64 * 64 * 32))
P
