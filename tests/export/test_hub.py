import json
from typing import Any

import pytest
import timm
import torch
from timm.data import resolve_model_data_config

from aft_vision.export import export_hub_folder, export_model

TINY_VIT = dict(depth=1, embed_dim=16, num_heads=1, patch_size=8, img_size=(16, 24), num_classes=2)


def test_timm_loads_the_export_with_weights_classes_and_preprocessing(tmp_path):
    model = timm.create_model('vit_tiny_patch16_224', **TINY_VIT).eval()
    data_config = {'input_size': (3, 16, 24), 'crop_pct': 0.5, 'interpolation': 'bicubic'}
    export_model(model, tmp_path / 'export', ['boot', 'hat'], data_config)
    assert sorted(path.name for path in (tmp_path / 'export').iterdir()) == ['config.json', 'model.safetensors']
    loaded = timm.create_model(f'local-dir:{tmp_path / "export"}', pretrained=True).eval()
    images = torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loaded(images), model(images))
    assert loaded.pretrained_cfg['label_names'] == ['boot', 'hat']
    assert loaded.pretrained_cfg['crop_pct'] == 0.5


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


def make_aft(**kwargs: Any) -> torch.nn.Module:
    model = timm.create_model(
        'aft_conv_tiny', depth=1, embed_dim=16, num_heads=4, kernel_size=3, patch_size=8, num_classes=2, **kwargs
    )
    model.pretrained_cfg.update(label_names=['boot', 'hat'], input_size=(3, 16, 24), crop_pct=0.5)
    return model.eval()


def test_a_hub_folder_opens_in_timm_and_in_transformers(tmp_path):
    transformers = pytest.importorskip('transformers')
    model, images = make_aft(), torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    export_hub_folder(model, tmp_path / 'hub')
    assert sorted(path.name for path in (tmp_path / 'hub').iterdir()) == [
        'README.md',
        'config.json',
        'model.safetensors',
    ]
    loaded = timm.create_model(f'local-dir:{tmp_path / "hub"}', pretrained=True).eval()
    torch.testing.assert_close(loaded(images), model(images))
    data_config = resolve_model_data_config(loaded)
    assert (data_config['input_size'], data_config['crop_pct']) == ((3, 16, 24), 0.5)
    wrapped = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / 'hub').eval()
    torch.testing.assert_close(wrapped(images).logits, model(images), rtol=1e-4, atol=1e-5)
    assert wrapped.config.id2label == {0: 'boot', 1: 'hat'}


def test_the_model_card_says_what_the_model_is_and_how_it_is_loaded(tmp_path):
    checkpoint = {'best_top1': 71.25, 'epoch': 12}
    export_hub_folder(make_aft(), tmp_path / 'hub', (32, 48), checkpoint, license='apache-2.0')
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
        '@article{zhai2021attention,',
    ):
        assert text in card
    assert card.index('import aft_vision') < card.index('import timm')
    config = json.loads((tmp_path / 'hub' / 'config.json').read_text())
    assert config['pretrained_cfg']['input_size'] == [3, 32, 48]


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
