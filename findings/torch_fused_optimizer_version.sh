#!/usr/bin/env bash
# torch 2.14.1: an optimizer with `fused=True` writes parameters without raising their version.
#
# `tensor._version` counts writes in place, and caches of what depends on parameters are checked by it. `AdamW` counts its
# step, `AdamW(fused=True)` does not. One guesses that every write is counted. Who caches a product of weights meets it: the
# cache is stale after a step.
#
# Seen: writes counted by a step of AdamW 2, of AdamW(fused=True) 0; both change the weight
PACKAGES='torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import torch

seen = []
for fused in (False, True):
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    before = weight._version
    torch.optim.AdamW([weight], fused=fused).step()
    seen.append((weight._version - before, bool((weight != 1).all())))
print(f'writes counted by a step of AdamW {seen[0][0]}, of AdamW(fused=True) {seen[1][0]}; ', end='')
print('both change the weight' if seen[0][1] and seen[1][1] else 'not both change the weight')
raise SystemExit(seen[0][0] == 0 or seen[1] != (0, True))
P
