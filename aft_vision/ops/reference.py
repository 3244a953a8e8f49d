"""Every equation term by term, in any dtype: the oracle of the tests.

Shapes as in `aft_vision.ops`. These functions form the (B, T, S, D) weights and are only for tests and pictures.
"""

import torch
from einops import rearrange, repeat
from torch import Tensor


def weighted_mean(q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    """AFT Eq. 2 with a bias (T, S, D) per channel, minus infinity for sources that a target must not see."""
    logits = rearrange(k, 'b s d -> b 1 s d') + rearrange(bias, 't s d -> 1 t s d')
    if mask is not None:
        logits = logits.masked_fill(rearrange(~mask, 'b s -> b 1 s 1'), float('-inf'))
    peak = logits.amax(dim=2, keepdim=True)
    empty = peak == float('-inf')  # no visible source: the result is 0
    weight = torch.exp(logits - peak.masked_fill(empty, 0.0).detach())
    total = weight.sum(2, keepdim=True).masked_fill(empty, 1.0)
    y = (weight / total * rearrange(v, 'b s d -> b 1 s d')).sum(2)
    return y if q is None else torch.sigmoid(q) * y


def causal_mask(tokens: int) -> Tensor:
    """(T, T): 0 where a target sees a source, minus infinity in its future."""
    return torch.triu(torch.full((tokens, tokens), float('-inf'), dtype=torch.float64), diagonal=1)


def band_to_bias(band: Tensor, first: int) -> Tensor:
    """(T, T) with w[t, t + first + j] = band[t, j] inside the sequence and 0 elsewhere (AFT Eq. 4)."""
    tokens, width = band.shape
    bias = band.new_zeros(tokens, tokens)
    for j in range(width):
        shift = first + j
        if abs(shift) < tokens:
            target = torch.arange(max(0, -shift), min(tokens, tokens - shift))
            bias = bias.index_put((target, target + shift), band[target, j])
    return bias


def kernel_to_bias(kernel: Tensor, grid: tuple[int, int], outside: float = 0.0) -> Tensor:
    """(T, T, h) with w[(y, x), (y + dy, x + dx), i] = kernel[i, s//2 + dy, s//2 + dx] (AFT Eq. 6), else `outside`."""
    size = kernel.shape[1]
    height, width = grid
    y = repeat(torch.arange(height), 'y -> (y x)', x=width)
    x = repeat(torch.arange(width), 'x -> (y x)', y=height)
    dy, dx = y[None, :] - y[:, None] + size // 2, x[None, :] - x[:, None] + size // 2  # (T, T)
    inside = (dy >= 0) & (dy < size) & (dx >= 0) & (dx < size)
    taps = kernel[:, dy.clamp(0, size - 1), dx.clamp(0, size - 1)]
    return rearrange(torch.where(inside, taps, kernel.new_tensor(outside)), 'h t s -> t s h')


def aft_full(q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    """AFT Eq. 2, term by term."""
    return weighted_mean(q, k, v, bias[:, :, None], mask)


def aft_local(q: Tensor | None, k: Tensor, v: Tensor, band: Tensor, mask: Tensor | None = None) -> Tensor:
    """AFT Eq. 2 with the bias of AFT Eq. 4, term by term."""
    return aft_full(q, k, v, band_to_bias(band, -(band.shape[1] // 2)), mask)


def aft_simple(q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """AFT Eq. 5, term by term."""
    return aft_full(q, k, v, k.new_zeros(k.shape[1], k.shape[1]), mask)


def aft_conv(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    grid: tuple[int, int],
    mask: Tensor | None = None,
    global_context: bool = True,
) -> Tensor:
    """AFT Eq. 6 as AFT Eq. 2 with the expanded bias, term by term."""
    channels = v.shape[2] // k.shape[2]
    bias = kernel_to_bias(kernel, grid, 0.0 if global_context else float('-inf'))
    return weighted_mean(
        q, repeat(k, 'b t h -> b t (h c)', c=channels), v, repeat(bias, 't s h -> t s (h c)', c=channels), mask
    )


def aft_onehot(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    offset: Tensor,
    weight: Tensor,
    grid: tuple[int, int],
    mask: Tensor | None = None,
) -> Tensor:
    """AFT Eq. 6 with the one-hot bias of AFT Eq. 10, term by term."""
    radius = int(offset.abs().max())
    size = 2 * radius + 1
    flat = (offset[:, 0] + radius) * size + offset[:, 1] + radius
    kernel = weight.new_zeros(len(weight), size * size).scatter(1, flat[:, None], weight[:, None])
    return aft_conv(q, k, v, kernel.unflatten(1, (size, size)), grid, mask)


def axis_to_bias(bias: Tensor, length: int) -> Tensor:
    """(L, L, h) with w[y, y + d, i] = bias[i, s - 1 + d], 0 beyond."""
    centre = bias.shape[1] // 2
    found = bias.new_zeros(length, length, len(bias))
    for d in range(max(-centre, 1 - length), min(centre, length - 1) + 1):
        target = torch.arange(max(0, -d), min(length, length - d))
        found = found.index_put((target, target + d), bias[:, centre + d].expand(len(target), -1))
    return found


def axial_to_bias(row_bias: Tensor, column_bias: Tensor, grid: tuple[int, int]) -> Tensor:
    """(T, T, h) with w[(y, x), (y', x'), i] = row_bias[i, y' - y] + column_bias[i, x' - x]."""
    rows, columns = axis_to_bias(row_bias, grid[0]), axis_to_bias(column_bias, grid[1])
    bias = rearrange(rows, 'y s h -> y 1 s 1 h') + rearrange(columns, 'x r h -> 1 x 1 r h')
    return rearrange(bias, 'y x s r h -> (y x) (s r) h')


def aft_axial(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    row_bias: Tensor,
    column_bias: Tensor,
    grid: tuple[int, int],
    mask: Tensor | None = None,
) -> Tensor:
    """AFT Eq. 2 with a bias that is a sum over rows and columns, term by term."""
    channels = v.shape[2] // k.shape[2]
    bias = axial_to_bias(row_bias, column_bias, grid)
    return weighted_mean(
        q, repeat(k, 'b t h -> b t (h c)', c=channels), v, repeat(bias, 't s h -> t s (h c)', c=channels), mask
    )


def aft_full_causal(q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    """AFT Eq. 2 with the sums up to t (footnote 2), term by term."""
    return aft_full(q, k, v, bias + causal_mask(k.shape[1]).to(bias), mask)


def aft_local_causal(q: Tensor | None, k: Tensor, v: Tensor, band: Tensor, mask: Tensor | None = None) -> Tensor:
    """AFT Eq. 2 with the bias of AFT Eq. 4 and the sums up to t, term by term."""
    return aft_full_causal(q, k, v, band_to_bias(band, 1 - band.shape[1]), mask)


def aft_simple_causal(q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """AFT Eq. 5 with the sums up to t, term by term."""
    return aft_full_causal(q, k, v, k.new_zeros(k.shape[1], k.shape[1]), mask)


def standardized_kernel(kernel: Tensor, gamma: Tensor, beta: Tensor, eps: float = 1e-8) -> Tensor:
    """AFT Eq. 8, head by head."""
    heads = []
    for w, gain, shift in zip(kernel, gamma, beta, strict=True):
        deviation = ((w - w.mean()) ** 2).mean().add(eps).sqrt()
        heads.append(gain * (w - w.mean()) / deviation + shift)
    return torch.stack(heads)


def factorized_bias(bias_u: Tensor, bias_v: Tensor) -> Tensor:
    """AFT Eq. 7, entry by entry."""
    return torch.stack([torch.stack([(u * v).sum() for v in bias_v]) for u in bias_u])


def kernel_entropy(kernel: Tensor) -> Tensor:
    """AFT Eq. 9, head by head."""
    heads = []
    for w in kernel:
        p = torch.exp(w) / torch.exp(w).sum()
        heads.append((-p * torch.log(p)).sum())
    return torch.stack(heads)
