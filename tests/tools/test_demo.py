"""The page of the demonstration: its answers, and the page itself in a browser."""

from pathlib import Path

import pytest
import timm
import torch
from browser import CHROMIUM, Browser
from helpers import CLOTHING, save_model
from torch import nn

from aft_vision.data import CorruptImageError, Decoding, LargeImageError
from tools import demo

PHOTOGRAPHS = sorted(CLOTHING.glob('validation/*/*.jpg'))[::60]
CONV = dict(img_size=32, patch_size=8, depth=2, embed_dim=16, num_heads=4, kernel_size=3, num_classes=3)
VIT = dict(img_size=32, patch_size=8, depth=2, embed_dim=16, num_heads=2, num_classes=3)


def save(folder: Path, name: str, kwargs: dict[str, object]) -> str:
    torch.manual_seed(0)
    model = timm.create_model(name, **kwargs)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return str(save_model(folder / f'{name}.pth', name, model, kwargs, class_names=['boot', 'coat', 'hat']))


@pytest.fixture
def models(tmp_path) -> dict[str, nn.Module]:
    """AFT-conv and a ViT, both of 32 pixels."""
    paths = [save(tmp_path, 'aft_conv_tiny', CONV), save(tmp_path, 'vit_tiny_patch16_224', VIT)]
    return demo.load_models(paths)


def test_an_answer_has_the_classes_the_time_and_the_pictures_at_any_size(models):
    for name, model in models.items():
        before = {key: x.clone() for key, x in model.state_dict().items()}
        found = demo.answer(model, PHOTOGRAPHS[0], 64, (0.5, 1.0))
        assert set(found.classes) == {'boot', 'coat', 'hat'}
        assert sum(found.classes.values()) == pytest.approx(1)
        assert 0 < found.milliseconds < 10_000
        assert min(found.attention.size) > 300
        assert (found.keys is None) == (name != 'aft_conv_tiny')
        # Resizing has changed a copy.
        assert all(torch.equal(before[key], x) for key, x in model.state_dict().items())


def test_options_of_reading_reach_the_photographs(models, monkeypatch):
    with pytest.raises(LargeImageError, match='at most 5 pixels'):
        demo.answer(models['aft_conv_tiny'], PHOTOGRAPHS[0], 64, (0.5, 1.0), Decoding(max_pixels=5))
    monkeypatch.setattr(demo, 'load_models', lambda names: models)
    with pytest.raises(CorruptImageError, match='got none of'):
        demo.main(['--max-pixels', '5'])


def test_a_hybrid_is_answered_with_the_keys_of_its_aft_layers(tmp_path):
    path = save(tmp_path, 'aft_conv_tiny', {**CONV, 'depth': 3, 'attention_blocks': [0, 2]})
    (model,) = demo.load_models([path]).values()
    assert demo.answer(model, PHOTOGRAPHS[0], 32, (0.5, 0.5)).keys is not None


def test_another_token_has_another_attention(models):
    model = models['aft_conv_tiny']
    first, second = (demo.answer(model, PHOTOGRAPHS[0], 32, query).attention for query in ((0, 0), (0.9, 0.9)))
    assert first.tobytes() != second.tobytes()


def test_models_without_weights_are_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timm, 'list_models', lambda *args, **kwargs: [])
    with pytest.raises(ValueError, match='models with weights, got none; --checkpoint'):
        demo.load_models(None)
    with pytest.raises(ValueError, match='a model with weights, got nothing'):
        demo.load_models(['nothing'])


def test_a_model_without_one_grid_of_tokens_is_named(tmp_path):
    path = save(tmp_path, 'aft_pyramid_nano', {'num_classes': 3})
    with pytest.raises(ValueError, match=r'with one grid of tokens, .* got aft_pyramid_nano of'):
        demo.load_models([path])


def test_a_model_of_unknown_attention_is_named_before_the_page_is_served(tmp_path):
    path = save(tmp_path, 'beit_base_patch16_224', dict(depth=1, embed_dim=16, num_heads=2, num_classes=3))
    with pytest.raises(ValueError, match=r'mixers of timm\.layers\.Attention or AFTMixer, got Beit'):
        demo.load_models([path])


@pytest.mark.parametrize(
    ('sizes', 'patches', 'expected'),
    [
        ((224,), (16,), (64, 384, 16)),
        # 384 is no multiple of 14, and the model is made for more.
        ((518,), (14,), (56, 518, 14)),
        ((224, 512), (16, 32), (128, 512, 32)),
        ((98,), (14,), (56, 392, 14)),
        # Four steps of 112 pixels are more than both.
        ((224, 224), (16, 14), (448, 448, 112)),
    ],
)
def test_every_side_of_the_slider_is_a_multiple_of_the_patches(sizes, patches, expected):
    kwargs = [dict(CONV, img_size=size, patch_size=patch) for size, patch in zip(sizes, patches, strict=True)]
    assert demo.side_limits([timm.create_model('aft_conv_tiny', **each) for each in kwargs]) == expected


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason='needs chromium on PATH')
def test_a_browser_shows_the_answers_and_a_click_chooses_the_token(models, tmp_path):
    pytest.importorskip('gradio', reason='needs the extra demo')
    page = demo.build_page(models, PHOTOGRAPHS[:3])
    address = page.launch(prevent_thread_lock=True, quiet=True, **demo.page_theme())[1]
    pictures = "[...document.querySelectorAll('img')].filter(x => x.naturalWidth > 0).map(x => x.src).join()"
    try:
        with Browser(tmp_path) as browser:
            browser.call('Page.navigate', url=address)
            text = browser.wait_for('/ms, one image/.test(document.body.innerText) && document.body.innerText', 240)
            for words in ('aft_conv_tiny', 'vit_tiny_patch16_224', 'boot', 'coat', 'hat'):
                assert words in text
            before = browser.wait_for(pictures, 30)
            browser.click('#crop img', 0.9, 0.9)
            browser.wait_for(f'{pictures} != {before!r}', 240)
            browser.screenshot(tmp_path / 'page.png')
            assert not browser.evaluate("document.body.innerText.includes('Error')")
    finally:
        page.close()
