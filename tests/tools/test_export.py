from pathlib import Path

import pytest
import timm
import torch
from helpers import make_folder, save_model
from PIL import Image

from aft_vision.export.program import TOLERANCE
from aft_vision.export.verify import Check, InputShape
from tools import export
from tools.export import main

KWARGS = dict(depth=1, embed_dim=16, patch_size=8, num_heads=2, kernel_size=3, num_classes=3)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    more = dict(class_names=['a', 'b', 'c'], data_config={'input_size': (3, 32, 32), 'crop_pct': 0.9})
    model = timm.create_model('aft_conv_tiny', **KWARGS)
    return save_model(tmp_path / 'best.pth', 'aft_conv_tiny', model, KWARGS, best_top1=50.0, epoch=3, **more)


def test_a_checkpoint_becomes_an_onnx_file(checkpoint, tmp_path, monkeypatch, capsys):
    called = []
    checks = [Check((32, 32), 1, 2.5e-7), Check((16, 40), 3, 5e-7)]
    monkeypatch.setattr(export, 'export_onnx', lambda *args, **kwargs: called.append((args, kwargs)) or checks)
    path = main(['--checkpoint', str(checkpoint), '--format', 'onnx', '--out', str(tmp_path / 'new' / 'model.onnx')])
    shown = capsys.readouterr().out
    [((model, out, shape), kwargs)] = called
    assert '1 x 32 x 32: differs from PyTorch by 2.5e-07\n3 x 16 x 40: differs from PyTorch by 5.0e-07' in shown
    assert f'{path} is written: it takes any height and width, any batch' in shown
    assert path == out == tmp_path / 'new' / 'model.onnx'
    assert shape == InputShape((32, 32), fixed_size=False, batch=None)
    assert kwargs == {'lowering': 'conv', 'opset': 20, 'tolerance': TOLERANCE}
    saved = torch.load(checkpoint, weights_only=True)['state_dict']
    assert all(torch.equal(x, saved[name]) for name, x in model.state_dict().items())


def test_a_checkpoint_becomes_a_hub_folder_and_that_a_program(checkpoint, tmp_path, capsys):
    options = ['--format', 'hf', '--license', 'mit', '--without', 'onnx']
    folder = main(['--checkpoint', str(checkpoint), *options, '--out', str(tmp_path / 'hub')])
    assert 'model.pt2: differs from PyTorch by at most ' in capsys.readouterr().out
    assert not (folder / 'model.onnx').exists()
    card = (folder / 'README.md').read_text()
    assert '**Top-1 (validation):** 50.0 % after 3 epochs' in card
    options = ['--format', 'pt2', '--aten', '--lowering', 'matmul', '--fixed-size', '--size', '32x40', '--batch', '2']
    path = main(['--checkpoint', str(folder), *options, '--out', str(tmp_path / 'model.pt2')])
    assert 'it takes 32 x 40 only, a batch of 2' in capsys.readouterr().out
    assert torch.export.load(path).module()(torch.zeros(2, 3, 32, 40)).shape == (2, 3)


def test_a_name_of_timm_and_its_arguments_are_taken(tmp_path, capsys):
    first, *arguments = [f'{name}={value}' for name, value in KWARGS.items()]
    options = ['--model-arg', first, '--model-arg', *arguments, '--size', '32']
    options += ['--format', 'pt2', '--out', str(tmp_path / 'model.pt2')]
    path = main(['--model', 'aft_conv_tiny', *options])
    assert f'{path} is written, with random weights: it takes' in capsys.readouterr().out
    model = torch.export.load(path).module()
    assert model(torch.zeros(1, 3, 16, 24)).shape == (1, 3)
    made = timm.create_model('aft_conv_tiny', **KWARGS)
    assert sum(x.numel() for x in model.parameters()) == sum(x.numel() for x in made.parameters())


def test_int8_alone_is_the_faster_mode():
    options = ['--model', 'aft_conv_tiny', '--format', 'onnx', '--out', 'model.onnx']
    assert export.parse_args([*options, '--int8']).int8 == 'dynamic'
    assert export.parse_args(options).int8 is None


