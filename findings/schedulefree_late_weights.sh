#!/usr/bin/env bash
# schedulefree 1.4.1: weights that begin to train late take steps many times as large, in AdamW's schedule-free form.
#
# The correction of the second moment counts the steps of the group, not those of the weight, so a weight that was frozen for
# 1000 steps divides by a moment that has hardly begun; the average counts the frozen steps too. One guesses a step of the
# learning rate, as torch's AdamW, which counts for each weight. Who trains a head first and unfreezes the rest meets it: make
# a new optimizer when weights are unfrozen.
#
# Seen: first step of a gradient of 1 at learning rate 0.1, after 1000 frozen steps: AdamW 0.10, schedule-free 2.52
PACKAGES='schedulefree==1.4.1 torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import schedulefree
import torch


def first_step(make):
    """Return how far a weight moves that has its first gradient after 1000 steps of another one."""
    early, late = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = make([early, late], lr=0.1, weight_decay=0)
    scheduled = hasattr(optimizer, 'train')
    if scheduled:
        optimizer.train()
    for step in range(1001):
        early.grad = torch.ones(1)
        late.grad = torch.ones(1) if step == 1000 else None
        optimizer.step()
    # The weight itself is between the average and z, which takes the steps.
    return abs(float((optimizer.state[late]['z'] if scheduled else late).detach()))


seen = first_step(torch.optim.AdamW), first_step(schedulefree.AdamWScheduleFree)
text = 'AdamW {:.2f}, schedule-free {:.2f}'.format(*seen)
print(f'first step of a gradient of 1 at learning rate 0.1, after 1000 frozen steps: {text}')
raise SystemExit(abs(seen[0] - 0.1) > 1e-3 or seen[1] < 1)
P
