"""The forward-mode derivative of every operator: the weights of its forward, applied to tangents.

With p the normalised weights and m the mean of the values, dm = sum p (dv + v (dk + dw)) - m sum p (dk + dw).
Without a tangent of the bias each sum is the operator itself on other values. With one, p is formed in blocks of
targets.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aft_vision.ops.common.inputs import Inputs
from aft_vision.ops.common.numerics import accumulate_dtype, by_head, gate, masked_keys, masked_values
from aft_vision.ops.common.repair import softmax_of_sums
from aft_vision.ops.declaration import BiasIndex, Operation

# Elements of p, (B, h, N, T), of one block of targets.
BLOCK_ELEMENTS = 1 << 21


def forward_tangent(
    operator: Callable[..., tuple[Tensor, Tensor]],
    operation: Operation,
    inputs: Any,
    tangents: dict[str, Tensor | None],
    backend: str,
) -> Tensor:
    """Differentiate y along the tangents of q, k, v and the biases.

    Args:
        operator: a custom operator.
        operation: what it computes.
        inputs: its inputs.
        tangents: by the names of q, k, v and the biases, in this order; None where there is none, but at least one.
        backend: the form that runs.

    Returns:
        (B, T, D) in the dtype of y.
    """
    v, mask = inputs.v, inputs.mask
    dtype, heads = accumulate_dtype(v), inputs.k.shape[2]
    wide = inputs._make(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
    wide = wide._replace(v=masked_values(wide.v, mask))
    dq, dk, dv, *dbias = (None if x is None else x.to(dtype) for x in tangents.values())
    dk, dv = (None if x is None else masked_values(x, mask) for x in (dk, dv))
    if all(x is None for x in dbias):
        mean, slope = _differentiate_by_operator(operator, wide, heads, dk, dv, backend)
    else:
        biases = [getattr(wide, name) for name in operation.biases]
        along = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(biases, dbias, strict=True)]
        table, dtable = operation.bias_table(biases), operation.bias_table(along)
        mean, slope = _differentiate_jointly(operation, wide, heads, dk, dv, table, dtable)
    s = gate(inputs.q, dtype)
    if s is not None:
        slope = s * slope if dq is None else s * (slope + mean * (1 - s) * dq)
    return slope.to(v.dtype if s is None else inputs.q.dtype)


def _differentiate_by_operator(
    operator: Callable[..., tuple[Tensor, Tensor]],
    inputs: Any,
    heads: int,
    dk: Tensor | None,
    dv: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    # The mean of the values and its derivative, (B, T, D), without a tangent of the bias.
    def average(values: Tensor) -> Tensor:
        return operator(*inputs._replace(q=None, v=values), torch.is_grad_enabled(), backend)[0]

    v = inputs.v
    mean = average(v)
    if dk is None:
        return mean, torch.zeros_like(mean) if dv is None else average(dv)
    moved = (by_head(v, heads) * dk.unsqueeze(-1)).reshape(v.shape)
    slope = average(moved if dv is None else moved + dv)
    return mean, slope - (by_head(mean, heads) * average(dk).unsqueeze(-1)).reshape(v.shape)


def _differentiate_jointly(
    operation: Operation,
    inputs: Inputs,
    heads: int,
    dk: Tensor | None,
    dv: Tensor | None,
    table: Tensor,
    dtable: Tensor,
) -> tuple[Tensor, Tensor]:
    # With a tangent of the bias, in tables. The joint softmax never underflows.
    v, mask = inputs.v, inputs.mask
    keys = masked_keys(inputs.k, mask).transpose(1, 2).unsqueeze(2)  # (B, h, 1, T)
    values = by_head(v, heads).transpose(1, 2)  # (B, h, T, c)
    # torch.autograd's own vmap has no unflatten.
    dvalues = None if dv is None else dv.reshape(by_head(v, heads).shape).transpose(1, 2)
    source = torch.arange(v.shape[1], device=v.device)
    means, slopes = [], []
    for target in source.unsqueeze(1).split(max(1, BLOCK_ELEMENTS // max(1, keys.numel()))):
        index = operation.index(inputs, target, source)
        p = softmax_of_sums(keys, _rows(table, index), index.seen)  # (B, h, N, T)
        dp = p * (_rows(dtable, index) if dk is None else _rows(dtable, index) + dk.transpose(1, 2).unsqueeze(2))
        mean = p @ values
        slope = dp @ values - mean * dp.sum(3, keepdim=True)
        means.append(mean)
        slopes.append(slope if dvalues is None else slope + p @ dvalues)
    mean, slope = (torch.cat(x, 2).transpose(1, 2).reshape(v.shape) for x in (means, slopes))
    return mean, slope


def _rows(table: Tensor, index: BiasIndex) -> Tensor:
    # (1 or h, N, T): w of the targets, 0 where there is none.
    rows = table[:, index.entry].where(index.biased, 0.0)
    return rows.sum(1) if index.entry.ndim == 3 else rows
