"""The plain graphs of AFT-conv (AFT Eq. 6) and of its form with one offset per head (AFT Eq. 10)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_vision.ops.common.graph import TINY, at_least, finite, head_terms, key_weights, mix_heads
from aft_vision.ops.common.numerics import accumulate_dtype, gated, masked_values
from aft_vision.ops.conv.onehot import onehot_means


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
    heads_last: bool = False,
) -> Tensor:
    """`aft_conv` from its weights: taps (h, s, s) of the convolution, outside (h,) of the global sum.

    Args:
        heads_last: the channels of q, v and the result are in the order (c, h), as those of `conv_means`.
    """
    if heads_last:
        return gated(q, v, conv_means(k, v, taps, outside, grid, mask))
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
    ek = key_weights(k, mask, grid)
    weighted = (ek.unsqueeze(2) * masked_values(v, mask).unflatten(2, (channels, heads))).flatten(2)
    taps, outside = taps.to(ek.dtype), outside.to(ek.dtype)
    # Two convolutions, with one map an output, are what runtimes are fast at.
    num, num_outside = _convolve(weighted, taps.repeat(channels, 1, 1), outside.repeat(channels), grid)
    den, den_outside = _convolve(ek, taps, outside, grid)
    # Where the two cancel, less than the rounding of the sum is no information.
    least = at_least(torch.finfo(ek.dtype).eps * den_outside, TINY[ek.dtype])
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
    x = head_terms(k, v, matrix.shape[0], mask).transpose(1, 2)  # (B, h, T, c + 1)
    return mix_heads(q, v, (matrix.to(x.dtype) @ x).transpose(1, 2))


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


def _reference(kernel: Tensor, global_context: bool) -> tuple[Tensor, Tensor]:
    # The largest bias of each head, and the weight outside its window relative to that: (h, 1, 1) each.
    reference = finite(kernel.amax(dim=(1, 2), keepdim=True))
    if not global_context:
        return reference, torch.zeros_like(reference)
    reference = at_least(reference, 0.0)
    return reference, torch.exp(-reference)


def _convolve(x: Tensor, taps: Tensor, outside: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    # Each map of x (B, T, n) with its own taps (n, s, s), (B, T, n), and outside (n,) times its sum, (B, 1, n).
    half, maps = taps.shape[-1] // 2, x.unflatten(1, (grid[0], grid[1]))
    # Runtimes compute the columns that see the padding of a convolution one by one, so the maps are made wider. They
    # would merge the two if nothing, here the permutation, were in between.
    wider = F.pad(maps, (0, 0, half, half)).permute(0, 3, 1, 2)
    y = F.conv2d(wider, taps.unsqueeze(1), padding=(half, 0), groups=len(taps)).permute(0, 2, 3, 1).flatten(1, 2)
    return y, outside * maps.sum(2).sum(1).unsqueeze(1)
