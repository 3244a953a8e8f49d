"""AFT-conv with one biased offset per head (AFT Eq. 6 with the one-hot bias of AFT Eq. 10).

Per head and target t with its shifted source o(t): den = sum over the other sources of e^k, plus e^w e^k[o(t)]. Only at
the largest key could taking one source out of the sum cancel, so the sum without it is kept beside the whole, at its
own reference; rows take their own reference too. Nothing underflows, however negative w is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from aft_vision.ops.eager.numerics import accumulate_dtype, check_grid, check_qkv, gate, masked_keys


class _Sums:
    """The pieces of the forward that the backward needs again. Head-major: (B, h, T) and (B, h, c, T)."""

    def __init__(
        self, k: Tensor, v: Tensor, offset: Tensor, weight: Tensor, grid: tuple[int, int], mask: Tensor | None
    ) -> None:
        dtype = accumulate_dtype(v)
        self.keys = masked_keys(k, mask).transpose(1, 2)  # (B, h, T)
        heads, tokens = self.keys.shape[1:]
        self.values = v.to(dtype).unflatten(2, (heads, -1)).permute(0, 2, 3, 1)  # (B, h, c, T)
        self.weight = weight.to(dtype)[:, None]  # (h, 1)
        floor = torch.finfo(dtype).min / 4
        peak = self.keys.max(dim=2, keepdim=True)
        self.top = peak.indices == torch.arange(tokens, device=k.device)  # (B, h, T): the largest key, once
        self.peak = peak.values.clamp_min(floor)
        others = self.keys.masked_fill(self.top, float('-inf'))
        self.second = others.amax(dim=2, keepdim=True).clamp_min(floor)
        self.rest = torch.exp(others - self.second)  # weights of all but the largest, at the second reference
        self.all = torch.exp(self.keys - self.peak)
        self.source, inside = _shifted_sources(offset, grid)  # (h, T)
        shape = self.keys.shape
        self.index = self.source.expand(shape)
        shifted = self.keys.gather(2, self.index).masked_fill(~inside, float('-inf'))
        self.on_top = inside & self.top.gather(2, self.index)
        # Logits at the row's reference: of the shifted source, and of the sum of all others.
        base = torch.where(self.on_top, self.second, self.peak)
        biased = self.weight + shifted
        self.reference = torch.maximum(base, biased)
        self.scale = torch.exp(base - self.reference)  # of the other sources
        self.taken = torch.where(self.on_top, 0.0, torch.exp(shifted - self.peak))  # what leaves the whole sum
        self.biased = torch.exp(biased - self.reference)
        others_sum = torch.where(
            self.on_top, self.rest.sum(2, keepdim=True), self.all.sum(2, keepdim=True) - self.taken
        )
        self.den = others_sum * self.scale + self.biased  # (B, h, T)
        # A target that sees nothing at all.
        self.den = self.den.masked_fill((self.keys == float('-inf')).all(2, keepdim=True), float('inf'))

    def mean(self) -> Tensor:
        """num / den, (B, h, c, T)."""
        index = self.index.unsqueeze(2).expand(self.values.shape)
        shifted = self.values.gather(3, index)
        whole = (self.all.unsqueeze(2) * self.values).sum(3, keepdim=True)
        rest = (self.rest.unsqueeze(2) * self.values).sum(3, keepdim=True)
        others = torch.where(self.on_top.unsqueeze(2), rest, whole - self.taken.unsqueeze(2) * shifted)
        num = others * self.scale.unsqueeze(2) + self.biased.unsqueeze(2) * shifted
        return num / self.den.unsqueeze(2)

    def transpose(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """p^T g for the normalised weights p, split into (all but the shifted source, the shifted source alone).

        g and both results are (B, h, n, T); the first is indexed by source, the second by target.
        """
        on_top = self.on_top.unsqueeze(2)
        g = g / self.den.unsqueeze(2)
        others = g * self.scale.unsqueeze(2)
        low = torch.where(on_top, others, 0.0)
        high = torch.where(on_top, 0.0, others)
        whole = self.all.unsqueeze(2) * high.sum(3, keepdim=True) + self.rest.unsqueeze(2) * low.sum(3, keepdim=True)
        shifted = g * self.biased.unsqueeze(2) - high * self.taken.unsqueeze(2)
        return whole, shifted


def check_onehot(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    offset: Tensor,
    weight: Tensor,
    grid: Sequence[int],
    mask: Tensor | None,
) -> None:
    """Raise ValueError unless the shapes are those of `ops.aft_onehot`."""
    if offset.ndim != 2 or offset.shape[1] != 2 or offset.dtype != torch.int64:
        raise ValueError(f'offset must be int64 of shape (h, 2), got {offset.dtype} of shape {tuple(offset.shape)}')
    heads = offset.shape[0]
    if tuple(weight.shape) != (heads,):
        raise ValueError(f'weight must have shape ({heads},) to match offset, got {tuple(weight.shape)}')
    if v.ndim == 3 and v.shape[2] % heads != 0:
        raise ValueError(f'the {heads} heads of offset must divide the {v.shape[2]} channels of v')
    check_qkv(q, k, v, mask, heads=heads)
    check_grid(v.shape[1], grid)


def onehot_forward(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    offset: Tensor,
    weight: Tensor,
    grid: Sequence[int],
    mask: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """y, and nothing saved (AFT Eq. 10)."""
    sums = _Sums(k, v, offset, weight, (grid[0], grid[1]), mask)
    mean = sums.mean().permute(0, 3, 1, 2).flatten(2)  # (B, T, D)
    s = gate(q, mean.dtype)
    y = mean if s is None else s * mean
    return y.to(v.dtype if q is None else q.dtype), k.new_empty(0)


def onehot_backward(
    grad: Tensor,
    y: Tensor,
    den: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    offset: Tensor,
    weight: Tensor,
    grid: Sequence[int],
    mask: Tensor | None,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and weight."""
    sums = _Sums(k, v, offset, weight, (grid[0], grid[1]), mask)
    mean = sums.mean()  # (B, h, c, T)
    g = grad.to(mean.dtype)
    s = gate(q, mean.dtype)
    dq = k.new_empty(0)
    if q is not None and s is not None:
        dq = (g * mean.permute(0, 3, 1, 2).flatten(2) * s * (1 - s)).to(q.dtype)
        g = g * s
    g = g.unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1)  # (B, h, c, T)
    dmean = (g * mean).sum(2, keepdim=True)
    whole, shifted = sums.transpose(torch.cat([g, -dmean], 2))  # (B, h, c + 1, T)
    index = sums.index.unsqueeze(2)
    both = whole.scatter_add(3, index.expand(whole.shape), shifted)
    dv = both[:, :, :-1]
    dk = (dv * sums.values).sum(2) + both[:, :, -1]  # (B, h, T)
    dweight = weight.new_empty(0)
    if need_bias:
        p = sums.biased / sums.den
        at_source = sums.values.gather(3, index.expand(sums.values.shape))
        dweight = (p * ((g * at_source).sum(2) - dmean.squeeze(2))).sum((0, 2)).to(weight.dtype)
    return (
        dq,
        dk.transpose(1, 2).to(k.dtype),
        dv.permute(0, 3, 1, 2).flatten(2).to(v.dtype),
        dweight,
    )


def _shifted_sources(offset: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    # (h, T): the source at each target's offset (0 where it lies outside the grid), and whether it lies inside.
    height, width = grid
    token = torch.arange(height * width, device=offset.device)
    row, column = token // width + offset[:, :1], token % width + offset[:, 1:]
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    return torch.where(inside, row * width + column, 0), inside
