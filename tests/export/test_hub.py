import json
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import save_model
from timm.data import resolve_model_data_config

from aft_vision.export import export_hub_folder, export_model, model_card
from aft_vision.models.checkpoint import load_model
from aft_vision.regularizers import prune
from aft_vision.sizes import default_size

TINY_VIT = dict(depth=1, embed_dim=16, num_heads=1, patch_size=8, img_size=(16, 24), num_classes=2)


def test_timm_loads_the_export_with_weights_classes_and_preprocessing(tmp_path):
    model = timm.create_model('vit_tiny_patch16_224', **TINY_VIT).eval()
    data_config = {'input_size': (3, 16, 24), 'crop_pct': 0.5, 'interpolation': 'bicubic'}
    export_model(model, tmp_path / 'export', ['boot', 'hat'], data_config)
    config, weights = sorted((tmp_path / 'export').iterdir())
    assert (config.name, weights.name) == ('config.json', 'model.safetensors')
    # Who may read one may read the other.
    assert config.stat().st_mode == weights.stat().st_mode
    loaded = timm.create_model(f'local-dir:{tmp_path / "export"}', pretrained=True).eval()
    images = torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loaded(images), model(images))
    assert loaded.pretrained_cfg['label_names'] == ['boot', 'hat']
    assert loaded.pretrained_cfg['crop_pct'] == 0.5


def test_the_classes_of_imagenet_are_words_in_a_folder(tmp_path):
    model = timm.create_model('vit_tiny_patch16_224', **TINY_VIT)
    export_model(model, tmp_path / 'export', ['n01440764', 'n02102040'])
    loaded = timm.create_model(f'local-dir:{tmp_path / "export"}', pretrained=True)
    assert loaded.pretrained_cfg['label_names'] == ['tench', 'English springer']


def test_an_export_that_fails_leaves_the_previous_one_whole(tmp_path, monkeypatch):
    model = timm.create_model('vit_tiny_patch16_224', **TINY_VIT)
    export_model(model, tmp_path / 'export', ['boot', 'hat'])
    before = {path.name: path.read_bytes() for path in (tmp_path / 'export').iterdir()}

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(timm.models, 'save_for_hf', fail)
    with pytest.raises(OSError, match='No space left'):
        export_model(model, tmp_path / 'export', ['other', 'names'])
    assert {path.name: path.read_bytes() for path in (tmp_path / 'export').iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ['export']


def make_aft(size: tuple[int, int] = (16, 24), **kwargs: Any) -> torch.nn.Module:
    arguments = {'depth': 1, 'embed_dim': 16, 'patch_size': 8, 'num_heads': 4, 'kernel_size': 3, 'num_classes': 2}
    model = timm.create_model('aft_conv_tiny', **{**arguments, **kwargs})
    model.pretrained_cfg.update(label_names=['boot', 'hat'], input_size=(3, *size), crop_pct=0.5)
    return model.eval()


def test_a_hub_folder_opens_in_timm_and_in_transformers(hub):
    transformers = pytest.importorskip('transformers')
    (model, folder), images = hub, torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    files = {'README.md', 'config.json', 'model.safetensors', 'model.pt2', 'modeling_aft_vision.py'}
    assert {path.name for path in folder.iterdir()} == files | {'preprocessor_config.json'}
    loaded = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
    torch.testing.assert_close(loaded(images), model(images))
    data_config = resolve_model_data_config(loaded)
    assert (data_config['input_size'], data_config['crop_pct']) == ((3, 32, 32), 0.5)
    wrapped = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    assert type(wrapped).__name__ == 'TimmWrapperForImageClassification'
    torch.testing.assert_close(wrapped(images).logits, model(images), rtol=1e-4, atol=1e-5)
    assert wrapped.config.id2label == {0: 'boot', 1: 'hat'}


def test_a_folder_with_code_has_the_processor_of_timm_unless_its_code_is_trusted(hub):
    transformers, folder = pytest.importorskip('transformers'), hub[1]
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    assert type(processor).__name__ == 'TimmWrapperImageProcessor'
    needed = [x for x in metadata.requires('aft_vision') or [] if x.startswith('transformers')]
    version = re.search(r'>=([\d.]+)', needed[0])[1]
    for name in ('modeling_aft_vision.py', 'README.md'):
        assert f'{version} or newer' in (folder / name).read_text()


def test_a_run_of_another_size_keeps_it_whatever_the_architecture_names(tmp_path):
    kwargs = dict(depth=1, embed_dim=16, num_heads=4, num_classes=2)
    data_config = {'input_size': (3, 64, 48), 'crop_pct': 1.0, 'mean': (0.5,) * 3, 'std': (0.5,) * 3}
    nano = timm.create_model('aft_conv_nano', **kwargs)
    save_model(tmp_path / 'best.pth', 'aft_conv_nano', nano, kwargs, data_config=data_config)
    model = load_model(tmp_path / 'best.pth')
    assert default_size(model) == (64, 48)
    export_hub_folder(model, tmp_path / 'same', parts=[])
    export_hub_folder(model, tmp_path / 'wider', (64, 96), parts=[])
    export_model(nano, tmp_path / 'plain', [], data_config)
    sizes = {'same': (64, 48), 'wider': (64, 96), 'plain': (64, 48)}
    assert {name: default_size(load_model(tmp_path / name)) for name in sizes} == sizes
    assert '64 x 96 pixels' in (tmp_path / 'wider' / 'README.md').read_text()
    # Who asks for another size gets it.
    assert default_size(load_model(tmp_path / 'best.pth', img_size=160)) == (160, 160)
    # Neither model is changed.
    assert (default_size(model), default_size(nano)) == ((64, 48), (96, 96))


def test_a_run_of_another_size_keeps_the_biases_of_its_own_grid(tmp_path):
    kwargs = dict(depth=1, embed_dim=16, pos_embed='none', dynamic_img_size=True, num_classes=2)
    full = timm.create_model('aft_full_nano', **kwargs)
    save_model(tmp_path / 'best.pth', 'aft_full_nano', full, kwargs, data_config={'input_size': (3, 64, 64)})
    loaded = load_model(tmp_path / 'best.pth').state_dict()
    assert all(torch.equal(x, loaded[name]) for name, x in full.state_dict().items())


def test_a_padding_run_is_exported_at_its_size(tmp_path):
    kwargs = dict(depth=1, embed_dim=16, num_heads=4, num_classes=2, dynamic_img_pad=True)
    nano = timm.create_model('aft_conv_nano', **kwargs)
    save_model(tmp_path / 'best.pth', 'aft_conv_nano', nano, kwargs, data_config={'input_size': (3, 100, 100)})
    export_hub_folder(load_model(tmp_path / 'best.pth'), tmp_path / 'hub', parts=[])
    assert default_size(load_model(tmp_path / 'hub')) == (100, 100)


def test_a_model_that_was_pruned_is_exported_as_it_is(tmp_path):
    changed = prune(make_aft(), 0.1)
    export_model(changed, tmp_path / 'export', ['boot', 'hat'])
    loaded = timm.create_model(f'local-dir:{tmp_path / "export"}', pretrained=True).eval()
    images = torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(images), changed(images))


