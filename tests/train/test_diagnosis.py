import json
from pathlib import Path

import pytest
import torch

from aft_vision.data import Shard, create_loaders
from train.build import build_loaders, build_state, resolve_images
from train.config import load_config
from train.diagnosis import write_diagnosis
from train.distributed import World
from train.state import TrainState

ROOT = Path(__file__).parents[2]
OVERRIDES = [f'data.dir={ROOT / "tests" / "assets" / "clothing"}', 'run.amp=none', 'model.drop_path_rate=0.5']


@pytest.fixture(scope='module')
def loader():
    config = load_config(ROOT / 'configs' / 'smoke' / 'deit_recipe.yaml', OVERRIDES)
    return create_loaders(config.data, (32, 32), 100, augment=config.augment, shard=Shard(accumulate=2), num_workers=0)


@pytest.fixture
def state(loader) -> TrainState:
    """In the fourth update of the first epoch."""
    config = load_config(ROOT / 'configs' / 'smoke' / 'deit_recipe.yaml', OVERRIDES)
    state, _ = build_state(config, resolve_images(config), loader, World(torch.device('cpu')))
    state.progress.updates = 3
    state.model.train()
    return state


def diagnose(state: TrainState, loader, folder: Path) -> dict[str, object]:
    path = write_diagnosis(state, loader.train, float('nan'), folder)
    assert path == folder / 'nonfinite-4-rank0.json'
    return json.loads(path.read_text())


def test_a_sound_update_names_no_layer_and_all_its_images(state, loader, tmp_path):
    found = diagnose(state, loader, tmp_path)
    assert (found['update'], found['epoch'], found['layer'], found['weights']) == (4, 1, None, [])
    loader.set_epoch(0)
    assert found['images'] == [draw.image for draw in loader.train.sampler][300:400]


def test_the_first_layer_that_goes_wrong_and_its_weights_are_named(state, loader, tmp_path):
    with torch.no_grad():
        state.model.blocks[1].mlp.fc1.weight[3, 5] = float('inf')
    found = diagnose(state, loader, tmp_path)
    assert found['layer'] == 'blocks.1.mlp.fc1'
    assert found['weights'] == ['blocks.1.mlp.fc1.weight']


def test_images_that_are_not_finite_come_first(state, loader, tmp_path, monkeypatch):
    monkeypatch.setattr(state, 'augment', lambda images, targets: (images / 0, targets))
    assert diagnose(state, loader, tmp_path)['layer'] == ''


def test_the_diagnosis_sees_the_images_of_the_update(state, loader, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(state, 'augment', lambda images, targets: seen.append(images.clone()) or (images, targets))
    diagnose(state, loader, tmp_path)
    loader.set_epoch(0, first_update=3)
    expected = [images for _, (images, _) in zip(range(2), loader.train, strict=False)]
    torch.testing.assert_close(seen, expected)


def test_the_diagnosis_sees_mixed_images_of_native_shapes(tmp_path, monkeypatch):
    config = load_config(ROOT / 'configs' / 'smoke' / 'deit_recipe.yaml', [*OVERRIDES, 'data.max_tokens=1600'])
    world = World(torch.device('cpu'))
    loaders = build_loaders(config, resolve_images(config), world)
    state, _ = build_state(config, resolve_images(config), loaders, world)
    state.progress.updates = 3
    seen = []
    monkeypatch.setattr(state, 'augment', lambda *batch: seen.append(batch) or batch)
    assert diagnose(state, loaders, tmp_path)['layer'] is None
    loaders.set_epoch(0, first_update=3)
    for (batch, targets), _, (wanted, mixed) in zip(seen, range(2), loaders.train, strict=False):
        torch.testing.assert_close(batch['patches'], wanted['patches'], rtol=0, atol=0)
        assert torch.equal(targets, mixed)
    assert len(seen) == 2
    state.model.patch_embed.proj.weight.data.fill_(float('nan'))
    assert diagnose(state, loaders, tmp_path)['layer'] == 'patch_embed.proj'


def test_without_the_images_the_weights_are_described(state, loader, tmp_path):
    found = json.loads(write_diagnosis(state, [], 1.0, tmp_path).read_text())
    assert found['weights'] == []
    assert 'images' not in found
