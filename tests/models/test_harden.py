"""The one-hot model of a Gumbel-trained model: equal outputs, fewer parameters, and what cannot be hardened."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from helpers import assert_close, randn
from timm.models import save_for_hf
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from aft_vision import ops
from aft_vision.layers import AFTOnehot
from aft_vision.models import AFTVisionTransformer
from aft_vision.models.harden import harden

SMALL: dict[str, Any] = dict(embed_dim=24, depth=2, num_heads=6, kernel_size=7, num_classes=5)
# In pixels, of 16 x 16 patches: a single patch, grids smaller and larger than the kernel, most of them not square.
SIZES = [(16, 16), (16, 80), (48, 32), (112, 112), (160, 208)]
VARIANTS: list[dict[str, Any]] = [
    {},
    dict(query_gate=False),
    dict(standardize_kernel=False),
    dict(num_heads=24, qkv_bias=False, init_values=0.1, global_pool='max'),
]


def make(**kwargs: Any) -> nn.Module:
    """A small model with gumbel=True whose every parameter is random, and its offsets matter."""
    torch.manual_seed(0)
    model = timm.create_model('aft_conv_tiny', **{**SMALL, 'gumbel': True, **kwargs}).eval()
    for name, p in model.named_parameters():
        nn.init.normal_(p, std=1.5 if '.attn.kernel.' in name else 0.3)
    return model


def images(*size: int) -> Tensor:
    return randn(2, 3, *size, seed=5, dtype=torch.float32)


def by_hand(model: nn.Module) -> nn.Module:
    """The plain AFT-conv whose kernels are those of a Gumbel model at their largest entries, and zero elsewhere."""
    arguments = {name: x for name, x in model._model_args.items() if name != 'gumbel'} | {'standardize_kernel': False}
    plain = timm.create_model('aft_conv_tiny', **arguments).eval().to(next(model.parameters()).dtype)
    state = {name: x for name, x in model.state_dict().items() if '.attn.kernel.' not in name}
    for i, block in enumerate(model.blocks):
        state[f'blocks.{i}.attn.kernel.weight'] = ops.hard_kernel(block.attn.kernel())
    plain.load_state_dict(state)
    return plain


@pytest.mark.parametrize('kwargs', VARIANTS, ids=str)
@torch.no_grad()
def test_the_one_hot_form_equals_the_evaluated_gumbel_model_at_every_size(kwargs: dict[str, Any]):
    model = make(**kwargs)
    hard, oracle = harden(model), by_hand(model).double()
    without_offsets = copy.deepcopy(hard)
    for block in without_offsets.blocks:
        block.attn.weight.zero_()
    for size in SIZES:
        x = images(*size)
        assert_close(hard(x), model(x), 1e-6)
        assert_close(hard(x), oracle(x.double()), 1e-5)
        # In a single row, all offsets may lead out of the grid.
        if min(size) > 16:
            assert (without_offsets(x) - model(x)).norm() > 5e-5 * model(x).norm()


@torch.no_grad()
def test_attention_blocks_and_local_convolutions_stay_as_they_are():
    model = make(attention_blocks=[0], local_conv=True)
    hard = harden(model)
    assert isinstance(hard.blocks[1].attn, AFTOnehot)
    for size in SIZES[1:4]:
        x = images(*size)
        assert_close(hard(x), model(x), 1e-6)


@pytest.mark.parametrize(('dtype', 'bound'), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)], ids=str)
@torch.no_grad()
def test_the_one_hot_form_of_another_precision_equals_the_gumbel_model(dtype: torch.dtype, bound: float):
    model = make().to(dtype)
    hard = harden(model)
    assert {p.dtype for p in hard.parameters()} == {dtype}
    oracle = by_hand(model).double()
    for size in SIZES[1:4]:
        x = images(*size).to(dtype)
        assert torch.equal(hard(x), model(x))
        assert_close(hard(x), oracle(x.double()), bound)


@torch.no_grad()
def test_a_mask_is_kept():
    model = make()
    mask = torch.arange(12).expand(2, -1).reshape(2, 3, 4) < 7
    x = images(48, 64)
    assert_close(harden(model)(x, attn_mask=mask), by_hand(model)(x, attn_mask=mask), 1e-5)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ('name', 'kwargs', 'saved'),
    [
        # A block's h * s * s + 2 h parameters become h.
        ('aft_conv_tiny', dict(depth=2), 2 * (192 * 121 + 192)),
        ('aft_conv_tiny_k11_h32', dict(depth=2), 2 * (32 * 121 + 32)),
        ('aft_conv_small_k15_h384', dict(standardize_kernel=False, depth=3), 3 * (384 * 225 - 384)),
    ],
)
def test_the_parameters_are_reduced_by_the_kernels(name: str, kwargs: dict[str, Any], saved: int):
    model = timm.create_model(name, gumbel=True, **kwargs)
    onehot = harden(model)
    assert count(model) - count(onehot) == saved
    built = timm.create_model(name, mixer='onehot', device='meta', **{**kwargs, 'standardize_kernel': None})
    assert count(built) == count(onehot)
    assert [tuple(x.shape) for x in onehot.buffers()] == [(model.blocks[0].attn.split_sizes[1], 2)] * len(model.blocks)


def test_the_given_model_is_left_as_it_is():
    model = make()
    before = copy.deepcopy(model.state_dict())
    hard = harden(model)
    with torch.no_grad():
        for p in hard.parameters():
            p.zero_()
    assert model._model_args == {**SMALL, 'gumbel': True}
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_what_is_frozen_and_what_is_trained_stays_so():
    model = make().train()
    model.requires_grad_(False)
    model.blocks[1].attn.kernel.requires_grad_(True)
    hard = harden(model)
    assert all(module.training for module in hard.modules())
    assert [name for name, p in hard.named_parameters() if p.requires_grad] == ['blocks.1.attn.weight']


def test_wrapped_fused_and_exportable_models_are_hardened():
    model = make()
    expected = harden(model).state_dict()
    with timm.layers.set_exportable(True):
        exportable = make()
    for wrapped in (ModelEmaV3(model), nn.DataParallel(model), torch.compile(model), exportable):
        assert all(torch.equal(x, expected[name]) for name, x in harden(wrapped).state_dict().items())
    assert harden(exportable).blocks[0].attn.exportable
    fused = timm.utils.reparameterize_model(model)
    assert all(torch.equal(x, expected[name]) for name, x in harden(fused).state_dict().items())


def test_a_saved_one_hot_model_is_loaded_by_timm(tmp_path):
    hard = harden(make(query_gate=False, drop_path_rate=0.1))
    save_for_hf(hard, tmp_path, safe_serialization=True)
    restored = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    assert isinstance(restored.blocks[0].attn, AFTOnehot)
    assert torch.equal(restored(images(48, 80)), hard(images(48, 80)))


def test_arguments_in_a_dict_of_the_mixer_are_hardened():
    model = timm.create_model('aft_conv_tiny', embed_dim=24, depth=1, mixer_args=dict(num_heads=6, gumbel=True))
    hard = harden(model)
    assert hard._model_args == dict(embed_dim=24, depth=1, num_heads=6, mixer='onehot')
    timm.create_model('aft_conv_tiny', **hard._model_args).load_state_dict(hard.state_dict())


def test_a_model_that_timm_did_not_create_is_hardened():
    torch.manual_seed(0)
    model = AFTVisionTransformer(mixer='conv', gumbel=True, **SMALL).eval()
    hard = harden(model)
    assert torch.equal(hard(images(48, 80)), model(images(48, 80)))


def test_a_hardened_model_trains_on():
    hard = harden(make()).double().train()
    x, y = images(112, 112).double(), torch.tensor([1, 3])
    nn.functional.cross_entropy(hard(x), y).backward()
    assert all(block.attn.weight.grad.abs().min() > 0 for block in hard.blocks)
    optimizer = create_optimizer_v2(hard, 'adamw', lr=0.01, weight_decay=0.05)
    before, offsets = nn.functional.cross_entropy(hard(x), y), [x.clone() for x in hard.buffers()]
    optimizer.step()
    assert nn.functional.cross_entropy(hard(x), y) < before
    assert all(torch.equal(x, old) for x, old in zip(hard.buffers(), offsets, strict=True))


TRAINED = r'expected a model trained with gumbel=True \(AFT Eq. 10\)'
REJECTED: list[tuple[Callable[[], object], str]] = [
    (lambda: harden(make(gumbel=False)), f"{TRAINED}.* got one of mixer='conv' without it"),
    (lambda: harden(harden(make())), f"{TRAINED}.* got one of mixer='onehot' without it"),
    (lambda: harden(timm.create_model('deit_tiny_patch16_224', depth=1)), f'{TRAINED}.* got VisionTransformer, which'),
]


@pytest.mark.parametrize(('call', 'message'), REJECTED, ids=[message for _, message in REJECTED])
def test_a_model_that_cannot_be_hardened_is_named(call: Callable[[], object], message: str):
    with pytest.raises(ValueError, match=message):
        call()
