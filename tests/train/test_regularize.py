"""The entropy of the kernels in the loss, and the temperature of their samples."""

import csv
import math
from pathlib import Path

import pytest
import timm
import torch
from helpers import NO_AUGMENTATION, generator, randn
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from aft_vision.data import Loaders
from aft_vision.ops import reference
from train.build import create_state
from train.checkpoint import Saver
from train.distributed import World
from train.engine import fit, train_step
from train.schema import (
    Config,
    DataConfig,
    DistillConfig,
    EmaConfig,
    OptimConfig,
    RegularizeConfig,
    RunConfig,
    ScheduleConfig,
)
from train.state import TrainState

HERE = World(torch.device('cpu'))
TINY = dict(depth=2, embed_dim=16, num_heads=4, kernel_size=3, patch_size=2, num_classes=3)
DESCRIPTION = {'model_name': 'aft_conv_tiny', 'model_kwargs': TINY, 'class_names': ['a', 'b', 'c']}
ENTROPY = RegularizeConfig(kernel_entropy=0.1)


def make_model(name: str = 'aft_conv_tiny', **kwargs: object) -> nn.Module:
    """A small model whose kernels matter: a fresh one is at the entropy's maximum, where its gradient is 0."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**TINY, **kwargs})
    for key, parameter in model.named_parameters():
        if key.endswith(('gamma', 'beta')):
            nn.init.normal_(parameter, std=0.5)
    return model


def make_state(model: nn.Module | None = None, teacher: nn.Module | None = None, **sections: object) -> TrainState:
    defaults = dict(
        data=DataConfig(batch_size=8),
        augment=NO_AUGMENTATION,
        optim=OptimConfig(lr=0.64, label_smoothing=0.0),
        schedule=ScheduleConfig(epochs=2, warmup_epochs=0, warmup_lr=0.0, step='update'),
        run=RunConfig(tensorboard=False),
    )
    config = Config(**{**defaults, **sections})
    return create_state(model or make_model(), config, 4, num_classes=3, world=HERE, teacher=teacher)


def make_batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    targets = torch.randint(3, (count, 8), generator=generator())
    images = randn(count, 8, 3, 4, 4, seed=1, dtype=torch.float32)
    return list(zip(images, targets, strict=True))


def train(state: TrainState, count: int = 4) -> list[float]:
    return [train_step(state, [batch]) for batch in make_batches(count)]


def entropies(model: nn.Module) -> list[torch.Tensor]:
    """Return the entropy of each head of each layer, by the slow twin in float64."""
    return [reference.kernel_entropy(block.attn.kernel().double()) for block in model.blocks]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_an_update_follows_the_loss_plus_the_weighted_sum_over_heads_and_layers():
    state, model = make_state(regularize=ENTROPY), make_model()
    images, targets = make_batches(1)[0]
    task_loss = nn.functional.cross_entropy(model(images), targets)
    (task_loss + 0.1 * torch.cat(entropies(model)).sum()).backward()
    # What is returned, and logged as train_loss, is the loss of the task.
    assert train_step(state, [(images, targets)]) == pytest.approx(task_loss.item(), rel=1e-5)
    torch.testing.assert_close(gradients(state.model), gradients(model), rtol=1e-4, atol=1e-6)


def test_parts_of_a_batch_add_the_entropy_once():
    whole, parts = (make_state(optim=OptimConfig(lr=0.64, accumulate=n), regularize=ENTROPY) for n in (1, 4))
    images, targets = make_batches(1)[0]
    train_step(whole, [(images, targets)])
    train_step(parts, zip(images.split(2), targets.split(2), strict=True))
    torch.testing.assert_close(gradients(parts.model), gradients(whole.model), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('amp', ['bfloat16', 'float16'])
def test_autocast_and_a_scaled_loss_leave_the_gradient_of_the_entropy(amp: str):
    found = []
    for precision in ('none', amp):
        state = make_state(run=RunConfig(amp=precision, tensorboard=False), regularize=RegularizeConfig(10.0))
        # The usual first scale overflows, and the update is skipped.
        state.scaler = torch.amp.GradScaler('cpu', init_scale=16.0, enabled=precision == 'float16')
        train(state, 1)
        found.append(state.model.blocks[0].attn.kernel.gamma.grad)
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize('kind', ['soft', 'feature'])
def test_a_distilled_and_averaged_model_is_regularized_too(kind: str):
    sections = dict(distill=DistillConfig(teacher='given', kind=kind), ema=EmaConfig(decay=0.5))
    states = [make_state(teacher=make_model(), regularize=r, **sections) for r in (RegularizeConfig(), ENTROPY)]
    for state in states:
        train(state)
    plain, regularized = (torch.cat(entropies(state.averaged_model)).sum().item() for state in states)
    assert regularized < plain - 0.05


@pytest.mark.slow
def test_a_compiled_model_is_regularized_as_an_eager_one(monkeypatch):
    torch._dynamo.reset()
    graphs, compile_ = CompileCounterWithBackend('aot_eager'), torch.compile
    monkeypatch.setattr(torch, 'compile', lambda module, **kwargs: compile_(module, backend=graphs))
    regularize = RegularizeConfig(kernel_entropy=0.1, tau_end=0.1)
    weights = []
    for compiled in (False, True):
        run_config = RunConfig(compile=compiled, tensorboard=False)
        state = make_state(make_model(gumbel=True, depth=1), run=run_config, regularize=regularize)
        counts = []
        for batch in make_batches():
            train_step(state, [batch])
            counts.append(graphs.frame_count)
        # Once more when the temperature first changes, and not again.
        assert counts == ([1, 2, 2, 2] if compiled else [0, 0, 0, 0])
        weights.append(state.model.blocks[0].attn.kernel.gamma.detach())
        assert set(state.model.state_dict()) == set(make_model(depth=1).state_dict())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-4)


def run(state: TrainState, folder: Path) -> TrainState:
    loaders = Loaders(make_batches(), make_batches(), ['a', 'b', 'c'])
    return fit(state, loaders, Saver(folder, DESCRIPTION, keep=1, minutes=None), progress=False)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / 'summary.csv').open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize('gumbel', [False, True])
def test_the_entropy_is_logged_by_layer(gumbel: bool, tmp_path, capsys):
    state = make_state(make_model(gumbel=gumbel), regularize=RegularizeConfig() if gumbel else ENTROPY, run=RunConfig())
    run(state, tmp_path)
    last = rows_of(tmp_path)[-1]
    layers = [entropy.mean().item() for entropy in entropies(state.model)]
    assert [float(last[f'train_kernel_entropy_{i:02d}']) for i in (1, 2)] == pytest.approx(layers, rel=1e-5)
    assert float(last['train_kernel_entropy']) == pytest.approx(sum(layers) / 2, rel=1e-5)
    assert f'kernel entropy {sum(layers) / 2:.3f} nats' in capsys.readouterr().out
    events = EventAccumulator(str(tmp_path / 'tensorboard'))
    events.Reload()
    for layer, entropy in enumerate(layers, start=1):
        found = events.Scalars(f'kernel_entropy/layer_{layer:02d}')
        assert [event.step for event in found] == [event.step for event in events.Scalars('step/loss')] == [4, 8]
        assert found[-1].value == pytest.approx(entropy, rel=1e-5)


def test_a_model_whose_entropy_is_of_no_interest_has_no_column_of_it(tmp_path):
    run(make_state(), tmp_path)
    assert not [name for name in rows_of(tmp_path)[0] if 'entropy' in name]


@pytest.mark.parametrize('first', [ENTROPY, RegularizeConfig()])
def test_a_run_that_goes_on_with_another_weight_has_one_table(first: RegularizeConfig, tmp_path):
    second = RegularizeConfig() if first is ENTROPY else ENTROPY
    schedule = dict(warmup_epochs=0, warmup_lr=0.0, step='update')
    begun = run(make_state(regularize=first, schedule=ScheduleConfig(epochs=1, **schedule)), tmp_path)
    resumed = make_state(regularize=second)
    resumed.load_state_dict(begun.state_dict(), source='test')
    run(resumed, tmp_path)
    found = [float(row['train_kernel_entropy_02']) for row in rows_of(tmp_path)]
    assert [math.isnan(x) for x in found] == [first is not ENTROPY, second is not ENTROPY]
    assert [float(row['train_loss']) for row in rows_of(tmp_path)] == [
        row['train_loss'] for row in resumed.progress.history
    ]
    assert all(None not in row for row in rows_of(tmp_path))


def test_the_temperature_falls_by_one_factor_an_update_to_its_end():
    model = make_model(gumbel=True, tau=0.8)
    state = make_state(model, regularize=RegularizeConfig(tau_end=0.1), ema=EmaConfig(decay=0.5))
    seen = []
    state.model.blocks[1].attn.register_forward_hook(lambda mixer, args, y: seen.append(mixer.tau))
    train(state)
    train(state)
    assert seen == pytest.approx([0.8 * (0.1 / 0.8) ** (update / 7) for update in range(8)], rel=1e-12)
    # The averaged model keeps the temperature that it was made with.
    assert [block.attn.tau for block in state.averaged_model.blocks] == [0.8, 0.8]


def test_a_restored_run_goes_on_with_the_temperature_of_the_update():
    def make() -> TrainState:
        return make_state(make_model(gumbel=True), regularize=RegularizeConfig(kernel_entropy=0.1, tau_end=0.05))

    whole, begun, resumed = make(), make(), make()
    expected = train(whole) + train(whole)
    assert train(begun) == expected[:4]
    resumed.load_state_dict(begun.state_dict(), source='test')
    assert train(resumed) == expected[4:]
    assert resumed.model.blocks[0].attn.tau == whole.model.blocks[0].attn.tau == pytest.approx(0.05)


def test_a_model_without_what_is_regularized_is_rejected():
    vit = timm.create_model('vit_tiny_patch16_224', depth=1, embed_dim=16, num_heads=2, img_size=32, num_classes=3)
    with pytest.raises(ValueError, match=r'kernel_entropy to be 0 for a model without AFT-conv kernels, got 0\.1 for'):
        make_state(vit, regularize=ENTROPY)
    with pytest.raises(ValueError, match=r'regularize\.tau_end to be null without model\.gumbel, got 0\.1'):
        make_state(regularize=RegularizeConfig(tau_end=0.1))
