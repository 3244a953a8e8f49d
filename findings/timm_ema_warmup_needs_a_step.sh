#!/usr/bin/env bash
# timm 1.0.31: `ModelEmaV3(use_warmup=True)` warms up only if `update` is given the number of the step.
#
# `update(model)` takes the full decay from the first call on, without a word, so an average with decay 0.9999 stays at the
# initial weights for thousands of updates. One guesses that it counts its own updates. Who writes a training loop of their
# own meets it: `update(model, step=step)`.
#
# Seen: weight 1, average that began at 0: after update(model) 0.0003, after update(model, step=...) 1.0000
PACKAGES='timm==1.0.31 torch==2.14.1 torchvision==0.29.1'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import torch
from timm.utils import ModelEmaV3


def average(with_step):
    """The average of a weight that was 0 and is 1 for three updates."""
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(0)
    ema = ModelEmaV3(model, decay=0.9999, use_warmup=True)
    model.weight.data.fill_(1)
    for step in range(3):
        ema.update(model, **({'step': step} if with_step else {}))
    return ema.module.weight.item()


seen = average(False), average(True)
print('weight 1, average that began at 0: after update(model) {:.4f}, after update(model, step=...) {:.4f}'.format(*seen))
raise SystemExit(seen[0] > 0.01 or seen[1] < 0.5)
P
