import importlib.util
import json
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import CLOTHING, link_photographs
from torch import nn

from aft_vision.data import Source
from aft_vision.data.datasets import open_train_split
from aft_vision.models.pyramid import FeaturePyramid, SimpleFeaturePyramid
from tools import detect
from tools.average_precision import average_precision
from tools.detect import create_detector, main, schedule, suppress, update
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


def use_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every update and every scene of the evaluation take a quarter of a second."""
    monkeypatch.setattr(detect, 'time', SimpleNamespace(process_time=partial(next, count(0.0, 0.25))))


def test_the_learning_rate_rises_and_falls_to_zero():
    assert schedule(0) == pytest.approx(0.01)
    assert schedule(0.025) == pytest.approx(0.505)
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
    use_clock(monkeypatch)
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
    # 1.2 seconds end in the fifth update.
    assert (result['updates'], result['scenes'], result['cpu_seconds']) == (5, 10, 1.25)
    assert [row['cpu_seconds'] for row in result['history']] == [0.25, 0.5, 0.75, 1.0, 1.25]
    assert result['evaluation']['scenes_per_cpu_second'] == 4
    assert result['peak_memory_mb'] >= saved['state']['peak_memory_mb'] > 0
    assert result['options']['data'] == data.name
    assert json.loads((tmp_path / 'detect.json').read_text()) == result
    assert '"model": "aft_conv_nano"' in capsys.readouterr().out
    # A complete run is only evaluated again.
    again = main([*arguments, '--resume'])
    assert again['updates'] == result['updates']
    assert again['evaluation']['boxes_ap'] == result['evaluation']['boxes_ap']
    with pytest.raises(ValueError, match=r'expected --lr 0\.001, as in .*last\.pth, got 0\.01'):
        main([*arguments, '--resume', '--lr', '0.01'])
    others = link_photographs(tmp_path / 'others', 3, 3)
    with pytest.raises(ValueError, match=f'expected --data {data.name}, as in .*, got {others.name}'):
        main([*arguments, '--resume', '--data', str(others)])
    written = (tmp_path / 'last.pth').read_bytes()
    with pytest.raises(FileExistsError, match='give another --out, or --resume'):
        main(arguments)
    assert (tmp_path / 'last.pth').read_bytes() == written


def test_a_checkpoint_without_the_name_of_the_data_and_the_peak_memory_is_read(data, tmp_path, monkeypatch):
    use_clock(monkeypatch)
    arguments = options(data, tmp_path, '--cpu-minutes', '0.001')
    result = main(arguments)
    content = torch.load(tmp_path / 'last.pth', weights_only=True)
    del content['options']['data'], content['state']['peak_memory_mb']
    torch.save(content, tmp_path / 'last.pth')
    again = main([*arguments, '--resume'])
    assert again['updates'] == result['updates'] == 1
    assert again['evaluation'] == result['evaluation']
    assert again['peak_memory_mb'] > 0


@pytest.mark.parametrize('has_names', [True, False])
def test_a_run_of_other_classes_is_not_continued(data, tmp_path, monkeypatch, has_names):
    use_clock(monkeypatch)
    main(options(data, tmp_path, '--cpu-minutes', '0.001'))
    content = torch.load(tmp_path / 'last.pth', weights_only=True)
    if not has_names:
        del content['class_names']
        torch.save(content, tmp_path / 'last.pth')
    fewer = link_photographs(tmp_path / data.name, 3, 3, classes=4)
    message = r'the 10 classes of .*last\.pth, got 4' if has_names else r'cls_logits\.weight .* got'
    with pytest.raises(ValueError, match=message):
        main(options(fewer, tmp_path, '--cpu-minutes', '0.001', '--resume'))


def test_there_must_be_a_run_to_continue(data, tmp_path):
    with pytest.raises(FileNotFoundError, match=r'last\.pth to continue from.*leave out --resume'):
        main(options(data, tmp_path, '--resume'))


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (
            {'model_name': 'aft_conv_nano', 'state_dict': {}},
            r'a checkpoint of tools\.detect, got .*last\.pth of another',
        ),
        (b'cut off', r'a whole file of weights, got .*last\.pth'),
    ],
)
def test_what_is_no_run_of_a_detector_is_not_continued(data, tmp_path, content, message):
    path = tmp_path / 'last.pth'
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ValueError, match=message):
        main(options(data, tmp_path, '--resume'))


def test_a_file_in_place_of_the_folder_is_an_error_before_the_training(data, tmp_path, monkeypatch):
    monkeypatch.setattr(detect, 'train', lambda *args: pytest.fail('it trained'))
    (tmp_path / 'out').touch()
    with pytest.raises(FileExistsError, match=r'expected a folder, got the file .*out'):
        main(options(data, tmp_path / 'out'))


def test_an_object_found_under_two_classes_counts_once_for_boxes_alone():
    boxes = torch.tensor([[0.0, 0.0, 30.0, 40.0], [50.0, 10.0, 90.0, 70.0]])
    target = {'boxes': boxes, 'labels': torch.tensor([1, 2])}
    found = {
        'boxes': boxes.repeat_interleave(2, dim=0),
        'labels': torch.tensor([1, 2, 2, 1]),
        'scores': torch.tensor([0.9, 0.8, 0.7, 0.6]),
    }
    kept = suppress(found, 0.6, 100)
    assert kept['labels'].tolist() == [1, 2]
    assert average_precision([target], [found], use_classes=False)['ap'] < 90
    assert average_precision([target], [kept], use_classes=False) == {'ap': 100, 'ap50': 100}


def test_the_boxes_with_the_highest_scores_remain_up_to_the_threshold_and_the_number():
    # The last two overlap the first by 0.5 and 0.7.
    boxes = BOX * torch.tensor([[1.0], [3.0], [1.0], [1.0]])
    boxes[2:, 2] *= torch.tensor([0.5, 0.7])
    found = {'boxes': boxes, 'labels': torch.tensor([1, 1, 2, 3]), 'scores': torch.tensor([0.4, 0.3, 0.2, 0.1])}
    assert suppress(found, 0.6, 100)['labels'].tolist() == [1, 1, 2]
    assert suppress(found, 0.8, 100)['labels'].tolist() == [1, 1, 2, 3]
    found['scores'] = found['scores'].flip(0)
    assert suppress(found, 0.8, 2)['labels'].tolist() == [3, 2]


def test_a_hundred_boxes_of_an_image_are_evaluated_and_alone_a_hundred_places(data, monkeypatch):
    # 120 places, each under two classes.
    corners = 10.0 * torch.cartesian_prod(torch.arange(12), torch.arange(10)).repeat_interleave(2, dim=0)
    found = {'boxes': torch.cat([corners, corners + 9], dim=1), 'labels': torch.tensor([1, 2]).repeat(120)}
    found['scores'] = torch.linspace(0.9, 0.1, 240)
    detector = create_detector('aft_conv_nano', 10, SIZE, 32)
    monkeypatch.setattr(detector, 'forward', lambda images: [found])
    evaluated = {}

    def note(targets: object, found: list[dict[str, torch.Tensor]], use_classes: bool = True) -> dict[str, float]:
        evaluated[use_classes] = found
        return {'ap': 0.0, 'ap50': 0.0}

    monkeypatch.setattr(detect, 'average_precision', note)
    scenes = Scenes(open_train_split(Source(dir=str(data)), 1).dataset, 'train', SIZE)
    result = detect.evaluate(detector, scenes, 2)
    assert result['objects'] == sum(len(scenes[i][1]['labels']) for i in range(2))
    assert [each['boxes'].tolist() for each in evaluated[True]] == 2 * [found['boxes'][:100].tolist()]
    assert [each['boxes'].tolist() for each in evaluated[False]] == 2 * [found['boxes'][:200:2].tolist()]


@pytest.mark.parametrize(
    ('more', 'message'),
    [
        (['--size', '500'], r'multiples of 32, got --size 500'),
        (['--split', 'train'], 'another one than train'),
        (['--lr', '0'], 'must be positive'),
        (['--cpu-minutes', '-1'], 'must be positive'),
        (['--cpu-minutes', 'nan'], 'must be positive and finite'),
        (['--save-minutes', 'nan'], '--save-minutes at least 0'),
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
