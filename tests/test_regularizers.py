"""The entropy of kernels, and pruning: what is kept, what it costs, and that the pruned model is the same function."""

import math
from typing import Any

import pytest
import timm
import torch
from helpers import assert_close, randn
from torch import Tensor, nn

from aft_vision import regularizers
from aft_vision.ops import reference
from aft_vision.regularizers import (
    evaluated_kernels,
    prune,
    sparsity_metrics,
    threshold_that_keeps,
)

TINY: dict[str, Any] = dict(depth=2, embed_dim=16, num_heads=4, kernel_size=7, num_classes=3)


def make(**kwargs: Any) -> nn.Module:
    """A small model whose kernels have entries of many sizes."""
    model = timm.create_model('aft_conv_tiny', **{**TINY, **kwargs}).eval()
    with torch.no_grad():
        for seed, block in enumerate(model.blocks):
            for name, parameter in block.attn.kernel.named_parameters():
                parameter.copy_(randn(*parameter.shape, seed=seed) if name == 'weight' else 0.3)
    return model


def images(*size: int) -> Tensor:
    return randn(2, 3, *size, seed=5, dtype=torch.float32)


def test_kernel_entropy_is_the_sum_over_heads_and_layers_and_has_a_gradient():
    model = make().double()
    found = regularizers.kernel_entropy(model)
    wanted = sum(reference.kernel_entropy(block.attn.kernel()).sum() for block in model.blocks)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
    layers = regularizers.layer_entropies(model)
    assert [tuple(entropy.shape) for entropy in layers] == [(4,), (4,)]
    found.backward()
    for block in model.blocks:
        assert block.attn.kernel.gamma.grad.abs().min() > 1e-3
        # A shift of a head is no matter to its softmax.
        assert block.attn.kernel.beta.grad.abs().max() < 1e-12


def test_a_fresh_model_has_the_largest_entropy():
    model = timm.create_model('aft_conv_tiny', **TINY)
    assert regularizers.kernel_entropy(model).item() == pytest.approx(2 * 4 * math.log(49), rel=1e-6)


def test_kernel_entropy_is_that_of_the_bias_before_a_gumbel_sample():
    model = make(gumbel=True).train()
    first, second = (regularizers.kernel_entropy(model) for _ in range(2))
    assert torch.equal(first, second)
    model.load_state_dict(make().state_dict())
    assert torch.equal(first, regularizers.kernel_entropy(make()))


@pytest.mark.parametrize('threshold', [0.0, 0.2, 0.5, 1e9])
def test_pruning_sets_the_entries_below_the_threshold_to_zero_and_no_others(threshold: float):
    model = make()
    before = [block.attn.kernel().detach().clone() for block in model.blocks]
    pruned = prune(model, threshold)
    for block, kernel, old in zip(pruned.blocks, before, model.blocks, strict=True):
        found = block.attn.kernel()
        for got, w in zip(found.flatten().tolist(), kernel.flatten().tolist(), strict=True):
            assert got == (0.0 if abs(math.expm1(w)) < threshold else w)
        # The model itself is as it was, and shares all else.
        assert torch.equal(old.attn.kernel(), kernel)
        assert block.mlp.fc1.weight is old.mlp.fc1.weight


def test_a_model_pruned_of_nothing_is_the_same_and_one_pruned_of_all_is_aft_simple():
    model, x = make(), images(64, 96)
    with torch.no_grad():
        assert_close(prune(model, 0.0)(x), model(x), 1e-6)
        empty = prune(model, 1e9)(x)
        for block in model.blocks:
            block.attn.kernel.gamma.zero_()
            block.attn.kernel.beta.zero_()
        assert_close(empty, model(x), 1e-6)


def test_a_model_with_one_offset_a_head_is_pruned_from_there():
    model, x = make(gumbel=True), images(64, 96)
    pruned = prune(model, 0.0)
    with torch.no_grad():
        assert_close(pruned(x), model(x), 1e-5)
    assert sparsity_metrics(pruned)['offsets_max'] == 1
    assert sparsity_metrics(model) == sparsity_metrics(pruned)


@pytest.mark.parametrize('share', [1.0, 0.5, 0.1, 1 / (2 * 4 * 49)])
def test_a_threshold_by_share_keeps_that_share(share: float):
    model = make()
    metrics = sparsity_metrics(prune(model, threshold_that_keeps(model, share)))
    assert 1 - metrics['sparsity'] == pytest.approx(share, abs=1 / (2 * 4 * 49))


def test_the_metrics_are_those_of_a_count_by_hand():
    model = prune(make(), 0.0)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.kernel.weight.zero_()
        first, second = (block.attn.kernel.weight for block in model.blocks)
        first[0, 3, 3] = first[0, 2, 4] = first[1, 3, 2] = 1.0
        second[2, 1, 3] = -1.0
    assert sparsity_metrics(model) == {
        'sparsity': 1 - 4 / (2 * 4 * 49),
        'offsets_mean': 0.5,
        'offsets_min': 0,
        'offsets_max': 2,
        'offsets_by_layer': [0.75, 0.25],
        # 16 channels of values and 4 of keys.
        'madds_dense': 2 * 20 * 49,
        'madds_sparse': 4 * (16 // 4 + 1),
    }


def vit() -> nn.Module:
    return timm.create_model('vit_tiny_patch16_224', depth=1, embed_dim=16, num_heads=2, img_size=32)


REJECTED = [
    (lambda: regularizers.kernel_entropy(vit()), 'a model with AFT-conv kernels, got a VisionTransformer without any'),
    (lambda: prune(timm.create_model('aft_full_tiny', depth=1), 0.1), 'a model with AFT-conv kernels, got a AFTVision'),
    (lambda: prune(make(global_context=False), 0.1), 'global_context=True, where .* got global_context=False'),
    (lambda: prune(make(), -0.1), 'threshold must be at least 0, got -0.1'),
    (lambda: threshold_that_keeps(make(), 0.0), r'must be in \(0, 1\], got 0.0'),
]


@pytest.mark.parametrize(('call', 'message'), REJECTED, ids=[message for _, message in REJECTED])
def test_a_wrong_input_is_named(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()


def test_evaluated_kernels_do_not_change_with_the_model():
    model = make(standardize_kernel=False)
    kernels = evaluated_kernels(model)
    with torch.no_grad():
        model.blocks[0].attn.kernel.weight.zero_()
    assert kernels[0].any()
    assert not kernels[0].requires_grad
