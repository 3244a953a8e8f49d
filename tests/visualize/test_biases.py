import math

import pytest
import timm
import torch
from PIL import Image

from aft_vision.layers import AFTAxial, AFTLocal, CausalLocal
from aft_vision.models import create_decoder
from aft_vision.models.harden import harden
from aft_vision.ops import reference
from aft_vision.regularizers import layer_entropies
from aft_vision.visualize import (
    bias_rows,
    bias_statistics,
    draw_position_biases,
    save_figure,
)

TINY = dict(depth=2, embed_dim=16, patch_size=8, img_size=32, num_classes=3)
MODELS = {
    'conv': ('aft_conv_tiny', dict(num_heads=4, kernel_size=5)),
    'onehot': ('aft_conv_tiny', dict(mixer='onehot', num_heads=4, kernel_size=5)),
    'one head': ('aft_conv_tiny', dict(num_heads=1, kernel_size=5)),
    'axial': ('aft_axial_tiny', dict(num_heads=4, window_size=(3, 4))),
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


# One of each shape and number of heads.
@pytest.mark.parametrize('kind', ['conv', 'one head', 'axial', 'full', 'local'])
def test_the_picture_of_the_biases_is_written(tmp_path, kind):
    save_figure(draw_position_biases(make_model(kind), max_heads=3), tmp_path / 'biases.png')
    colors = Image.open(tmp_path / 'biases.png').convert('RGB').getcolors(1 << 24)
    assert len(colors) > 50


@pytest.mark.parametrize('name', ['aft_simple_tiny', 'vit_tiny_patch16_224'])
def test_a_model_without_biases_is_rejected(name):
    model = timm.create_model(name, **TINY | (dict(num_heads=1) if name.startswith('vit') else {}))
    with pytest.raises(ValueError, match=f'got {type(model).__name__}, which has none'):
        draw_position_biases(model)


@pytest.mark.parametrize('global_context', [True, False])
def test_rows_of_a_kernel_are_those_of_the_expanded_bias(global_context):
    model = timm.create_model('aft_conv_tiny', **TINY, num_heads=2, kernel_size=5, global_context=global_context)
    mixer = model.blocks[0].attn.double()
    torch.nn.init.normal_(mixer.kernel.gamma)
    outside = 0.0 if global_context else -math.inf
    expected = reference.kernel_to_bias(mixer.kernel(), (3, 4), outside).permute(2, 0, 1)
    queries = torch.tensor([0, 5, 11])
    torch.testing.assert_close(bias_rows(mixer, (3, 4), queries, 12), expected[:, queries])


@pytest.mark.parametrize('resample', [False, True])
def test_rows_of_two_biases_are_those_of_the_expanded_bias(resample):
    mixer = AFTAxial(8, num_heads=2, window_size=(2, 6), resample_bias=resample).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter)
    expected = reference.axial_to_bias(mixer.row_bias(3), mixer.column_bias(4), (3, 4)).permute(2, 0, 1)
    queries = torch.tensor([0, 5, 11])
    torch.testing.assert_close(bias_rows(mixer, (3, 4), queries, 12), expected[:, queries])


@pytest.mark.parametrize('causal', [False, True])
def test_rows_of_a_band_are_those_of_the_whole_bias(causal):
    mixer = (CausalLocal if causal else AFTLocal)(8, 9, 3).double()
    torch.nn.init.normal_(mixer.position_bias.u)
    band = mixer.position_bias()
    expected = reference.band_to_bias(band, -2)
    if causal:
        expected = expected + reference.causal_mask(9)
    queries = torch.arange(9)
    torch.testing.assert_close(bias_rows(mixer, None, queries, 9), expected[None])


def test_statistics_of_a_kernel_are_those_of_each_head_by_hand():
    model = make_model('conv').double()
    w = model.blocks[0].attn.kernel().flatten(1)
    p = [[math.exp(x) / sum(map(math.exp, head)) for x in head] for head in w.tolist()]
    entropy = sum(-sum(x * math.log(x) for x in head) for head in p) / 4
    found = bias_statistics(model, threshold=0.2)[0]
    assert found['entropy'] == pytest.approx(entropy)
    assert found['uniform'] == pytest.approx(math.log(25))
    assert found['unbiased'] == sum(abs(math.exp(x) - 1) < 0.2 for x in w.flatten().tolist()) / w.numel()
    assert found['largest'] == pytest.approx(max(abs(math.exp(x) - 1) for x in w.flatten().tolist()))


def test_the_entropy_of_a_gumbel_model_is_the_one_that_training_logs():
    name, kwargs = MODELS['conv']
    model = timm.create_model(name, **TINY, **kwargs, gumbel=True)
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.kernel.gamma)
    logged = [entropy.mean().item() for entropy in layer_entropies(model)]
    assert [row['entropy'] for row in bias_statistics(model)] == pytest.approx(logged)
    assert all(math.isnan(row['entropy']) for row in bias_statistics(harden(model)))


def test_statistics_of_a_causal_mixer_are_those_of_earlier_tokens():
    model = create_decoder('aft_local_char', depth=1, dim=8, window=5, context=16)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    (found,) = bias_statistics(model)
    assert found['entropy'] == pytest.approx(found['uniform'])
    assert found['uniform'] == pytest.approx(sum(map(math.log, range(1, 17))) / 16)
    assert (found['unbiased'], found['largest']) == (1, 0)


@pytest.mark.parametrize('kind', ['full', 'local'])
def test_statistics_of_pairs_are_those_of_the_sources_of_a_target(kind):
    found = bias_statistics(make_model(kind))[0]
    assert found['uniform'] == pytest.approx(math.log(17))
    assert 0 < found['entropy'] < found['uniform']


def test_each_option_changes_the_picture(tmp_path):
    model, drawn = make_model('conv'), set()
    before = timm.create_model('aft_conv_tiny', **TINY, num_heads=4, kernel_size=5)
    for options in ({}, {'exponentiated': True}, {'layers': [1]}, {'heads': [3, 0]}, {'before': before}):
        save_figure(draw_position_biases(model, **options), tmp_path / 'picture.png')
        drawn.add((tmp_path / 'picture.png').read_bytes())
    assert len(drawn) == 5


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'heads': [4]}, r'heads that can be drawn \(1 to 4\), got 5'),
        ({'layers': []}, r'layers that can be drawn \(1 to 2\), got none'),
        ({'max_heads': 0}, 'expected to draw at least one of 4, got 0'),
    ],
)
def test_a_head_or_layer_that_is_not_there_is_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        draw_position_biases(make_model('conv'), **options)
