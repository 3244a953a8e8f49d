from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import photographs, randn
from PIL import Image
from timm.layers import set_fused_attn
from torch import Tensor, nn

from aft_vision.layers import CausalFull
from aft_vision.visualize import (
    MixerInputs,
    bias_statistics,
    capture_mixers,
    draw_attention,
    draw_key_maps,
    draw_position_biases,
    draw_relative_attention,
    implicit_attention,
    load_photograph,
    relative_attention,
    relative_mean,
    save_figure,
)
from tools.benchmark.meters import peak_memory

TINY = dict(depth=2, embed_dim=16, patch_size=8, img_size=(24, 32), num_classes=3)
MODELS = {
    'conv': ('aft_conv_tiny', dict(num_heads=4, kernel_size=5)),
    'gumbel': ('aft_conv_tiny', dict(num_heads=4, kernel_size=5, gumbel=True)),
    'window': ('aft_conv_tiny', dict(num_heads=16, kernel_size=3, global_context=False)),
    'no query': ('aft_conv_tiny', dict(num_heads=2, kernel_size=3, query_gate=False)),
    'full': ('aft_full_tiny', {}),
    'pairwise': ('aft_full_tiny', dict(factorize_bias=False, reg_tokens=2)),
    'local': ('aft_full_tiny', dict(mixer='local', window_size=3)),
    'simple': ('aft_simple_tiny', {}),
}
VIT = dict(depth=2, embed_dim=16, num_heads=2, patch_size=8, img_size=(24, 32), num_classes=3)


def make_model(kind: str, **more: object) -> nn.Module:
    name, kwargs = MODELS[kind]
    return randomized(timm.create_model(name, **{**TINY, **kwargs, **more}))


def make_vit(name: str = 'vit_tiny_patch16_224', **kwargs: object) -> nn.Module:
    return randomized(timm.create_model(name, **{**VIT, **kwargs}))