def test_photographs_that_cannot_be_decoded_are_left_out_of_the_scales(checkpoint, tmp_path, monkeypatch, capsys):
    chosen = []
    monkeypatch.setattr(export, 'export_onnx', lambda model, path, *args, **kwargs: path.write_bytes(b'float32') and [])
    monkeypatch.setattr(export, 'quantize_onnx', lambda path, mode, images: chosen.append(len(images)) or 1.0)
    data = make_folder(tmp_path, {'photographs': ['a']}, images=3) / 'photographs'
    (data / 'a' / '1.png').write_bytes(b'damaged')
    options = ['--format', 'onnx', '--int8', 'static', '--data', str(data), '--out', str(tmp_path / 'model.onnx')]
    main(['--checkpoint', str(checkpoint), *options])
    assert chosen == [2]
    assert '1 image that cannot be decoded is left out' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('photographs', 'message'),
    [(0, 'a folder with images, got .*photographs, which has none'), (1, 'needs 2 images or more')],
)
def test_a_file_without_int8_does_not_get_the_name_of_one_with_it(
    photographs, message, checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(export, 'export_onnx', lambda model, path, *args, **kwargs: path.write_bytes(b'float32') and [])
    (tmp_path / 'photographs').mkdir()
    for number in range(photographs):
        Image.new('RGB', (32, 32)).save(tmp_path / 'photographs' / f'{number}.png')
    options = ['--format', 'onnx', '--int8', 'static', '--data', str(tmp_path / 'photographs')]
    with pytest.raises(ValueError, match=message):
        main(['--checkpoint', str(checkpoint), *options, '--out', str(tmp_path / 'model.onnx')])
    assert sorted(path.name for path in tmp_path.iterdir()) == ['best.pth', 'photographs']


def test_the_checkpoint_is_not_overwritten(checkpoint, tmp_path):
    folder = str(tmp_path / 'hub')
    main(['--checkpoint', str(checkpoint), '--format', 'hf', '--without', 'code', 'onnx', 'pt2', '--out', folder])
    run = str(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
    sources = [('--checkpoint', folder, f'{folder}/../hub'), ('--model', f'local-dir:{folder}', folder)]
    sources += [('--checkpoint', folder, f'{folder}/model.safetensors'), ('--checkpoint', run, str(checkpoint))]
    sources += [('--checkpoint', str(checkpoint), str(checkpoint))]
    for option, source, out in sources:
        for file_format in ('hf', 'pt2'):
            with pytest.raises(ValueError, match=r'another place than that of .*, which is read, got --out'):
                main([option, source, '--format', file_format, '--out', out])
    assert {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()} == before
    # With an exported model in it, the folder of the run would be read as that model.
    with pytest.raises(ValueError, match=r'another folder than that of a run, got --out .*, whose best\.pth'):
        main(['--checkpoint', str(checkpoint), '--format', 'hf', '--out', run])
    assert not (tmp_path / 'config.json').exists()


def test_a_file_is_no_folder_and_a_folder_no_file(checkpoint, tmp_path):
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'a').write_text('')
    for file_format, out, message in (
        ('hf', tmp_path / 'a', 'a folder'),
        ('web', tmp_path / 'a', 'a folder'),
        ('onnx', tmp_path / 'folder', 'a file'),
    ):
        with pytest.raises(ValueError, match=f'expected {message} for --format {file_format}, got --out'):
            main(['--checkpoint', str(checkpoint), '--format', file_format, '--out', str(out)])


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['--model', 'aft_conv_huge'], r'a model that can be built, got aft_conv_huge with .*: Unknown model'),
        (['--model', 'aft_conv_tiny', '--model-arg', 'depth=1', '--size', '100'], r'multiples of the patch size'),
    ],
)
def test_what_cannot_be_exported_is_rejected(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        main([*options, '--format', 'onnx', '--out', str(tmp_path / 'model.onnx')])
