"""The forward-mode derivative of every operator: the weights of its forward, applied to tangents.

With p the normalised weights and m the mean of the values, dm = sum p (dv + v (dk + dw)) - m sum p (dk + dw).
Without a tangent of the bias each sum is the operator itself on other values. With one, p is formed in blocks of
targets.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aft_vision.ops.common.inputs import Inputs
from aft_vision.ops.common.numerics import accumulate_dtype, by_head, gate, masked_keys, masked_values
from aft_vision.ops.common.repair import softmax_of_sums

# Elements of p, (B, h, N, T), of one block of targets.
BLOCK_ELEMENTS = 1 << 21


class Places(NamedTuple):
    """Positions of the bias of some targets in its table, (1 or h, M): full (T T), band (T width), kernel (s s).

    Attributes:
        entry: (N, T) int64, the column of w[target, source]; (n, N, T) where w is a sum of n entries.
        biased: (N, T), (h, N, T) or as entry, bool, where there is a bias; it is 0 elsewhere.
        seen: (N, T) bool, the sources that have a weight; None for all.
    """

    entry: Tensor
    biased: Tensor
    seen: Tensor | None = None


# (the operator's inputs, targets (N, 1), sources (T,)) -> Places
FindPlaces = Callable[[Any, Tensor, Tensor], Places]


def full_places(inputs: Any, target: Tensor, source: Tensor) -> Places:
    """Return the positions of the bias of `ops.aft_full`."""
    entry = target * len(source) + source
    return Places(entry, torch.ones_like(entry, dtype=torch.bool))


def full_causal_places(inputs: Any, target: Tensor, source: Tensor) -> Places:
    """Return the positions of the bias of `ops.aft_full_causal`."""
    return full_places(inputs, target, source)._replace(seen=source <= target)


def local_places(inputs: Any, target: Tensor, source: Tensor) -> Places:
    """Return the positions of the bias of `ops.aft_local`."""
    width = inputs.band.shape[1]
    return _band_places(width, width // 2, target, source)


def local_causal_places(inputs: Any, target: Tensor, source: Tensor) -> Places:
    """Return the positions of the bias of `ops.aft_local_causal`."""
    width = inputs.band.shape[1]
    return _band_places(width, width - 1, target, source)._replace(seen=source <= target)


def conv_places(inputs: Any, target: Tensor, source: Tensor) -> Places:
    """Return the positions of the bias of `ops.aft_conv`."""
    size, width = inputs.kernel.shape[-1], inputs.grid[1]
    row = source // width - target // width + size // 2
    column = source % width - target % width + size // 2
    biased = (row >= 0) & (row < size) & (column >= 0) & (column < size)
    return Places((row * size + column).where(biased, 0), biased, None if inputs.global_context else biased)


def onehot_places(inputs: Any, target: Tensor, source: Tensor) -> Places:
    """Return the positions of the bias of `ops.aft_onehot`."""
    width, offset = inputs.grid[1], inputs.offset[:, :, None, None]  # (h, 2, 1, 1)
    row, column = source // width - target // width, source % width - target % width
    return Places(torch.zeros_like(row), (row == offset[:, 0]) & (column == offset[:, 1]))


def axial_places(inputs: Any, target: Tensor, source: Tensor) -> Places:
    """Return the positions of the biases of `ops.aft_axial`: in the table, columns follow rows."""
    width, rows, columns = inputs.grid[1], inputs.row_bias.shape[1], inputs.column_bias.shape[1]
    row = source // width - target // width + rows // 2
    column = source % width - target % width + columns // 2
    biased = torch.stack([(row >= 0) & (row < rows), (column >= 0) & (column < columns)])
    return Places(torch.stack([row, column + rows]).where(biased, 0), biased)


def forward_tangent(
    operator: Callable[..., tuple[Tensor, Tensor]],
    find_places: FindPlaces | None,
    inputs: Any,
    tangents: dict[str, Tensor | None],
    backend: str,
) -> Tensor:
    """Differentiate y along the tangents of q, k, v and the biases.

    Args:
        operator: a custom operator.
        find_places: returns the positions of its bias; None for an operator without a bias.
        inputs: inputs of the operator.
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
    if find_places is None or all(x is None for x in dbias):
        mean, slope = _differentiate_by_operator(operator, wide, heads, dk, dv, backend)
    else:
        biases = [getattr(wide, name) for name in list(tangents)[3:]]
        along = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(biases, dbias, strict=True)]
        mean, slope = _differentiate_jointly(find_places, wide, heads, dk, dv, _table(biases), _table(along))
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
    find_places: FindPlaces,
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
        places = find_places(inputs, target, source)
        p = softmax_of_sums(keys, _rows(table, places), places.seen)  # (B, h, N, T)
        dp = p * (_rows(dtable, places) if dk is None else _rows(dtable, places) + dk.transpose(1, 2).unsqueeze(2))
        mean = p @ values
        slope = dp @ values - mean * dp.sum(3, keepdim=True)
        means.append(mean)
        slopes.append(slope if dvalues is None else slope + p @ dvalues)
    mean, slope = (torch.cat(x, 2).transpose(1, 2).reshape(v.shape) for x in (means, slopes))
    return mean, slope


def _table(biases: list[Tensor]) -> Tensor:
    # (1 or h, M). One table serves all channels, or each head has its own; several biases are next to each other.
    if len(biases) > 1:
        return torch.cat(biases, 1)
    return biases[0].reshape(1 if biases[0].ndim == 2 else len(biases[0]), -1)


def _rows(table: Tensor, places: Places) -> Tensor:
    # (1 or h, N, T): w of the targets, 0 where there is none.
    rows = table[:, places.entry].where(places.biased, 0.0)
    return rows.sum(1) if places.entry.ndim == 3 else rows


def _band_places(width: int, own: int, target: Tensor, source: Tensor) -> Places:
    # own: the position of the target itself in its row of the band.
    place = source - target + own
    biased = (place >= 0) & (place < width)
    return Places(target * width + place.where(biased, 0), biased)
