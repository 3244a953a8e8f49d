import csv
import math

import pytest
import timm
import torch
from torch import nn

from aft_vision.data import Loaders
from train.config import Config, DataConfig, OptimConfig, RunConfig, ScheduleConfig
from train.engine import create_state, fit, train_one_epoch, train_step

CPU = torch.device('cpu')
DESCRIPTION = {'model_name': 'linear', 'model_kwargs': {}, 'class_names': ['a', 'b', 'c']}


def make_config(**sections: object) -> Config:
    defaults = dict(
        data=DataConfig(batch_size=8),
        optim=OptimConfig(lr=0.64, label_smoothing=0.0),
        schedule=ScheduleConfig(epochs=4, warmup_epochs=0, step='update'),
    )
    return Config(**{**defaults, **sections})


def make_model() -> nn.Module:
    """A linear classifier of 2 x 2 images with fixed first weights."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    return model


def make_batches(count: int = 6, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Separable images: the class is the channel with the largest values."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(3, (count, size), generator=generator)
    images = 0.3 * torch.randn(count, size, 3, 2, 2, generator=generator)
    images += nn.functional.one_hot(targets, 3)[..., None, None]
    return list(zip(images, targets, strict=True))


def test_losses_equal_those_of_a_plain_loop():
    torch.manual_seed(0)
    model = make_model()
    config = make_config(optim=OptimConfig(lr=0.64, weight_decay=0.1, clip_grad=0.5))
    state = create_state(model, config, updates_per_epoch=6, device=CPU)
    losses = [train_step(state, *batch).item() for batch in make_batches()]

    plain = make_model()
    groups = [{'params': [plain[1].bias], 'weight_decay': 0.0}, {'params': [plain[1].weight], 'weight_decay': 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    expected = []
    for update, (images, targets) in enumerate(make_batches()):
        for group in optimizer.param_groups:
            group['lr'] = 1e-5 + (0.01 - 1e-5) * (1 + math.cos(math.pi * update / 24)) / 2
        loss = nn.functional.cross_entropy(plain(images), targets, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        expected.append(loss.item())
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model[1].weight, plain[1].weight, rtol=1e-4, atol=1e-6)


def test_the_rate_is_per_512_images_and_warms_up_by_epoch():
    schedule = ScheduleConfig(epochs=4, warmup_epochs=2, warmup_lr=0.0, min_lr=0.0, step='epoch')
    state = create_state(make_model(), make_config(schedule=schedule), updates_per_epoch=6, device=CPU)
    rates = []
    for epoch in range(4):
        rates.append(train_one_epoch(state, make_batches(), progress=False)['lr'])
        state.scheduler.step(epoch + 1)
    assert rates == pytest.approx([0.0, 0.005, 0.005, 0.01 * (1 + math.cos(math.pi * 3 / 4)) / 2])


def test_parameters_that_the_model_exempts_do_not_decay():
    model = timm.create_model('vit_tiny_patch16_224', depth=1, embed_dim=16, num_heads=1, img_size=32, num_classes=3)
    state = create_state(model, make_config(), updates_per_epoch=1, device=CPU)
    decay = {id(p): group['weight_decay'] for group in state.optimizer.param_groups for p in group['params']}
    assert decay[id(model.pos_embed)] == 0
    assert decay[id(model.blocks[0].norm1.weight)] == 0
    assert decay[id(model.head.weight)] == 0.05


def test_autocast_gives_bfloat16_activations_and_float32_weights():
    seen = []
    model = make_model()
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    state = create_state(model, make_config(run=RunConfig(amp='bfloat16')), updates_per_epoch=6, device=CPU)
    train_step(state, *make_batches()[0])
    assert seen == [torch.bfloat16]
    assert model[1].weight.dtype == torch.float32


def test_fit_learns_and_writes_one_row_per_epoch(tmp_path):
    loaders = Loaders(make_batches(), make_batches(), ['a', 'b', 'c'])
    config = make_config(run=RunConfig(eval_every=3))
    state = create_state(make_model(), config, updates_per_epoch=6, device=CPU)
    fit(state, loaders, config, tmp_path, DESCRIPTION, progress=False)
    with (tmp_path / 'summary.csv').open() as file:
        rows = list(csv.DictReader(file))
    assert [row['epoch'] for row in rows] == ['0', '1', '2', '3']
    assert [math.isnan(float(row['eval_top1'])) for row in rows] == [True, True, False, False]
    assert float(rows[-1]['train_loss']) < float(rows[0]['train_loss'])
    assert state.best_top1 > 90
    assert state.updates == 24


def test_a_new_run_starts_a_new_log(tmp_path):
    (tmp_path / 'summary.csv').write_text('epoch,other\n0,1\n')
    config = make_config(schedule=ScheduleConfig(epochs=1, warmup_epochs=0))
    state = create_state(make_model(), config, updates_per_epoch=6, device=CPU)
    fit(state, Loaders(make_batches(), make_batches(), []), config, tmp_path, DESCRIPTION, progress=False)
    assert (tmp_path / 'summary.csv').read_text().startswith('epoch,train_loss')


def test_best_keeps_the_weights_of_the_best_epoch_and_last_those_of_the_last(tmp_path, monkeypatch):
    scores = iter([50.0, 80.0, 60.0, 80.0])
    monkeypatch.setattr('train.engine.evaluate', lambda *a, **k: {'loss': 1.0, 'top1': next(scores), 'top5': 100.0})
    config = make_config()
    state = create_state(make_model(), config, updates_per_epoch=6, device=CPU)
    fit(state, Loaders(make_batches(), [], []), config, tmp_path, DESCRIPTION, progress=False)
    best = torch.load(tmp_path / 'best.pth', weights_only=True)
    last = torch.load(tmp_path / 'last.pth', weights_only=True)
    assert (best['epoch'], best['best_top1']) == (2, 80.0)
    assert (last['epoch'], last['updates']) == (4, 24)
    assert last['model_name'] == 'linear'
    assert last['optimizer']['state']
    torch.testing.assert_close(last['state_dict'], state.model.state_dict())


def test_a_loss_that_is_not_finite_stops_the_run():
    state = create_state(make_model(), make_config(), updates_per_epoch=1, device=CPU)
    images, targets = make_batches()[0]
    with pytest.raises(RuntimeError, match=r'got nan in epoch 1, update 1; try a lower optim\.lr'):
        train_one_epoch(state, [(images * float('nan'), targets)], progress=False)
