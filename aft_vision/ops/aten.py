"""The operations as plain, differentiable aten graphs, for exporters that know no custom operator (ONNX, Core ML).

Equal to `aft_vision.ops` while, in float32, (largest w - w) + (largest k - k) stays below about 87 nats at some source
of every target; beyond that finite, but a target may come out as 0. `aft_conv` is the paper's convolution form, so one
graph serves every grid; w below about -8 at a dominating key costs it digits, and w below about -15 in a window over
the whole grid all of them, though it stays about as large as the values. `mix_matmul` loses none, and serves one
grid; `aft_onehot` and `aft_axial` lose none either. The forms are split in two, so that an exporter can compute the
weights once and keep them as constants.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_vision.ops.common.numerics import accumulate_dtype, gated, masked_values
from aft_vision.ops.conv.onehot import onehot_means
from aft_vision.ops.local.band import skew

TINY = 1e-30


def aft_full(q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    """`ops.aft_full` in aten (AFT Eq. 2)."""
    return mix_full(q, k, v, full_weights(bias), mask)


def full_weights(bias: Tensor) -> Tensor:
    """The weights that `mix_full` takes, exp(w) relative to the largest of each row.

    Args:
        bias: (T, T) position bias w.

    Returns:
        (T, T).
    """
    bias = bias.to(accumulate_dtype(bias))
    return torch.exp(bias - bias.amax(dim=1, keepdim=True).clamp_min(torch.finfo(bias.dtype).min))


def mix_full(q: Tensor | None, k: Tensor, v: Tensor, weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """`aft_full` from its weights, (T, T)."""
    ek = _shifted_exp(k, mask)
    weights = weights.to(ek.dtype)
    return gated(q, v, _ratio(weights @ (ek * masked_values(v, mask)), weights @ ek))


def aft_simple(q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """`ops.aft_simple` in aten (AFT Eq. 5)."""
    ek = _shifted_exp(k, mask)
    num, den = (ek * masked_values(v, mask)).sum(1, keepdim=True), ek.sum(1, keepdim=True)
    return gated(q, v, _ratio(num, den)) + torch.zeros_like(v)


def aft_conv(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    grid: tuple[int, int],
    mask: Tensor | None = None,
    global_context: bool = True,
) -> Tensor:
    """`ops.aft_conv` in aten: the global sum plus a depthwise convolution (AFT Eq. 6)."""
    taps, outside = conv_taps(kernel, global_context)
    return mix_conv(q, k, v, taps, outside, grid, mask)


def conv_taps(kernel: Tensor, global_context: bool = True) -> tuple[Tensor, Tensor]:
    """The weights that `mix_conv` takes, relative to the largest of each head.

    Args:
        kernel: (h, s, s) position bias w.

    Returns:
        Weights of the convolution, exp(w) - 1, (h, s, s), and of the global sum, (h,).
    """
    kernel = kernel.to(accumulate_dtype(kernel))
    reference, outside = _reference(kernel, global_context)
    return torch.exp(kernel - reference) - outside, outside.flatten()


def mix_conv(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    taps: Tensor,
    outside: Tensor,
    grid: tuple[int, int],
    mask: Tensor | None = None,
) -> Tensor:
    """`aft_conv` from its weights: taps (h, s, s) of the convolution, outside (h,) of the global sum."""
    heads = len(taps)
    by_channel = v.unflatten(2, (heads, -1)).transpose(2, 3).flatten(2)
    y = conv_means(k, by_channel, taps, outside, grid, mask)
    return gated(q, v, y.unflatten(2, (-1, heads)).transpose(2, 3).flatten(2))


def conv_means(
    k: Tensor, v: Tensor, taps: Tensor, outside: Tensor, grid: tuple[int, int], mask: Tensor | None = None
) -> Tensor:
    """Return the weighted means of `aft_conv`, before the gate.

    Args:
        k: (B, T, h).
        v: (B, T, c h), the channels in the order (c, h), so that the h weights of a token stay side by side in memory.
        taps: (h, s, s) weights of the convolution.
        outside: (h,) weight of the global sum.

    Returns:
        (B, T, c h), in the order of v.
    """
    heads = len(taps)
    channels = v.shape[2] // heads
    ek = _shifted_exp(k, mask, grid)
    weighted = (ek.unsqueeze(2) * masked_values(v, mask).unflatten(2, (channels, heads))).flatten(2)
    taps, outside = taps.to(ek.dtype), outside.to(ek.dtype)
    # Two convolutions, with one map an output, are what runtimes are fast at.
    num, num_outside = _convolve(weighted, taps.repeat(channels, 1, 1), outside.repeat(channels), grid)
    den, den_outside = _convolve(ek, taps, outside, grid)
    # Where the two cancel, less than the rounding of the sum is no information.
    least = (torch.finfo(ek.dtype).eps * den_outside).clamp_min(TINY)
    num, den = (num + num_outside).unflatten(2, (channels, heads)), torch.maximum(den + den_outside, least)
    return (num / den.unsqueeze(2)).flatten(2)


def conv_matrix(kernel: Tensor, grid: tuple[int, int], global_context: bool = True) -> Tensor:
    """The weights that `mix_matmul` takes: exp(w) within the window, 1 outside, relative to the largest of each head.

    Args:
        kernel: (h, s, s) position bias w.
        grid: (H, W) in tokens.

    Returns:
        (h, T, T) of targets and sources, T = H W.
    """
    kernel = kernel.to(accumulate_dtype(kernel))
    (height, width), half = grid, kernel.shape[-1] // 2
    reference, outside = _reference(kernel, global_context)
    # All shifts (dy, dx) from target to source that a grid of any size up to the window's, or to (H, W), has.
    reach_y, reach_x = max(height - 1, half), max(width - 1, half)
    shifts = outside.expand(-1, 2 * reach_y + 1, 2 * reach_x + 1).clone()
    shifts[:, reach_y - half : reach_y + half + 1, reach_x - half : reach_x + half + 1] = torch.exp(kernel - reference)
    y, x = torch.arange(height, device=kernel.device), torch.arange(width, device=kernel.device)
    dy, dx = y - y[:, None] + reach_y, x - x[:, None] + reach_x  # (H, H) and (W, W)
    return shifts[:, dy[:, None, :, None], dx[None, :, None, :]].reshape(-1, height * width, height * width)


def mix_matmul(q: Tensor | None, k: Tensor, v: Tensor, matrix: Tensor, mask: Tensor | None = None) -> Tensor:
    """`ops.aft_conv` as one matrix product per head, from its weights, (h, T, T); none is negative (AFT Eq. 6)."""
    x = _weighted(k, v, matrix.shape[0], mask).transpose(1, 2)  # (B, h, T, c + 1)
    return _mixed(q, v, (matrix.to(x.dtype) @ x).transpose(1, 2))


def aft_onehot(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    offset: Tensor,
    weight: Tensor,
    grid: tuple[int, int],
    mask: Tensor | None = None,
) -> Tensor:
    """`ops.aft_onehot` in aten (AFT Eq. 10)."""
    return gated(q, v, onehot_means(k, v, offset, weight, grid, mask))


def aft_axial(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    row_bias: Tensor,
    column_bias: Tensor,
    grid: tuple[int, int],
    mask: Tensor | None = None,
) -> Tensor:
    """`ops.aft_axial` in aten: one product along columns and one along rows, for every grid."""
    rows, columns = axis_weights(row_bias, grid[0]), axis_weights(column_bias, grid[1])
    x = _weighted(k, v, row_bias.shape[0], mask)  # (B, T, h, c + 1)
    maps = x.permute(0, 2, 3, 1).unflatten(3, (grid[0], grid[1]))  # (B, h, c + 1, H, W)
    rows, columns = (w.to(x.dtype).unsqueeze(1) for w in (rows, columns))
    y = rows @ (maps @ columns.transpose(2, 3))
    return _mixed(q, v, y.flatten(3).permute(0, 3, 1, 2))


def axis_weights(bias: Tensor, length: int) -> Tensor:
    """The weights of `aft_axial` along one axis, relative to the largest of each target.

    Args:
        bias: (h, 2s - 1) position bias, 0 beyond.
        length: L, tokens along the axis.

    Returns:
        (h, L, L) of targets and sources.
    """
    reach = (bias.shape[1] + 1) // 2
    place = torch.arange(length, device=bias.device)
    # Two zeros around the bias stand for all that lies beyond, so that one graph serves every length.
    offset = (place - place.unsqueeze(1)).clamp(-reach, reach) + reach
    logits = F.pad(bias.to(accumulate_dtype(bias)), (1, 1))[:, offset]
    return torch.exp(logits - logits.amax(dim=2, keepdim=True).clamp_min(torch.finfo(logits.dtype).min))


def aft_local(q: Tensor | None, k: Tensor, v: Tensor, band: Tensor, mask: Tensor | None = None) -> Tensor:
    """`ops.aft_local` in aten, through the whole (T, T) bias (AFT Eq. 4)."""
    return aft_full(q, k, v, unbanded(band), mask)


def unbanded(band: Tensor) -> Tensor:
    """The whole position bias of a band, 0 outside it.

    Args:
        band: (T, 2s - 1).

    Returns:
        (T, T).
    """
    tokens, width = band.shape
    return skew(band)[:, width // 2 : width // 2 + tokens]


def _reference(kernel: Tensor, global_context: bool) -> tuple[Tensor, Tensor]:
    # The largest bias of each head, and the weight outside its window relative to that: (h, 1, 1) each.
    reference = kernel.amax(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(kernel.dtype).min)
    if not global_context:
        return reference, torch.zeros_like(reference)
    reference = reference.clamp_min(0.0)
    return reference, torch.exp(-reference)


def _shifted_exp(k: Tensor, mask: Tensor | None, grid: tuple[int, int] | None = None) -> Tensor:
    k = k.to(accumulate_dtype(k))
    if mask is not None:
        k = k.masked_fill(~mask.unsqueeze(-1), -1e30)
    # Along rows, then along columns: in onnxruntime ten times as fast for 64 x 64 tokens as over all tokens at once.
    largest = k.amax(dim=1) if grid is None else k.unflatten(1, (grid[0], grid[1])).amax(dim=2).amax(dim=1)
    # Finite: exp(-inf - finite) = 0.
    ek = torch.exp(k - largest.unsqueeze(1).clamp_min(torch.finfo(k.dtype).min))
    return ek if mask is None else ek * mask.unsqueeze(-1)


def _weighted(k: Tensor, v: Tensor, heads: int, mask: Tensor | None) -> Tensor:
    # e^k v and e^k of each head, (B, T, h, c + 1).
    ek = _shifted_exp(k, mask).unsqueeze(-1)
    return torch.cat([ek * masked_values(v, mask).unflatten(2, (heads, -1)), ek], -1)


def _convolve(x: Tensor, taps: Tensor, outside: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    # Each map of x (B, T, n) with its own taps (n, s, s), (B, T, n), and outside (n,) times its sum, (B, 1, n).
    half, maps = taps.shape[-1] // 2, x.unflatten(1, (grid[0], grid[1]))
    # Runtimes compute the columns that see the padding of a convolution one by one, so the maps are made wider. They
    # would merge the two if nothing, here the permutation, were in between.
    wider = F.pad(maps, (0, 0, half, half)).permute(0, 3, 1, 2)
    y = F.conv2d(wider, taps.unsqueeze(1), padding=(half, 0), groups=len(taps)).permute(0, 2, 3, 1).flatten(1, 2)
    return y, outside * maps.sum(2).sum(1).unsqueeze(1)


def _mixed(q: Tensor | None, v: Tensor, y: Tensor) -> Tensor:
    # (B, T, h, c + 1), the denominators last.
    return gated(q, v, _ratio(y[..., :-1], y[..., -1:]).flatten(2))


def _ratio(num: Tensor, den: Tensor) -> Tensor:
    return num / den.clamp_min(TINY)
