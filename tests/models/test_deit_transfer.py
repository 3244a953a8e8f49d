"""DeiT weights in AFT models: each tensor, its report, the function that they make, and what is refused."""

import logging
from collections import OrderedDict
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from helpers import generator, randn
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from torch import Tensor, nn

from aft_vision.layers import AFTMixer
from aft_vision.models.aft_vit import AFTVisionTransformer, checkpoint_filter_fn
from aft_vision.models.deit_transfer import deit_to_aft, is_deit_like
from aft_vision.models.transfer_report import TransferOutcome, summarize_transfer

SMALL: dict[str, Any] = dict(embed_dim=32, depth=2, img_size=64, num_classes=7)
CONV: dict[str, Any] = dict(SMALL, num_heads=4, kernel_size=3)
# DeiT tiny: twelve blocks of width 192, of which each projection has 192 * 192 weights and 192 biases.
PROJECTION = 12 * (192 * 192 + 192)
COPIED = {
    'patch embedding': (2, 768 * 192 + 192),
    'norms': (50, 25 * 2 * 192),
    'values': (24, PROJECTION),
    'output projections': (24, PROJECTION),
    'MLPs': (48, 12 * (8 * 192 * 192 + 5 * 192)),
    'head': (2, 192 * 1000 + 1000),
}
TOKENS = {'class token': (1, 192), 'position embedding': (1, 197 * 192)}
ATTENTION = {'queries': (24, PROJECTION), 'keys': (24, PROJECTION)}
# Copied, left out, and as initialised.
COUNTS: dict[str, tuple[dict[str, tuple[int, int]], ...]] = {
    'aft_conv_tiny': (COPIED, {**TOKENS, **ATTENTION}, {**ATTENTION, 'position biases': (36, 12 * 192 * (121 + 2))}),
    'aft_conv_tiny_k11_h32': (
        COPIED,
        {**TOKENS, **ATTENTION},
        {'queries': (24, PROJECTION), 'keys': (24, 12 * (192 * 32 + 32)), 'position biases': (36, 12 * 32 * (121 + 2))},
    ),
    'aft_axial_tiny': (
        COPIED,
        {**TOKENS, **ATTENTION},
        {
            'queries': (24, PROJECTION),
            'keys': (24, 12 * (192 * 32 + 32)),
            'position biases': (72, 12 * 32 * (27 + 2) * 2),
        },
    ),
    'aft_full_tiny': ({**COPIED, **TOKENS}, ATTENTION, {**ATTENTION, 'position biases': (24, 12 * 2 * 197 * 128)}),
}
OUT_OUT_IN = ('left out', 'left out', 'copied')
WEIGHTS = ('weight', 'bias')


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter at random: as made, biases are 0 and norms 1, and a swap of two would go unseen."""
    rng = generator(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=rng, dtype=parameter.dtype), alpha=0.2)
    return model.eval()


def make_vit(name: str = 'vit_tiny_patch16_224', **kwargs: Any) -> nn.Module:
    return randomize(timm.create_model(name, **{**SMALL, 'num_heads': 2, **kwargs}))


def make_aft(name: str = 'aft_full_tiny', **kwargs: Any) -> nn.Module:
    return randomize(timm.create_model(name, **{**(CONV if 'conv' in name else SMALL), **kwargs}), seed=1)


@pytest.fixture(scope='module')
def deit_tiny() -> nn.Module:
    return randomize(timm.create_model('deit_tiny_patch16_224'))


@pytest.mark.parametrize('name', COUNTS)
def test_a_deit_tiny_is_copied_tensor_by_tensor(deit_tiny: nn.Module, name: str):
    source, model = deit_tiny.state_dict(), timm.create_model(name)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    new, report = deit_to_aft(source, model)
    assert set(report) == set(source)
    for key, value in source.items():
        if '.qkv.' in key:
            assert torch.equal(new[key][-192:], value[2 * 192 :])
            assert torch.equal(new[key][:-192], before[key][:-192])
            assert [(outcome.part, outcome.action) for outcome in report[key]] == [*zip('qkv', OUT_OUT_IN, strict=True)]
            assert report[key][2].target == key
        elif key in before:
            assert torch.equal(new[key], value)
            assert report[key] == [TransferOutcome('copied', '', value.numel(), key)]
        else:
            assert str(report[key][0]) == 'left out (the model has no such tensor)'
    for key in new.keys() - source.keys():
        assert torch.equal(new[key], before[key])
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    model.load_state_dict(new)


def test_attention_blocks_get_queries_and_keys_too():
    vit = make_vit()
    model = make_aft('aft_conv_tiny', attention_blocks=[1], local_conv=True)
    new, report = deit_to_aft(vit.state_dict(), model)
    key = 'blocks.1.attn.qkv.weight'
    assert torch.equal(new[key], vit.state_dict()[key])
    assert [outcome.action for outcome in report[key]] == ['copied'] * 3
    assert [outcome.action for outcome in report['blocks.0.attn.qkv.weight']] == [*OUT_OUT_IN]
    model.load_state_dict(new)
    rows = {(row.action, row.what): row.tensors for row in summarize_transfer(report, model)}
    assert rows['copied', 'queries'] == rows['copied', 'keys'] == rows['as initialised', 'keys'] == 2
    assert rows['as initialised', 'local convolutions'] == 2


@pytest.mark.parametrize('name', COUNTS)
def test_the_table_of_a_deit_tiny_counts_every_parameter(deit_tiny: nn.Module, name: str):
    model = timm.create_model(name)
    _, report = deit_to_aft(deit_tiny.state_dict(), model)
    rows = summarize_transfer(report, model)
    for action, wanted in zip(('copied', 'left out', 'as initialised'), COUNTS[name], strict=True):
        assert {row.what: (row.tensors, row.parameters) for row in rows if row.action == action} == wanted
    sums = {action: sum(row.parameters for row in rows if row.action == action) for action in {r.action for r in rows}}
    assert sums['copied'] + sums['left out'] == 5_717_416
    assert sums['copied'] + sums['as initialised'] == sum(p.numel() for p in model.parameters())


class OnlyValues(nn.Module):
    """In place of attention or AFT: the projection of the values, which mixes no tokens."""

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(self.mixer, AFTMixer):
            return self.mixer.proj(self.mixer.project_qkv(x)[2])
        return self.mixer.proj(self.mixer.qkv(x).chunk(3, dim=-1)[2])


def without_mixing(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.attn = OnlyValues(block.attn)
    return model.double().eval()


BARE = dict(class_token=False, pos_embed='none', global_pool='avg', fc_norm=False)
PATHS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    'conv': ('aft_conv_tiny', BARE, {}),
    'conv without queries': ('aft_conv_tiny', BARE, dict(query_gate=False)),
    'conv, norm after pooling': ('aft_conv_tiny', {**BARE, 'fc_norm': True}, dict(fc_norm=True)),
    'full': ('aft_full_tiny', {}, {}),
    'simple': ('aft_simple_tiny', {}, {}),
    'pooled': ('aft_full_tiny', dict(global_pool='avg'), dict(global_pool='avg')),
    'layer scale': ('aft_full_tiny', dict(init_values=0.5), dict(init_values=1.0)),
    'layer scale in the model alone': ('aft_full_tiny', {}, dict(init_values=1e-5)),
    'folded layer scale': ('aft_conv_tiny', {**BARE, 'init_values': 0.5}, {}),
    'register tokens': ('aft_full_tiny', dict(reg_tokens=2), dict(reg_tokens=2)),
    'tokens without position': ('aft_full_tiny', dict(no_embed_class=True), {}),
    'position folded into tokens': ('aft_full_tiny', dict(reg_tokens=2), dict(reg_tokens=2, no_embed_class=True)),
    'norm before the blocks': ('aft_full_tiny', dict(pre_norm=True), dict(pre_norm=True)),
}


@pytest.mark.parametrize(('name', 'source', 'target'), PATHS.values(), ids=PATHS)
def test_all_but_the_mixers_computes_what_the_vit_computes(name: str, source: dict[str, Any], target: dict[str, Any]):
    vit, model = make_vit(**source).double(), make_aft(name, **target).double()
    new, _ = deit_to_aft(vit.state_dict(), model)
    model.load_state_dict(new)
    images = randn(2, 3, 64, 64)
    with torch.no_grad():
        difference = without_mixing(model)(images) - without_mixing(vit)(images)
    assert difference.abs().max() <= 1e-12


def test_a_patch_embedding_of_another_size_is_resampled_as_by_timm():
    vit, model = make_vit(patch_size=32), make_aft('aft_conv_tiny')
    new, report = deit_to_aft(vit.state_dict(), model)
    wanted = resample_patch_embed(vit.patch_embed.proj.weight, [16, 16])
    torch.testing.assert_close(new['patch_embed.proj.weight'], wanted, rtol=0, atol=0)
    assert report['patch_embed.proj.weight'][0][::4] == ('resampled', '32 x 32 to 16 x 16 pixels')


@pytest.mark.parametrize(
    ('size', 'kwargs', 'grid'),
    [(96, {}, None), (96, {'no_embed_class': True}, None), ((96, 64), {}, (6, 4)), ((64, 64), {}, None)],
    ids=['square', 'grid alone', 'told', 'same'],
)
def test_a_position_embedding_on_another_grid_is_resampled_as_by_timm(size, kwargs, grid):
    vit, model = make_vit(img_size=size, **kwargs), make_aft(img_size=(64, 128))
    new, report = deit_to_aft(vit.state_dict(), model, grid=grid)
    prefix = 0 if kwargs else 1
    old = list(vit.patch_embed.grid_size)
    wanted = resample_abs_pos_embed(vit.pos_embed, [4, 8], old, num_prefix_tokens=prefix)
    assert torch.equal(new['pos_embed'][:, -32:], wanted[:, -32:])
    assert torch.equal(new['pos_embed'][:, 0], wanted[:, 0] if prefix else torch.zeros(1, 32))
    assert report['pos_embed'][0][::4] == ('resampled', f'{old[0]} x {old[1]} to 4 x 8 tokens')


def test_the_logits_of_a_distilled_deit_are_the_mean_of_its_heads():
    vit = make_vit('deit_tiny_distilled_patch16_224')
    model = make_aft()
    new, report = deit_to_aft(vit.state_dict(), model)
    features = randn(5, 32, dtype=torch.float32)
    wanted = (vit.head(features) + vit.head_dist(features)) / 2
    torch.testing.assert_close(F.linear(features, new['head.weight'], new['head.bias']), wanted)
    assert torch.equal(new['pos_embed'], vit.pos_embed[:, [0, *range(2, 18)]])
    assert {key: report[key][0].action for key in ('head.weight', 'head_dist.bias', 'dist_token')} == {
        'head.weight': 'merged',
        'head_dist.bias': 'merged',
        'dist_token': 'left out',
    }
    assert report['pos_embed'][0].note == 'without the row of dist_token'
    other, report = deit_to_aft(vit.state_dict(), make_aft(num_classes=3))
    assert other['head.weight'].shape == (3, 32)
    assert {report[f'{head}.weight'][0].note for head in ('head', 'head_dist')} == {
        'the model has 3 classes, the source 7'
    }


def notes_of(vit: nn.Module, model: nn.Module) -> dict[str, str]:
    """Transfer, load, and give the reason for each tensor that was left out."""
    new, report = deit_to_aft(vit.state_dict(), model)
    model.load_state_dict(new)
    assert set(report) == set(vit.state_dict())
    return {key: each.note for key, outcomes in report.items() for each in outcomes if each.action == 'left out'}


@pytest.mark.parametrize(
    ('source', 'target', 'key', 'note'),
    [
        ({}, dict(num_classes=0), 'head.weight', 'the model has no such tensor'),
        ({}, dict(num_classes=3), 'head.bias', 'the model has 3 classes, the source 7'),
        ({}, dict(qkv_bias=False), 'blocks.0.attn.qkv.bias', 'the model has no such tensor'),
        ({}, dict(query_gate=False), 'blocks.0.attn.qkv.bias', 'as in the paper'),
        (dict(reg_tokens=2), dict(reg_tokens=1), 'reg_token', 'the model has no such tensor'),
        (dict(qk_norm=True), {}, 'blocks.0.attn.q_norm.weight', 'the model has no such tensor'),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else '',
)
def test_what_has_no_place_in_the_model_is_named(source, target, key: str, note: str):
    assert notes_of(make_vit(**source), make_aft(**target))[key] == note


def test_a_source_that_lacks_something_leaves_it_to_the_model():
    vit = make_vit(qkv_bias=False, num_classes=0, class_token=False, global_pool='avg', pos_embed='none')
    model = make_aft()
    before = {key: x.clone() for key, x in model.state_dict().items()}
    new, report = deit_to_aft(vit.state_dict(), model)
    for key in ('blocks.0.attn.qkv.bias', 'head.weight', 'cls_token', 'pos_embed'):
        assert torch.equal(new[key], before[key])
    # Without a class token timm pools first.
    assert report['fc_norm.weight'][0] == TransferOutcome('copied', '', 32, 'norm.weight', 'fc_norm in the source')
    initialised = {row.what for row in summarize_transfer(report, model) if row.action == 'as initialised'}
    assert initialised >= {'values', 'head', 'class token', 'position embedding', 'position biases'}


def test_the_result_has_the_dtype_of_the_model_and_tensors_of_its_own():
    source, model = make_vit().half().state_dict(), make_aft()
    new, _ = deit_to_aft(source, model)
    assert {value.dtype for value in new.values()} == {torch.float32}
    source = make_vit().state_dict()
    new, _ = deit_to_aft(source, model)
    assert not {x.data_ptr() for x in new.values()} & {x.data_ptr() for x in source.values()}


def test_a_class_token_that_the_source_lacks_keeps_its_position():
    vit = make_vit(class_token=False, global_pool='avg')
    model = make_aft()
    new, _ = deit_to_aft(vit.state_dict(), model)
    assert torch.equal(new['pos_embed'], torch.cat([model.pos_embed[:, :1], vit.pos_embed], dim=1))


def test_other_numbers_of_channels_are_adapted_as_by_timm():
    vit, model = make_vit(), make_aft('aft_conv_tiny', in_chans=1)
    new, report = deit_to_aft(vit.state_dict(), model)
    torch.testing.assert_close(new['patch_embed.proj.weight'], vit.patch_embed.proj.weight.sum(1, keepdim=True))
    assert report['patch_embed.proj.weight'][0].note == '3 to 1 channels'


def test_the_names_of_original_files_and_wrappers_are_understood():
    vit = make_vit(init_values=0.5)
    names = {'ls1.gamma': 'gamma_1', 'ls2.gamma': 'gamma_2'}
    given = {'module.pre_logits.fc.weight': torch.ones(2, 2)}
    for key, value in vit.state_dict().items():
        stem, _, last = key.rpartition('ls')
        given[f'module.{stem + names["ls" + last] if last[1:] == ".gamma" else key}'] = value
    model = make_aft(init_values=1.0)
    new, report = deit_to_aft({'model': given, 'epoch': 3}, model)
    wanted, _ = deit_to_aft(vit.state_dict(), model)
    torch.testing.assert_close(new, wanted, rtol=0, atol=0)
    assert set(report) == set(given)
    assert str(report['module.blocks.0.gamma_1'][0]) == 'copied to blocks.0.ls1.gamma'
    assert report['module.pre_logits.fc.weight'][0].action == 'left out'


def test_biases_beside_the_projection_are_placed():
    state = make_vit().state_dict()
    fused = state.pop('blocks.0.attn.qkv.bias')
    state.update({'blocks.0.attn.q_bias': fused[:32], 'blocks.0.attn.v_bias': fused[64:]})
    new, report = deit_to_aft(state, make_aft())
    assert torch.equal(new['blocks.0.attn.qkv.bias'][64:], fused[64:])
    assert str(report['blocks.0.attn.q_bias'][0]) == 'q: left out (as in the paper)'
    assert str(report['blocks.0.attn.v_bias'][0]) == 'v: copied to blocks.0.attn.qkv.bias'


def test_aft_local_takes_the_weights_too():
    model = AFTVisionTransformer(mixer='local', window_size=3, **SMALL)
    assert set(notes_of(make_vit(), model)) == {f'blocks.{i}.attn.qkv.{kind}' for i in (0, 1) for kind in WEIGHTS}


@pytest.mark.parametrize('format', ['pth', 'safetensors'])
@pytest.mark.parametrize('name', ['aft_conv_tiny', 'aft_full_tiny'])
def test_timm_loads_a_file_of_a_deit(tmp_path, caplog, name: str, format: str):
    vit, file = make_vit(), str(tmp_path / f'deit.{format}')
    state = dict(reversed(vit.state_dict().items()))
    if format == 'pth':
        torch.save({'model': state}, file)
    else:
        save_file(state, file)
    kwargs = CONV if 'conv' in name else SMALL
    with caplog.at_level(logging.WARNING, 'aft_vision.models.aft_vit'):
        overlay = dict(file=file, num_classes=7)
        model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)
    assert torch.equal(model.head.weight, vit.head.weight)
    assert torch.equal(model.blocks[1].attn.qkv.weight[-32:], vit.blocks[1].attn.qkv.weight[-32:])
    left_out = 'queries, keys' if 'full' in name else 'position embedding, class token'
    (record,) = caplog.records
    assert all(what in record.getMessage() for what in left_out.split(', '))
    # By timm's rule a head for other classes than the file's is new.
    model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **{**kwargs, 'num_classes': 3})
    assert model.head.weight.shape == (3, 32)
    assert torch.equal(model.norm.weight, vit.norm.weight)


@pytest.mark.parametrize('classes', [7, 1000])
def test_a_head_that_timm_drops_is_warned_of(tmp_path, caplog, classes: int):
    torch.save(make_vit(num_classes=classes).state_dict(), tmp_path / 'deit.pth')
    overlay = dict(file=str(tmp_path / 'deit.pth'))
    kwargs = {**CONV, 'num_classes': classes}
    timm.create_model('aft_conv_tiny', pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)
    hint = 'timm makes a new head unless pretrained_cfg_overlay has num_classes=7'
    assert (hint in caplog.text) == (classes == 7)


@pytest.mark.parametrize('name', ['aft_conv_tiny', 'aft_full_tiny', 'aft_simple_tiny'])
def test_a_checkpoint_of_the_models_own_kind_is_no_transfer(caplog, name: str):
    state = make_aft(name).state_dict()
    del state['head.weight']
    model = make_aft(name)
    assert not is_deit_like(state, model)
    filtered = checkpoint_filter_fn(dict(reversed(state.items())), model)
    assert all(torch.equal(filtered[key], state[key]) for key in state)
    assert not caplog.records
    assert is_deit_like(make_vit('deit_tiny_distilled_patch16_224').state_dict(), model)


def transfer(source: nn.Module, model: nn.Module) -> None:
    deit_to_aft(source.state_dict(), model)


def hybrid_vit() -> nn.Module:
    vit = make_vit()
    vit.patch_embed.backbone = nn.Sequential(OrderedDict(stem=nn.Sequential(OrderedDict(conv=nn.Conv2d(1, 1, 1)))))
    return vit


def on_meta(name: str) -> nn.Module:
    return timm.create_model(name, device='meta', weight_init='skip')


REJECTED = [
    (
        lambda: transfer(on_meta('deit_small_patch16_224'), make_aft('aft_conv_tiny', embed_dim=192)),
        r'width 192 and depth 2, as the model has, got width 384 and depth 12, which',
    ),
    (
        lambda: transfer(make_vit(depth=3), make_aft()),
        'depth 2, as the model has, got width 32 and depth 3, which embed_dim=32 and depth=3 make',
    ),
    (lambda: transfer(make_vit(mlp_ratio=2), make_aft()), r'blocks\.0\.mlp\.fc1\.weight of shape \(128, 32\), as'),
    (lambda: transfer(timm.create_model('resnet10t'), make_aft()), r'with patch_embed\.proj\.weight, got conv1\.0'),
    (
        lambda: transfer(timm.create_model('vit_small_patch16_18x2_224', **SMALL, num_heads=2), make_aft()),
        r'a ViT with blocks\.0\.norm1\.weight, got blocks\.0\.attns\.0\.norm\.weight',
    ),
    (lambda: transfer(hybrid_vit(), make_aft()), r'got patch_embed\.backbone\.stem\.conv\.weight'),
    (lambda: deit_to_aft({'epoch': 3}, make_aft()), 'a state dict, got epoch with a int'),
    (lambda: transfer(make_aft('aft_conv_tiny'), make_aft()), r'an AFT model, which has blocks\.0\.attn\.kernel'),
    (lambda: transfer(make_vit(), make_vit()), 'a model with AFT mixers, got a VisionTransformer'),
    (lambda: transfer(make_vit(img_size=(48, 112)), make_aft()), "the checkpoint's 21 positions are no square grid"),
]


@pytest.mark.parametrize(('call', 'message'), REJECTED, ids=[message for _, message in REJECTED])
def test_weights_that_do_not_fit_are_named(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()


def test_other_weights_than_a_vits_are_refused_through_timm(tmp_path):
    torch.save(timm.create_model('resnet10t').state_dict(), tmp_path / 'resnet.pth')
    overlay = dict(file=str(tmp_path / 'resnet.pth'))
    with pytest.raises(RuntimeError, match=r'expected weights of a ViT'):
        timm.create_model('aft_conv_tiny', pretrained=True, pretrained_cfg_overlay=overlay, **CONV)
