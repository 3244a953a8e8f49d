"""Sparsity of AFT-conv kernels: the entropy regulariser of training (AFT Eq. 9), and pruning.

Pruning an offset sets its bias w to 0. Its source then has the weight exp(0) = 1, which all sources have in the global
sum, and the correction exp(w) - 1 of AFT Eq. 6 is zero.
"""

import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from aft_vision import ops
from aft_vision.layers import AFTConv, StandardizedKernel, mixers_of
from aft_vision.layers.base import flat_arguments


def conv_mixers(model: nn.Module) -> list[AFTConv]:
    """Return the AFT-conv mixers of a model, in the order of the layers.

    Raises:
        ValueError: there are none.
    """
    mixers = mixers_of(model, AFTConv)
    if not mixers:
        raise ValueError(f'expected a model with AFT-conv kernels, got a {type(model).__name__} without any')
    return mixers


def layer_entropies(model: nn.Module) -> list[Tensor]:
    """Compute the entropy of each head of each AFT-conv kernel, after AFT Eq. 8, before a Gumbel sample (AFT Eq. 9).

    Returns:
        (h,) per layer in nats, between 0 and log(s * s), differentiable.

    Raises:
        ValueError: the model has no AFT-conv kernel.
    """
    return [ops.kernel_entropy(mixer.kernel()) for mixer in conv_mixers(model)]


def kernel_entropy(model: nn.Module) -> Tensor:
    """Compute the regulariser reg(w), summed over heads and layers (AFT Eq. 9).

    The paper adds 0.001 of it to the cross-entropy of a model of 12 layers of 384 heads.

    Returns:
        A scalar in nats, differentiable.

    Raises:
        ValueError: the model has no AFT-conv kernel.
    """
    return torch.stack([entropy.sum() for entropy in layer_entropies(model)]).sum()


@torch.no_grad()
def evaluated_kernels(model: nn.Module) -> list[Tensor]:
    """Return the position biases w (h, s, s) of each layer in evaluation: after AFT Eq. 8 and the maximum of Eq. 10.

    Raises:
        ValueError: the model has no AFT-conv kernel, or one without global context, where w = 0 is not a neutral
            value, because sources outside the window have no weight.
    """
    kernels = []
    for mixer in conv_mixers(model):
        if not mixer.global_context:
            raise ValueError(
                'expected a model with global_context=True, where a pruned offset keeps the weight of the global sum, '
                'got global_context=False, where w = 0 is not neutral'
            )
        # A raw kernel is the parameter itself.
        kernels.append(mixer.evaluated_bias().detach().clone())
    return kernels


def prune(model: nn.Module, threshold: float) -> nn.Module:
    """Copy a model for evaluation, with kernels set to 0 where |exp(w) - 1| is below a threshold.

    The copy shares all other parameters with the model. Its kernels are raw (`standardize_kernel=False`) and have the
    model's window; the kernels of a model with one offset per head (`gumbel=True`) become raw kernels with that offset.

    Raises:
        ValueError: the threshold is negative, or as `evaluated_kernels`.
    """
    if not threshold >= 0:
        raise ValueError(f'threshold must be at least 0, got {threshold}')
    kernels = evaluated_kernels(model)
    # deepcopy does not copy objects that are in its memo.
    shared: dict[int, Any] = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    pruned: Any = copy.deepcopy(model, shared).eval()
    for mixer, kernel in zip(conv_mixers(pruned), kernels, strict=True):
        mixer.kernel = _raw_kernel(torch.where(kernel.expm1().abs() < threshold, 0.0, kernel))
        # Final for TorchScript, which reads them when it compiles.
        for name in ('gumbel', 'straight_through'):
            setattr(mixer, name, False)
    # timm keeps them for a model that it has built.
    if hasattr(pruned, '_model_args'):
        pruned._model_args = _raw_arguments(pruned._model_args)
    return pruned


def threshold_that_keeps(model: nn.Module, share: float) -> float:
    """Find the threshold at which `prune` keeps this share of all kernel entries, those with the most effect.

    Entries that are already 0 are not kept, and entries of equal effect are kept or pruned together.

    Raises:
        ValueError: the share is not in (0, 1], or as `evaluated_kernels`.
    """
    if not 0 < share <= 1:
        raise ValueError(f'the share of entries to keep must be in (0, 1], got {share}')
    effects = torch.cat([kernel.expm1().abs().flatten() for kernel in evaluated_kernels(model)])
    return effects.sort(descending=True).values[max(round(share * len(effects)), 1) - 1].item()


def sparsity_metrics(model: nn.Module) -> dict[str, Any]:
    """Return the sparsity of pruned kernels and the resulting cost of AFT Eq. 6.

    Returns:
        `sparsity`, the share of entries that are 0; `offsets_mean`, `offsets_min` and `offsets_max`, the number of
        offsets that a head keeps, and `offsets_by_layer`, the mean of each layer; and the multiply-adds of the
        convolutions of exp(K) V and exp(K), per token in all layers, borders ignored: with whole kernels
        (`madds_dense`) and with only the kept offsets (`madds_sparse`).

    Raises:
        ValueError: as `evaluated_kernels`.
    """
    kernels = evaluated_kernels(model)
    kept = torch.stack([(kernel != 0).flatten(1).sum(1) for kernel in kernels])
    heads, size = kernels[0].shape[:2]
    # One tap of a head multiplies all its channels of exp(K) V and its one channel of exp(K).
    width = conv_mixers(model)[0].split_sizes[-1] + heads
    return {
        'sparsity': 1 - kept.sum().item() / (kept.numel() * size**2),
        'offsets_mean': kept.double().mean().item(),
        'offsets_min': kept.min().item(),
        'offsets_max': kept.max().item(),
        'offsets_by_layer': kept.double().mean(1).tolist(),
        'madds_dense': len(kernels) * width * size**2,
        'madds_sparse': kept.sum().item() * width // heads,
    }


def _raw_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    # From these timm builds a model with raw kernels.
    kept = {
        name: x for name, x in flat_arguments(arguments).items() if name not in ('gumbel', 'tau', 'straight_through')
    }
    return {**kept, 'standardize_kernel': False}


def _raw_kernel(kernel: Tensor) -> StandardizedKernel:
    heads, size = kernel.shape[:2]
    raw = StandardizedKernel(heads, size, standardize=False, device=kernel.device, dtype=kernel.dtype)
    with torch.no_grad():
        raw.weight.copy_(kernel)
    return raw.eval()
