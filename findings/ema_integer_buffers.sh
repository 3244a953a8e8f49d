#!/usr/bin/env bash
# ema-pytorch 0.8.3 never copies an integer buffer; Lightning 2.6.6 averages it like a weight and cuts the fraction.
#
# An average of the weights of a model keeps whatever integers the model has: a table of indices, a mask, a schedule's counter.
# ema-pytorch leaves them as they were when it was made, even where `param_or_buffer_names_no_ema` names them; Lightning's
# `EMAWeightAveraging` makes a mixture of two tables. One guesses that they are copied, as timm's `ModelEmaV3` does. Who has
# buffers that change in training meets it: copy them before the average is used.
#
# Seen: a table 4, 3, 2, 1 that becomes 1, 2, 3, 4: timm [1, 2, 3, 4], ema-pytorch [4, 3, 2, 1], Lightning [2, 2, 2, 2]
PACKAGES='ema-pytorch==0.8.3 lightning==2.6.6 timm==1.0.31 torch==2.14.1 torchvision==0.29.1'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import logging

import lightning
import torch
from ema_pytorch import EMA
from lightning.pytorch.callbacks import EMAWeightAveraging
from timm.utils import ModelEmaV3

logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
BEFORE, AFTER = torch.tensor([4, 3, 2, 1]), torch.tensor([1, 2, 3, 4])


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.register_buffer('table', BEFORE.clone())
        self.steps = 0

    def training_step(self, batch):
        self.table.copy_(AFTER if self.steps else BEFORE)
        self.steps += 1
        return self.weight * batch.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def by_calls(average):
    """Return the table of an average that is updated by the loop."""
    model = Model()
    average = average(model)
    for _ in range(2):
        model.training_step(torch.ones(1))
        average.update(model) if isinstance(average, ModelEmaV3) else average.update()
    return getattr(average, 'module', None) or average.ema_model


def by_lightning():
    """Return the model after two steps of Lightning, which ends with the average."""
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    model = Model()
    averaging = EMAWeightAveraging(decay=0.5)
    lightning.Trainer(max_steps=2, accelerator='cpu', callbacks=[averaging], **quiet).fit(model, torch.ones(2, 1))
    return model


options = dict(beta=0.5, update_after_step=0, update_every=1, param_or_buffer_names_no_ema={'table'})
models = by_calls(lambda model: ModelEmaV3(model, decay=0.5)), by_calls(lambda model: EMA(model, **options)), by_lightning()
seen = [each.table.tolist() for each in models]
print('a table 4, 3, 2, 1 that becomes 1, 2, 3, 4: timm {}, ema-pytorch {}, Lightning {}'.format(*seen))
raise SystemExit(seen[0] != AFTER.tolist() or seen[1] != BEFORE.tolist() or seen[2] in (BEFORE.tolist(), AFTER.tolist()))
P
