import math
import sys

import pytest
import timm
import torch
from PIL import Image

from aft_vision import ops
from aft_vision.visualize import plot_history, plot_position_biases, position_biases

TINY = dict(depth=2, embed_dim=16, patch_size=8, img_size=32, num_classes=3)
MODELS = {
    'conv': ('aft_conv_tiny', dict(num_heads=4, kernel_size=5)),
    'one head': ('aft_conv_tiny', dict(num_heads=1, kernel_size=5)),
    'full': ('aft_full_tiny', {}),
    'pairwise': ('aft_full_tiny', dict(factorize_bias=False)),
    'local': ('aft_full_tiny', dict(mixer='local', window_size=3)),
}


def make_model(kind: str) -> torch.nn.Module:
    name, kwargs = MODELS[kind]
    torch.manual_seed(0)
    model = timm.create_model(name, **TINY, **kwargs)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize(
    ('kind', 'shape'),
    [
        ('conv', (4, 5, 5)),
        ('one head', (1, 5, 5)),
        ('full', (1, 17, 17)),
        ('pairwise', (1, 17, 17)),
        ('local', (1, 17, 5)),
    ],
)
def test_position_biases_have_one_picture_per_layer_and_head(kind, shape):
    assert [tuple(bias.shape) for bias in position_biases(make_model(kind))] == [shape, shape]


def test_position_biases_of_aft_conv_are_those_of_the_standardised_kernel():
    model = make_model('conv')
    kernel = model.blocks[1].attn.kernel
    w = ops.standardized_kernel(kernel.weight, kernel.gamma, kernel.beta)
    torch.testing.assert_close(position_biases(model)[1], torch.exp(w.detach()) - 1)


def test_position_biases_of_aft_full_are_those_of_the_factors():
    model = make_model('full')
    bias = model.blocks[0].attn.position_bias
    torch.testing.assert_close(position_biases(model)[0][0], torch.exp((bias.u @ bias.v.T).detach()) - 1)


def test_position_biases_of_a_gumbel_model_keep_one_offset_a_head():
    name, kwargs = MODELS['conv']
    model = timm.create_model(name, **TINY, **kwargs, gumbel=True)
    torch.nn.init.normal_(model.blocks[0].attn.kernel.gamma)
    assert (position_biases(model)[0] != 0).sum(dim=(1, 2)).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize('kind', MODELS)
def test_the_picture_of_the_biases_is_written(tmp_path, kind):
    plot_position_biases(make_model(kind), tmp_path / 'biases.png', max_heads=3)
    colors = Image.open(tmp_path / 'biases.png').convert('RGB').getcolors(1 << 24)
    assert len(colors) > 50


@pytest.mark.parametrize('name', ['aft_simple_tiny', 'vit_tiny_patch16_224'])
def test_a_model_without_biases_is_rejected(tmp_path, name):
    model = timm.create_model(name, **TINY | (dict(num_heads=1) if name.startswith('vit') else {}))
    with pytest.raises(ValueError, match=f'got {type(model).__name__}, which has none'):
        plot_position_biases(model, tmp_path / 'biases.png')


def test_fewer_than_one_head_is_rejected(tmp_path):
    with pytest.raises(ValueError, match='max_heads must be at least 1, got 0'):
        plot_position_biases(make_model('conv'), tmp_path / 'biases.png', max_heads=0)


def test_curves_are_drawn_without_the_epochs_that_were_not_evaluated(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr('matplotlib.axes.Axes.plot', lambda self, x, y, label, **k: drawn.update({label: (x, y)}))
    monkeypatch.setattr('matplotlib.axes.Axes.legend', lambda self: None)
    row = {'train_loss': 2.0, 'train_lr': 0.1, 'eval_loss': math.nan, 'eval_top1': math.nan, 'eval_top5': math.nan}
    history = [{'epoch': 0, **row}, {'epoch': 1, **row, 'eval_loss': 1.5, 'eval_top1': 40.0, 'eval_top5': 80.0}]
    plot_history(history, tmp_path / 'curves.png')
    assert drawn == {
        'training': ((1, 2), (2.0, 2.0)),
        'validation': ((2,), (1.5,)),
        'top-1': ((2,), (40.0,)),
        'top-5': ((2,), (80.0,)),
        'learning rate': ((1, 2), (0.1, 0.1)),
    }
    assert Image.open(tmp_path / 'curves.png').size[0] > 500


def test_a_missing_matplotlib_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    with pytest.raises(ImportError, match=r'aft-vision\[viz\]'):
        plot_history([], tmp_path / 'curves.png')
