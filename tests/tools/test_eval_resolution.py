import json
import tarfile
from pathlib import Path

import pytest
import timm
import torch
from helpers import make_folder

from tools import eval_resolution
from tools.eval_resolution import main, parse_size

CLOTHING = Path(__file__).parents[1] / 'assets' / 'clothing'
TINY = dict(depth=1, embed_dim=16, patch_size=16)


def make_checkpoint(path: Path, name: str, **kwargs: object) -> Path:
    kwargs = {**TINY, **kwargs}
    model = timm.create_model(name, **kwargs)
    torch.save({'model_name': name, 'model_kwargs': kwargs, 'state_dict': model.state_dict()}, path)
    return path


def run(checkpoint: Path, *sizes: str) -> list[dict[str, float]]:
    return main(['--checkpoint', str(checkpoint), '--data', str(CLOTHING), '--workers', '0', '--sizes', *sizes])


@pytest.mark.parametrize(
    ('name', 'kwargs'),
    [('aft_conv_tiny', dict(num_heads=4, kernel_size=3)), ('vit_tiny_patch16_224', dict(num_heads=1, img_size=32))],
)
def test_each_size_gives_a_row_in_ascending_order(tmp_path, capsys, name, kwargs):
    rows = run(make_checkpoint(tmp_path / 'best.pth', name, num_classes=10, **kwargs), '48x32', '32')
    assert [(row['height'], row['width'], row['samples']) for row in rows] == [(32, 32, 200), (48, 32, 200)]
    result = json.loads((tmp_path / 'eval_resolution.json').read_text())
    assert result['sizes'] == rows
    assert (tmp_path / 'eval_resolution.png').stat().st_size > 1000
    assert '48x32' in capsys.readouterr().out


def test_each_size_has_a_peak_memory_of_its_own(tmp_path):
    checkpoint = make_checkpoint(tmp_path / 'best.pth', 'aft_conv_tiny', num_heads=4, kernel_size=3, num_classes=10)
    small, large = run(checkpoint, '16', '512')
    assert 50 < small['peak_memory_mb'] < large['peak_memory_mb']
    assert run(checkpoint, '16')[0]['peak_memory_mb'] < large['peak_memory_mb']


def test_a_chosen_split_of_another_layout_is_accepted(tmp_path):
    checkpoint = make_checkpoint(tmp_path / 'best.pth', 'aft_conv_tiny', num_heads=4, kernel_size=3, num_classes=2)
    with tarfile.open(tmp_path / 'all.tar', 'w') as file:
        file.add(make_folder(tmp_path / 'images', {'extra': ['a', 'b']}), arcname='set')
    (tmp_path / 'images' / 'extra' / 'a' / '0.png').write_text('damaged')
    arguments = ['--checkpoint', str(checkpoint), '--workers', '0', '--sizes', '32', '--split', 'extra']
    (row,) = main([*arguments, '--data', str(tmp_path / 'all.tar')])
    assert row['samples'] == 4
    (row,) = main([*arguments, '--data', str(tmp_path / 'images'), '--skip-corrupt'])
    assert row['samples'] == 3


AFT = dict(num_heads=4, kernel_size=3)


def test_other_classes_than_those_of_the_checkpoint_are_named(tmp_path):
    names = [path.name for path in sorted((CLOTHING / 'validation').iterdir())]
    checkpoint = make_checkpoint(tmp_path / 'best.pth', 'aft_conv_tiny', num_classes=10, **AFT)
    content = torch.load(checkpoint, weights_only=True)
    torch.save({**content, 'class_names': names}, checkpoint)
    assert len(run(checkpoint, '32')) == 1
    torch.save({**content, 'class_names': ['coat', *names[1:]]}, checkpoint)
    with pytest.raises(ValueError, match=r'the classes of the model in .*, got dress for coat'):
        run(checkpoint, '32')
    torch.save({**content, 'class_names': [str(i) for i in range(10)]}, checkpoint)
    assert len(run(checkpoint, '32')) == 1


def test_the_crop_is_that_of_the_training_unless_told(tmp_path, monkeypatch):
    used = []
    original = eval_resolution.create_eval_loader
    monkeypatch.setattr(
        eval_resolution, 'create_eval_loader', lambda *a, **k: used.append(k['crop_pct']) or original(*a, **k)
    )
    checkpoint = make_checkpoint(tmp_path / 'best.pth', 'aft_conv_tiny', num_classes=10, **AFT)
    torch.save({**torch.load(checkpoint, weights_only=True), 'data_config': {'crop_pct': 0.7}}, checkpoint)
    run(checkpoint, '32')
    run(checkpoint, '32', '--crop-pct', '1')
    assert used == [0.7, 1.0]


@pytest.mark.parametrize(
    ('name', 'kwargs', 'message'),
    [
        ('aft_conv_tiny', AFT, r'multiples of the patch size \(16, 16\), got \(40, 40\)'),
        ('vit_tiny_patch16_224', dict(num_heads=1), r'multiples of the patch size \(16, 16\), got \(40, 40\)'),
    ],
)
def test_a_size_that_no_patches_fill_is_rejected_before_anything_is_evaluated(tmp_path, capsys, name, kwargs, message):
    checkpoint = make_checkpoint(tmp_path / 'best.pth', name, num_classes=10, **kwargs)
    with pytest.raises(ValueError, match=message):
        run(checkpoint, '32', '40')
    assert 'top-1' not in capsys.readouterr().out


def test_a_model_that_cannot_be_resized_is_rejected(tmp_path):
    kwargs = dict(num_classes=10)
    model = timm.create_model('mixer_s32_224', **kwargs)
    content = {'model_name': 'mixer_s32_224', 'model_kwargs': kwargs, 'state_dict': model.state_dict()}
    torch.save(content, tmp_path / 'best.pth')
    with pytest.raises(ValueError, match='a model that can be resized, got a MlpMixer'):
        run(tmp_path / 'best.pth', '64')


def test_an_exported_folder_is_accepted(tmp_path):
    model = timm.create_model('aft_conv_tiny', num_heads=4, kernel_size=3, num_classes=10, **TINY)
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    (row,) = run(tmp_path, '32')
    assert 0 <= row['top1'] <= row['top5'] <= 100


def test_classes_of_checkpoint_and_data_must_agree(tmp_path):
    checkpoint = make_checkpoint(tmp_path / 'best.pth', 'aft_conv_tiny', num_heads=4, kernel_size=3, num_classes=7)
    with pytest.raises(ValueError, match=r'expected 7 classes in .* as many as the model has, got 10'):
        run(checkpoint, '32')


@pytest.mark.parametrize(('text', 'size'), [('224', (224, 224)), ('384x256', (384, 256)), ('2X3', (2, 3))])
def test_a_size_is_a_side_or_height_by_width(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize('text', ['0', '-3', '1x2x3', 'big', '3x', '1.5'])
def test_a_wrong_size_is_rejected(text, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, text)
    assert 'size' in capsys.readouterr().err
