"""A joint log-sum-exp in float64 and numpy, in value and in every gradient, that shares no code with the forms.

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
