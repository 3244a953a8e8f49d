"""AFT-conv with one biased offset per head (AFT Eq. 6 with the one-hot bias of AFT Eq. 10).

The result of a target depends only on the source o at its offset: the mean of all values, with the weight of o times
e^w. So a mean is computed for every o, and one for offsets outside the grid, and each target selects one of them.

den = sum e^k + (e^w - 1) e^k[o] cancels only if o is the largest key, w is very negative and all other keys are much
smaller. These means come from a softmax instead, which neither cancels nor underflows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aft_vision.ops.common.inputs import empty_output
from aft_vision.ops.common.numerics import accumulate_dtype, chunks, gate, masked_keys, masked_values, may_branch

# Workspace of one batch chunk, in elements of its values; fits into the L2 cache.
CHUNK_ELEMENTS = 1 << 18
# The denominator may lose at most this factor by cancellation.
CANCELLATION = 16.0
# A source this many nats above the largest key is the whole mean, in any dtype. A smaller w cannot make an underflowed
# source significant.
LARGEST_LOGIT = 60.0


class OnehotInputs(NamedTuple):
    """Inputs of `ops.aft_onehot`."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    offset: Tensor
    weight: Tensor
    grid: Sequence[int]
    mask: Tensor | None = None


class _Sums:
    """The weights of AFT Eq. 10 by shifted source, relative to the largest key, and the resulting means.

    branch: whether Python may branch on values, to skip computations.
    """

    def __init__(self, k: Tensor, v: Tensor, weight: Tensor, mask: Tensor | None, branch: bool) -> None:
        keys = masked_keys(k, mask)
        self.weight = weight.to(keys.dtype)  # (h,)
        self.values = masked_values(v.to(keys.dtype), mask).unflatten(2, (k.shape[2], -1))  # (B, T, h, c)
        # A row with only masked tokens has no finite key.
        self.logits = keys - keys.amax(1, keepdim=True).clamp_min(torch.finfo(keys.dtype).min)
        self.exp = torch.exp(self.logits)  # (B, T, h)
        # At least 1, the largest, unless all tokens are masked.
        self.total = self.exp.sum(1, keepdim=True).clamp_min(1.0)  # (B, 1, h)
        self.small = branch and bool((self.weight <= LARGEST_LOGIT).all())
        self.extra = self.exp * torch.expm1(self.weight) if self.small else self.biased() - self.exp
        self.den = self.total + self.extra  # (B, T, h)
        cancels = CANCELLATION * (self.total - 1.0 + torch.exp(self.weight)) < self.total  # (B, 1, h)
        # Where the softmax is needed, (B, T, h): at the largest key, if it dominates.
        self.cancelled: Tensor | None = None
        if not branch or bool(cancels.any()):
            self.cancelled = cancels & (self.logits == 0)
            self.den = self.den.masked_fill(self.cancelled, float('inf'))

    def biased(self) -> Tensor:
        """Return e^w times `exp`, (B, T, h)."""
        if self.small:
            return self.exp * torch.exp(self.weight)
        return torch.exp((self.logits + self.weight).clamp_max(LARGEST_LOGIT))

    def means(self) -> Tensor:
        """Return the means for every shifted source, and last for no source, (B, T + 1, h, c)."""
        whole = (self.exp.unsqueeze(-1) * self.values).sum(1, keepdim=True) / self.total.unsqueeze(-1)
        means = torch.lerp(whole, self.values, (self.extra / self.den).unsqueeze(-1))
        if self.cancelled is not None:
            means = torch.where(self.cancelled.unsqueeze(-1), self.cancelled_mean(self.cancelled_weights()), means)
        return torch.cat([means, whole], 1)

    def cancelled_weights(self) -> Tensor:
        """Return the weight of each source if the largest key is the shifted source, (B, T, h)."""
        assert self.cancelled is not None
        logits = torch.where(self.cancelled, self.logits + self.weight, self.logits)
        return torch.softmax(logits.clamp_min(torch.finfo(logits.dtype).min), 1) * (logits > float('-inf'))

    def cancelled_mean(self, p: Tensor) -> Tensor:
        return (p.unsqueeze(-1) * self.values).sum(1, keepdim=True)  # (B, 1, h, c)


def onehot_means(
    k: Tensor, v: Tensor, offset: Tensor, weight: Tensor, grid: tuple[int, int], mask: Tensor | None
) -> Tensor:
    """Return the result before the gate, (B, T, D), in differentiable aten without branches on values (AFT Eq. 10)."""
    return _take(_Sums(k, v, weight, mask, False).means(), _sources(offset, grid)).reshape(v.shape)