def randomized(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def op_outputs(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return what the operation of each mixer gives, in front of the projection."""
    found: list[Tensor] = []
    handles = [b.attn.proj.register_forward_pre_hook(lambda _, args: found.append(args[0])) for b in model.blocks]
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize('fused', [False, True])
@pytest.mark.parametrize('kind', MODELS)
def test_gate_times_attention_times_values_is_what_the_mixer_gives(kind, fused):
    model = make_model(kind)
    if fused:
        model = timm.utils.reparameterize_model(model)
    images = randn(2, 3, 24, 32)
    outputs = op_outputs(model, images)
    _, layers = capture_mixers(model, images)
    for inputs, expected in zip(layers, outputs, strict=True):
        heads = inputs.k.shape[2]
        queries = [0, 7, 11]
        weights = implicit_attention(inputs, queries, range(heads))
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        values = inputs.v.unflatten(2, (heads, -1))
        mixed = torch.einsum('bhqs,bshc->bqhc', weights, values).flatten(2)
        gate = 1.0 if inputs.q is None else torch.sigmoid(inputs.q[:, queries])
        torch.testing.assert_close(gate * mixed, expected[:, queries])


def test_attention_is_that_of_chosen_heads_at_any_size():
    model = make_model('conv')
    _, (inputs, _) = capture_mixers(model, randn(1, 3, 40, 16))
    assert inputs.grid == (5, 2)
    every = implicit_attention(inputs, [3], range(4))
    torch.testing.assert_close(implicit_attention(inputs, [3], [2, 0]), every[:, [2, 0]])


def test_the_attention_of_a_causal_mixer_has_no_future():
    mixer = CausalFull(4, num_tokens=6).double()
    q, k, v = (randn(1, 6, 4, seed=seed) for seed in range(3))
    weights = implicit_attention(MixerInputs(mixer, q, k, v, (1, 6), 0), range(6), range(4))
    assert not weights.triu(1).any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 6, dtype=torch.float64))


def test_relative_mean_is_the_mean_of_the_pairs_at_each_offset():
    grid, attention = (2, 3), randn(4, 6, 6)
    found = relative_mean(attention, grid)
    assert found.shape == (4, 3, 5)
    for dy in range(-1, 2):
        for dx in range(-2, 3):
            pairs = [
                attention[:, y * 3 + x, (y + dy) * 3 + x + dx]
                for y in range(2)
                for x in range(3)
                if 0 <= y + dy < 2 and 0 <= x + dx < 3
            ]
            torch.testing.assert_close(found[:, 1 + dy, 2 + dx], torch.stack(pairs).mean(0))


@pytest.mark.parametrize(
    ('name', 'kwargs'),
    [
        ('vit_tiny_patch16_224', {}),
        ('vit_tiny_patch16_224', dict(qk_norm=True, reg_tokens=3, dynamic_img_size=True)),
        ('vit_tiny_patch16_224', dict(class_token=False, global_pool='avg')),
        ('deit_tiny_distilled_patch16_224', {}),
    ],
)
def test_attention_of_a_vit_is_that_of_its_own_softmax(name, kwargs):
    images = randn(3, 3, 24, 32)
    found = relative_attention(make_vit(name, **kwargs), images)
    set_fused_attn(False)
    try:
        unfused = make_vit(name, **kwargs)
    finally:
        set_fused_attn(True)
    maps: list[Tensor] = []
    for block in unfused.blocks:
        assert not block.attn.fused_attn
        block.attn.attn_drop.register_forward_pre_hook(lambda _, args: maps.append(args[0]))
    with torch.no_grad():
        unfused(images)
    prefix = unfused.num_prefix_tokens
    expected = torch.stack([relative_mean(each[:, :, prefix:, prefix:].mean(0), (3, 4)) for each in maps])
    assert found.shape == (2, 2, 5, 7)
    torch.testing.assert_close(found, expected)


def test_batches_count_by_their_images():
    model, images = make_vit(), randn(5, 3, 24, 32)
    whole = relative_attention(model, images)
    torch.testing.assert_close(relative_attention(model, iter([images[:1], images[1:]])), whole)


def test_attention_of_aft_is_its_implicit_attention():
    model, images = make_model('full'), randn(2, 3, 24, 32)
    found = relative_attention(model, images, heads=[3, 9])
    _, layers = capture_mixers(model, images)
    expected = [implicit_attention(inputs, range(1, 13), [3, 9])[..., 1:].mean(0) for inputs in layers]
    torch.testing.assert_close(found, torch.stack([relative_mean(each, (3, 4)) for each in expected]))


@pytest.mark.parametrize('attention_blocks', [[0], [1]])
def test_a_hybrid_shows_heads_that_all_its_layers_have(attention_blocks):
    model = make_model('conv', attention_blocks=attention_blocks)
    found = relative_attention(model, randn(1, 3, 24, 32))
    # Attention has one of 64 channels.
    assert found.shape == (2, 1, 5, 7)
    assert (found > 0).all()


@pytest.mark.parametrize('name', ['resnet18', 'eva02_tiny_patch14_224'])
def test_a_model_without_such_attention_is_rejected(name):
    model = timm.create_model(name)
    with pytest.raises(ValueError, match=f'timm.layers.Attention or AFTMixer, got {type(model).__name__}'):
        relative_attention(model, torch.zeros(1, 3, 224, 224))
    with pytest.raises(ValueError, match='at least one image'):
        relative_attention(make_vit(), [])


def test_models_are_drawn_side_by_side(tmp_path):
    maps = {'ViT': torch.rand(2, 3, 5, 7), 'AFT': torch.rand(2, 4, 5, 7)}
    for name, chosen in (('both', maps), ('one', {'ViT': maps['ViT']})):
        save_figure(draw_relative_attention(chosen), tmp_path / f'{name}.png')
    both, one = (Image.open(tmp_path / f'{name}.png').convert('RGB') for name in ('both', 'one'))
    assert both.size[1] == one.size[1]
    assert both.tobytes() != one.tobytes()


def captions(figure: Any) -> list[str]:
    """The largest weights below the pictures, as multiples."""
    return [text.get_text() for text in figure.axes[0].texts if text.get_text().endswith('\u00d7')]


@pytest.fixture
def image(tmp_path) -> Path:
    path = tmp_path / 'image.png'
    photographs(1, (40, 30))[0].save(path)
    return path


def test_the_layers_of_a_hybrid_are_numbered_by_its_blocks(image):
    model = make_model('conv', attention_blocks=[0]).float()
    photograph = load_photograph(image, model, (24, 32))
    _, layers = capture_mixers(model, photograph.images)
    draw_keys, draw_weights = partial(draw_key_maps, photograph, layers), partial(draw_attention, photograph, model)
    figures = [draw_weights((1, 2)), draw_position_biases(model), draw_keys(chosen_layers=[1])]
    # A head that only the layer of AFT has.
    figures.append(draw_weights((1, 2), heads=[3], chosen_layers=[1]))
    texts = [[text.get_text() for text in figure.axes[0].texts] for figure in figures]
    numbers = [[text for text in each if text.startswith('layer ')] for each in texts]
    assert numbers == [['layer 1', 'layer 2'], ['layer 2'], ['layer 2'], ['layer 2']]
    assert [row['layer'] for row in bias_statistics(model)] == [2]
    with pytest.raises(ValueError, match=r'layers that can be drawn \(2\), got 1'):
        draw_keys(chosen_layers=[0])
    with pytest.raises(ValueError, match=r'heads that can be drawn \(1 to 1\), got 4'):
        draw_weights((1, 2), heads=[3])
    with pytest.raises(ValueError, match='in the layers 2 before and 4 heads in the layers 1, 2 after'):
        draw_position_biases(make_model('conv'), before=model)


@pytest.mark.parametrize('kind', ['conv', 'full', 'simple'])
def test_the_attention_of_any_model_is_implicit_in_aft(image, kind):
    model = make_model(kind).float()
    photograph = load_photograph(image, model, (24, 32))
    _, layers = capture_mixers(model, photograph.images)
    found = captions(draw_attention(photograph, model, (1, 2), heads=[0, 2, 3], chosen_layers=[1]))
    prefix = layers[1].num_prefix_tokens
    weights = implicit_attention(layers[1], [prefix + 1 * 4 + 2], [0, 2, 3])[0, :, 0]
    peaks = weights[:, prefix:].amax(1) * weights.shape[1]
    assert [float(text[:-1]) for text in found] == pytest.approx(peaks.tolist(), rel=0.06)


@pytest.mark.parametrize('name', ['aft_conv_nano', 'vit_tiny_patch16_224'])
def test_the_attention_of_a_token_of_a_large_photograph_takes_little_memory(image, name):
    model = timm.create_model(
        name, depth=1, embed_dim=32, num_heads=4, patch_size=8, img_size=512, num_classes=3
    ).eval()
    photograph = load_photograph(image, model, (512, 512))
    # A matrix of all 4,096 tokens has 64 MiB for each head.
    assert peak_memory(lambda: draw_attention(photograph, model, (1, 2)), torch.device('cpu')) < 2**26


def test_the_attention_of_a_vit_is_that_of_the_token(image):
    set_fused_attn(False)
    try:
        model = make_vit().float()
    finally:
        set_fused_attn(True)
    photograph = load_photograph(image, model, (24, 32))
    found = captions(draw_attention(photograph, model, (1, 2)))
    maps: list[Tensor] = []
    for block in model.blocks:
        block.attn.attn_drop.register_forward_pre_hook(lambda _, args: maps.append(args[0][0]))
    with torch.no_grad():
        model(photograph.images)
    # After the class token, of 13 tokens.
    peaks = [each[head, 1 + 1 * 4 + 2, 1:].max().item() * 13 for each in maps for head in (0, 1)]
    assert [float(text[:-1]) for text in found] == pytest.approx(peaks, rel=0.06)
    with pytest.raises(ValueError, match='row from 1 to 3 and a column from 1 to 4, got 4 and 1'):
        draw_attention(photograph, model, (3, 0))
