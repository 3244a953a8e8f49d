import importlib.util
import json
from pathlib import Path

import pytest
import torch
from helpers import CLOTHING, link_photographs
from torch import nn

from aft_vision.data import Source
from aft_vision.data.datasets import open_train_split
from aft_vision.models.pyramid import FeaturePyramid, SimpleFeaturePyramid
from tools import detect
from tools.detect import create_detector, main, schedule, update
from tools.scenes import Scenes

SIZE = 64
BOX = torch.tensor([[0.0, 0.0, 30.0, 40.0]])


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty photographs to train on and thirty to evaluate."""
    return link_photographs(tmp_path_factory.mktemp('photographs'), 3, 3)


def options(data: Path, out: Path, *more: str) -> list[str]:
    small = ['--model', 'aft_conv_nano', '--size', str(SIZE), '--channels', '32', '--batch-size', '2', '--scenes', '3']
    return [*small, '--data', str(data), '--out', str(out), '--split', 'validation', *more]


def test_the_learning_rate_rises_and_falls_to_zero():
    assert schedule(0) == 0
    assert schedule(0.025) == pytest.approx(0.5)
    assert schedule(0.05) == pytest.approx(1, abs=0.01)
    assert schedule(0.5) == pytest.approx(0.5)
    assert schedule(1) == pytest.approx(0)


@pytest.mark.parametrize(
    ('name', 'kind'),
    [
        ('aft_conv_nano', SimpleFeaturePyramid),
        ('aft_full_nano', SimpleFeaturePyramid),
        ('deit_tiny_patch16_224', SimpleFeaturePyramid),
        ('aft_pyramid_nano', FeaturePyramid),
    ],
)
def test_the_maps_are_those_of_the_backbone_if_it_has_their_strides(name, kind):
    detector = create_detector(name, 3, SIZE, 32).eval()
    assert isinstance(detector.backbone, kind)
    assert detector.backbone.strides == (8, 16, 32)
    maps = detector.backbone(torch.zeros(1, 3, SIZE, SIZE))
    assert [tuple(x.shape) for x in maps.values()] == [(1, 32, 8, 8), (1, 32, 4, 4), (1, 32, 2, 2)]


def test_a_detector_learns_a_scene(data):
    torch.manual_seed(0)
    scenes = Scenes(open_train_split(Source(dir=str(data)), 1).dataset, 'train', SIZE)
    batch = [scenes[0], scenes[1]]
    detector = create_detector('aft_pyramid_nano', 10, SIZE, 32)
    optimizer = torch.optim.AdamW(detector.parameters(), lr=2e-3)
    losses = [update(detector, optimizer, batch) for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]
    # Batch norm is not frozen.
    means = [module.running_mean for module in detector.modules() if isinstance(module, nn.BatchNorm2d)]
    assert means
    assert all(mean.any() for mean in means)


def test_a_run_continues_with_the_scenes_and_the_state_of_its_checkpoint(data, tmp_path, monkeypatch, capsys):
    losses = []

    def stop_after_two(*args: object) -> float:
        if len(losses) == 2:
            raise KeyboardInterrupt
        losses.append(update(*args))
        return losses[-1]

    drawn = []
    monkeypatch.setattr(
        Scenes, '__getitem__', lambda self, i, draw=Scenes.__getitem__: drawn.append(i) or draw(self, i)
    )
    arguments = options(data, tmp_path, '--cpu-minutes', '0.02', '--save-minutes', '0')
    monkeypatch.setattr(detect, 'update', stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    saved = torch.load(tmp_path / 'last.pth', weights_only=True)
    assert saved['state']['updates'] == 2
    monkeypatch.setattr(detect, 'update', update)
    drawn.clear()
    result = main([*arguments, '--resume'])
    assert drawn[:2] == [4, 5]
    assert drawn[-3:] == [0, 1, 2]
    assert result['history'][:2] == saved['state']['history']
    assert [row['loss'] for row in result['history'][:2]] == losses
    assert result['scenes'] == 2 * result['updates'] > 4
    assert result['cpu_seconds'] >= 1.2 > result['history'][-2]['cpu_seconds']
    assert json.loads((tmp_path / 'detect.json').read_text()) == result
    assert '"model": "aft_conv_nano"' in capsys.readouterr().out
    # A complete run is only evaluated again.
    again = main([*arguments, '--resume'])
    assert again['updates'] == result['updates']
    assert again['evaluation']['boxes_ap'] == result['evaluation']['boxes_ap']
    with pytest.raises(ValueError, match=r'expected --lr 0\.001, as in .*last\.pth, got 0\.01'):
        main([*arguments, '--resume', '--lr', '0.01'])


@pytest.mark.parametrize(
    ('more', 'message'),
    [
        (['--size', '500'], r'multiples of 32, got --size 500'),
        (['--split', 'train'], 'another one than train'),
        (['--lr', '0'], 'must be positive'),
        (['--cpu-minutes', '-1'], 'must be positive'),
    ],
)
def test_wrong_options_are_named(tmp_path, capsys, more, message):
    with pytest.raises(SystemExit):
        main(options(CLOTHING, tmp_path, *more))
    assert message in capsys.readouterr().err


def test_a_model_that_timm_does_not_have_is_named(data, tmp_path):
    with pytest.raises(ValueError, match='a model of timm, got aft_deconv'):
        main(options(data, tmp_path, '--model', 'aft_deconv'))


def test_a_loss_that_is_not_finite_ends_the_run(data):
    detector = create_detector('aft_conv_nano', 10, SIZE, 32)
    optimizer = torch.optim.SGD(detector.parameters(), lr=0.1)
    image = torch.full((3, SIZE, SIZE), torch.nan)
    with pytest.raises(FloatingPointError, match='a finite loss, got nan'):
        update(detector, optimizer, [(image, {'boxes': BOX, 'labels': torch.tensor([1])})])


def test_without_pycocotools_the_extra_is_named(data, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'aft-vision\[detect\]'"):
        main(options(data, tmp_path))