def test_a_model_that_timm_cannot_rebuild_is_an_error_and_not_exported(tmp_path):
    pyramid: Any = timm.create_model('aft_pyramid_nano', num_classes=0)
    pyramid.prune_intermediate_layers([1])
    with pytest.raises(ValueError, match=r'a model that timm can rebuild.* Missing key.* "stages'):
        export_model(pyramid, tmp_path / 'export', [])
    assert not (tmp_path / 'export').exists()


def test_a_model_of_one_channel_has_its_own_mean_and_no_processor_of_three(tmp_path):
    export_hub_folder(make_aft((32, 32), in_chans=1), tmp_path / 'hub', parts=['code'])
    assert not (tmp_path / 'hub' / 'preprocessor_config.json').exists()
    card = (tmp_path / 'hub' / 'README.md').read_text()
    for words in ('mean (0.449,)', 'a PIL image in mode L'):
        assert words in card


def test_the_model_card_says_what_the_model_is_and_how_it_is_loaded(tmp_path):
    checkpoint = {'best_top1': 71.25, 'epoch': 12}
    export_hub_folder(make_aft(), tmp_path / 'hub', (32, 48), checkpoint, license='apache-2.0', parts=[])
    card = (tmp_path / 'hub' / 'README.md').read_text()
    parameters = sum(x.numel() for x in make_aft().parameters())
    for text in (
        'license: apache-2.0\n',
        'library_name: timm\n',
        '# Model card for aft_conv_tiny\n',
        f'**Parameters:** {parameters:,}\n',
        '**Input:** 32 x 48 pixels; takes any other that is a multiple of the patch size\n',
        '**Top-1 (validation):** 71.2 % after 12 epochs\n',
        '**Paper:** An Attention Free Transformer (arXiv:2105.14103)\n',
        "timm.create_model('local-dir:FOLDER', pretrained=True)",
        "AutoModelForImageClassification.from_pretrained('FOLDER')",
        '@article{zhai2021attention,',
    ):
        assert text in card
    assert card.index('import aft_vision') < card.index('import timm')
    config = json.loads((tmp_path / 'hub' / 'config.json').read_text())
    assert config['pretrained_cfg']['input_size'] == [3, 32, 48]


def test_the_model_card_gives_the_last_weights_no_accuracy_of_the_best(tmp_path):
    checkpoint = {'best_top1': 71.25, 'epoch': 300, 'optimizer': {}}
    export_hub_folder(make_aft(), tmp_path / 'hub', (32, 48), checkpoint, parts=[])
    assert 'Top-1' not in (tmp_path / 'hub' / 'README.md').read_text()


