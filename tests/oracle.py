"""A joint log-sum-exp in float64 and numpy, in value and in every gradient, that shares no code with the operators.

Every operator of AFT is one sum: the logit of source s for target t in channel c is k[s, c] plus either an entry of the
position bias or 0, and a source that may not be seen has none. So an operator is described by a table of integers, or
by several whose entries add up.
"""

from typing import NamedTuple

import numpy as np

# In a table: a source without a bias, and one that the target does not see. Anything else is a flat index of the bias.
PLAIN, HIDDEN = -1, -2

Array = np.ndarray


class Term(NamedTuple):
    """A result, and the same sum over the absolute values of its terms: what rounding errors are proportional to.

    A gradient that is computed from y has up to `slope` times the largest error of y.
    """

    value: Array
    size: Array
    slope: Array | float = 0.0


class Inputs(NamedTuple):
    """float64 arrays: q (or None), v and grad (B, T, D), k (B, T, h), bias of any shape (or None), mask (B, T)."""

    q: Array | None
    k: Array
    v: Array
    bias: Array | None
    mask: Array | None
    grad: Array


def full_table(tokens: int, causal: bool) -> Array:
    """(T, T, 1), each pair with its own entry of a (T, T) bias."""
    target, source = np.indices((tokens, tokens))
    table = target * tokens + source
    return _hide_future(table, causal)


def simple_table(tokens: int, causal: bool) -> Array:
    """(T, T, 1), no biases."""
    return _hide_future(np.full((tokens, tokens), PLAIN), causal)


def local_table(tokens: int, width: int, causal: bool) -> Array:
    """(T, T, 1): entry j of a target's row of the (T, width) band belongs to the source j - reach tokens away."""
    target, source = np.indices((tokens, tokens))
    reach = width - 1 if causal else width // 2
    entry = source - target + reach
    return _hide_future(np.where((entry >= 0) & (entry < width), target * width + entry, PLAIN), causal)


def conv_table(grid: tuple[int, int], heads: int, size: int, global_context: bool) -> Array:
    """(T, T, h): source (y + dy, x + dx) of target (y, x) has kernel[i, size // 2 + dy, size // 2 + dx]."""
    dy, dx = (x + size // 2 for x in _offsets(grid))
    inside = (dy >= 0) & (dy < size) & (dx >= 0) & (dx < size)
    outside = PLAIN if global_context else HIDDEN
    return np.stack([np.where(inside, (i * size + dy) * size + dx, outside) for i in range(heads)], -1)


def onehot_table(grid: tuple[int, int], offset: Array) -> Array:
    """(T, T, h): weight[i] at the one offset (dy, dx) of head i."""
    dy, dx = _offsets(grid)
    return np.stack([np.where((dy == y) & (dx == x), i, PLAIN) for i, (y, x) in enumerate(offset)], -1)


def axial_table(grid: tuple[int, int], heads: int, widths: tuple[int, int]) -> Array:
    """(2, T, T, h): the entries of (h, width) biases along rows and along columns, the second after the first."""
    start, tables = 0, []
    for offset, width in zip(_offsets(grid), widths, strict=True):
        place = offset + width // 2
        inside = (place >= 0) & (place < width)
        tables.append(np.stack([np.where(inside, start + i * width + place, PLAIN) for i in range(heads)], -1))
        start += heads * width
    return np.stack(tables)


def evaluate(inputs: Inputs, table: Array) -> dict[str, Term]:
    """The result y and the gradients of q, k, v and bias of sum(y * grad), by the formulas of a softmax."""
    q, k, v, bias, mask, grad = inputs
    heads = k.shape[2]
    if mask is not None:
        k, v = np.where(mask[..., None], k, -np.inf), np.where(mask[..., None], v, 0.0)
    each = v.shape[2] // heads
    tables = np.broadcast_to(table, (*table.shape[:-1], heads)).reshape(-1, *table.shape[-3:-1], heads)
    entries = np.append(0.0 if bias is None else bias.ravel(), (-np.inf, 0.0))  # [HIDDEN], [PLAIN]
    weight = np.repeat(_softmax(k[:, None] + entries[tables].sum(0)), each, -1)  # (B, T, S, D)
    gate = np.ones_like(v) if q is None else 1 / (1 + np.exp(-q))
    mean, size = (np.einsum('btsd,bsd->btd', weight, x) for x in (v, np.abs(v)))
    a = (grad * gate)[:, :, None]  # (B, T, 1, D)
    flow = weight * a
    flow_size = np.abs(flow)
    # The gradient of a logit: p (v - mean) a. Where one source has all the weight v - mean cancels; in any floating-
    # point type what is left of it is wrong by a rounding error of v, so both terms count in its size.
    logit = Term(
        flow * (v[:, None] - mean[:, :, None]),
        flow_size * (np.abs(v)[:, None] + np.abs(mean)[:, :, None]),
        weight * np.abs(grad)[:, :, None],
    )
    keys = [x.sum(1).reshape(*k.shape, each).sum(-1) for x in logit]
    found = {
        'y': Term(gate * mean, gate * size),
        'k': Term(*keys),
        'v': Term(flow.sum(1), flow_size.sum(1)),
    }
    if q is not None:
        slope = gate * (1 - gate)
        found['q'] = Term(grad * mean * slope, np.abs(grad) * size * slope, np.abs(grad) * (1 - gate))
    if bias is not None:
        by_head = (x.sum(0).reshape(*tables.shape[1:], each).sum(-1) for x in logit)
        found['bias'] = Term(*(_scatter(np.broadcast_to(x, tables.shape), tables, bias) for x in by_head))
    return found


def _softmax(logits: Array) -> Array:
    # Over the sources (B, T, S, h); zeros where nothing is seen.
    peak = logits.max(2, keepdims=True)
    weight = np.exp(logits - np.where(peak == -np.inf, 0.0, peak))
    return weight / np.where(peak == -np.inf, 1.0, weight.sum(2, keepdims=True))


def _scatter(x: Array, index: Array, bias: Array) -> Array:
    kept = index >= 0
    return np.bincount(index[kept], x[kept], bias.size).astype(float).reshape(bias.shape)


def _offsets(grid: tuple[int, int]) -> tuple[Array, Array]:
    # (T, T) each: the rows and the columns from target to source.
    y, x = (place.ravel() for place in np.indices(grid))
    return y[None] - y[:, None], x[None] - x[:, None]


def _hide_future(table: Array, causal: bool) -> Array:
    target, source = np.indices(table.shape)
    return np.where(causal & (source > target), HIDDEN, table)[..., None]