def onehot_forward(inputs: OnehotInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y, and nothing saved (AFT Eq. 10)."""
    q, k, v, offset, weight, grid, mask = inputs
    out = empty_output(q, v)
    index = _sources(offset, (grid[0], grid[1]))
    for part in chunks(v, CHUNK_ELEMENTS):
        sums = _Sums(k[part], v[part], weight, _slice(mask, part), may_branch(k))
        means = _take(sums.means(), index).view(out[part].shape)
        s = gate(_slice(q, part), means.dtype)
        if s is None:
            out[part] = means
        else:
            torch.mul(s, means, out=out[part])
    return out, k.new_empty(0)


def onehot_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: OnehotInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and weight."""
    q, k, v, offset, weight, grid, mask = inputs
    dtype, heads = accumulate_dtype(v), k.shape[2]
    dq = k.new_empty(0) if q is None else torch.empty_like(q)
    dk, dv, dweight = torch.empty_like(k), torch.empty_like(v), torch.zeros_like(weight, dtype=dtype)
    # For each source the target whose offset leads to it, and the targets whose offset leaves the grid.
    targets = _sources(-offset, (grid[0], grid[1]))
    outside = (_sources(offset, (grid[0], grid[1])) >= v.shape[1] * heads).view(-1, heads, 1).to(dtype)
    for part in chunks(v, CHUNK_ELEMENTS):
        g = grad[part].to(dtype)
        s = gate(_slice(q, part), dtype)
        if s is not None:
            dq[part] = (1 - s).mul_(g).mul_(y[part])
            g = g * s
        sums = _Sums(k[part], v[part], weight, _slice(mask, part), may_branch(k))
        found = _chunk_backward(sums, g.unflatten(2, (heads, -1)), targets, outside)
        dk[part], dv[part] = found[0], found[1].flatten(2)
        dweight += found[2]
    return dq, dk, dv, dweight.to(weight.dtype) if need_bias else weight.new_empty(0)


def _chunk_backward(sums: _Sums, g: Tensor, targets: Tensor, outside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Gradients of keys (b, T, h), values (b, T, h, c) and weight (h,) from the gradients of each target's mean (b, T,
    # h, c).
    values, exp, extra = sums.values, sums.exp.unsqueeze(-1), sums.extra.unsqueeze(-1)
    means = sums.means()
    means, whole = means[:, :-1], means[:, -1:]
    at_source = _take(torch.cat([g, torch.zeros_like(whole)], 1), targets)
    dsum = at_source / sums.den.unsqueeze(-1)
    gone = (g * outside).sum(1, keepdim=True) / sums.total.unsqueeze(-1)
    dnum = dsum.sum(1, keepdim=True) + gone
    dden = _channel_sum(dsum * means).sum(1, keepdim=True) + _channel_sum(gone * whole)
    # values - means without cancellation: the source at the offset may have nearly all of the weight.
    own = _channel_sum((values - whole).mul_(sums.total.unsqueeze(-1) / sums.den.unsqueeze(-1)).mul_(dsum))
    dv = (exp * dnum).addcmul_(extra, dsum)
    dk = _channel_sum(values * dnum).sub_(dden).mul_(exp).addcmul_(extra, own).squeeze(-1)
    dweight = (sums.biased() * own.squeeze(-1)).sum((0, 1))
    if sums.cancelled is not None:
        p = sums.cancelled_weights()
        at_cancelled = sums.cancelled.unsqueeze(-1)
        g_cancelled = (at_source * at_cancelled).sum(1, keepdim=True)  # (b, 1, h, c)
        centred = values - (values * at_cancelled).sum(1, keepdim=True)
        dlogits = p * ((centred - (p.unsqueeze(-1) * centred).sum(1, keepdim=True)) * g_cancelled).sum(3)
        dk += dlogits
        dv += p.unsqueeze(-1) * g_cancelled
        dweight += (dlogits * sums.cancelled).sum((0, 1))
    return dk, dv, dweight


def _sources(offset: Tensor, grid: tuple[int, int]) -> Tensor:
    # (T h) int32: the place in (T + 1, h) of each target's source; the last token's where that is outside the grid.
    (height, width), heads = grid, offset.shape[0]
    tokens = height * width
    row = _shifted(height, offset[:, 0], height) * width
    token = (row[:, None] + _shifted(width, offset[:, 1], tokens)).clamp_max(tokens)  # (H, W, h)
    head = torch.arange(heads, dtype=token.dtype, device=offset.device)
    return torch.add(head, token, alpha=heads).flatten()


def _shifted(length: int, offset: Tensor, outside: int) -> Tensor:
    # (length, h): every place plus each offset.
    place = torch.arange(length, device=offset.device)[:, None] + offset
    return torch.where(place == place.clamp(0, length - 1), place, outside).int()


def _take(x: Tensor, index: Tensor) -> Tensor:
    # (B, T + 1, h, c) -> (B, T, h, c)
    return x.flatten(1, 2).index_select(1, index).unflatten(1, (-1, x.shape[2]))


def _channel_sum(x: Tensor) -> Tensor:
    # (B, T, h, c) -> (B, T, h, 1)
    return x if x.shape[3] == 1 else x.sum(3, keepdim=True)


def _slice(x: Tensor | None, part: slice) -> Tensor | None:
    return None if x is None else x[part]