def test_the_card_of_another_model_does_not_speak_of_aft(tmp_path):
    model = timm.create_model('vit_tiny_patch16_224', **TINY_VIT)
    export_hub_folder(model, tmp_path / 'hub', (32, 24))
    card = (tmp_path / 'hub' / 'README.md').read_text()
    assert '32 x 24 pixels; takes only this size' in card
    assert 'aft_vision' not in card
    assert 'zhai2021attention' not in card
    loaded = timm.create_model(f'local-dir:{tmp_path / "hub"}', pretrained=True).eval()
    assert loaded(torch.zeros(1, 3, 32, 24)).shape == (1, 2)
    assert model.patch_embed.img_size == (16, 24)


def test_the_card_says_how_programs_are_loaded():
    card = model_card(timm.create_model('aft_pyramid_nano'), files=['model.onnx', 'model.pt2'])
    assert "onnxruntime.InferenceSession('FOLDER/model.onnx')" in card
    assert "torch.export.load('FOLDER/model.pt2')" in card
    assert 'trust_remote_code' not in card
    card = model_card(
        timm.create_model('aft_pyramid_nano'), files=['modeling_aft_vision.py', 'preprocessor_config.json']
    )
    assert "AutoModelForImageClassification.from_pretrained('FOLDER', trust_remote_code=True)" in card
    assert "pipeline('image-classification', 'FOLDER', trust_remote_code=True)" in card


def test_the_card_of_a_program_says_the_smallest_image(hub):
    program = torch.export.load(hub[1] / 'model.pt2').module()
    smallest = re.search(r'at least (\d+) x (\d+) pixels', (hub[1] / 'README.md').read_text())
    height, width = map(int, smallest.groups())
    assert program(torch.zeros(1, 3, height, width)).shape == (1, 2)
    with pytest.raises(AssertionError):
        program(torch.zeros(1, 3, height // 2, width))
    fixed = timm.create_model('aft_full_tiny', **TINY_VIT)
    assert 'at least' not in model_card(fixed, files=['model.pt2'])


def test_a_licence_stays_with_the_weights_and_is_unknown_if_nobody_names_one(tmp_path):
    export_hub_folder(make_aft(), tmp_path / 'unknown', parts=[])
    export_hub_folder(make_aft(), tmp_path / 'known', license='cc-by-4.0', parts=[])
    again = load_model(tmp_path / 'known')
    export_hub_folder(again, tmp_path / 'again', parts=[])
    cards = {name: (tmp_path / name / 'README.md').read_text() for name in ('unknown', 'known', 'again')}
    assert {name: re.findall('^license: (.*)$', card, re.MULTILINE) for name, card in cards.items()} == {
        'unknown': ['unknown'],
        'known': ['cc-by-4.0'],
        'again': ['cc-by-4.0'],
    }


def test_a_model_in_channels_last_is_exported_and_stays_as_it_is(tmp_path):
    models = {
        'conv': make_aft(),
        'pyramid': timm.create_model('aft_pyramid_nano', depths=(1, 1, 1, 1), num_classes=2).eval(),
    }
    for name, model in models.items():
        export_model(model, tmp_path / f'{name} before', ['boot', 'hat'])
        model.to(memory_format=torch.channels_last)
        export_hub_folder(model, tmp_path / name, parts=[])
        files = [tmp_path / folder / 'model.safetensors' for folder in (name, f'{name} before')]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert not all(x.is_contiguous() for x in model.parameters())


def test_an_unknown_part_is_rejected(tmp_path):
    with pytest.raises(ValueError, match=r'parts must be some of code, onnx, pt2, got gguf'):
        export_hub_folder(make_aft(), tmp_path / 'hub', parts=['gguf'])
    assert not (tmp_path / 'hub').exists()


def test_an_export_over_another_leaves_nothing_of_the_other_model(tmp_path):
    names = ['hubconf.py', 'model.onnx', 'model.pt2', 'modeling_aft_vision.py', 'preprocessor_config.json']
    model = make_aft()
    exports: list[Callable[[Path], Any]] = [
        lambda folder: export_hub_folder(model, folder, parts=[]),
        lambda folder: export_model(model, folder, ['boot', 'hat']),
    ]
    for export in exports:
        export_hub_folder(model, tmp_path / 'hub', parts=[])
        for name in names:
            (tmp_path / 'hub' / name).write_bytes(b'of another model')
        (tmp_path / 'hub' / 'notes.txt').write_text('by hand')
        assert all((tmp_path / 'hub' / name).exists() for name in names)
        export(tmp_path / 'hub')
        assert not any((tmp_path / 'hub' / name).exists() for name in names)
        assert (tmp_path / 'hub' / 'notes.txt').read_text() == 'by hand'


def test_names_of_another_number_of_classes_are_rejected(tmp_path):
    model = make_aft(num_classes=3)
    message = 'a name for each of the 3 classes, got 2 names'
    with pytest.raises(ValueError, match=message):
        export_hub_folder(model, tmp_path / 'hub', parts=[])
    with pytest.raises(ValueError, match=message):
        export_model(model, tmp_path / 'hub', ['boot', 'hat'])
    assert not (tmp_path / 'hub').exists()
    export_model(model, tmp_path / 'hub', [])
