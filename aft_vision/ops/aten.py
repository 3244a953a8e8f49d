"""The operations as plain, differentiable aten graphs, for exporters that know no custom operator (ONNX, Core ML).

Equal to `aft_vision.ops` while, in float32, (largest w - w) + (largest k - k) stays below about 87 nats at some source
of every target; beyond that finite, but a target may come out as 0. `aft_conv` is the paper's convolution form, so one
graph serves every grid; w below about -8 at a dominating key costs it digits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_vision.ops.eager.band import skew

TINY = 1e-30


def aft_full(q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    """`ops.aft_full` in aten (AFT Eq. 2)."""
    ek = _shifted_exp(k, mask)
    bias = bias.to(ek.dtype)
    exp_w = torch.exp(bias - bias.amax(dim=1, keepdim=True))
    return _gated(q, v, exp_w @ (ek * v), exp_w @ ek)


def aft_simple(q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """`ops.aft_simple` in aten (AFT Eq. 5)."""
    ek = _shifted_exp(k, mask)
    num, den = (ek * v).sum(1, keepdim=True), ek.sum(1, keepdim=True)
    return _gated(q, v, num, den) + torch.zeros_like(v)


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
    heads, size = kernel.shape[0], kernel.shape[1]
    ek = _shifted_exp(k, mask)  # (B, T, h)
    x = torch.cat([ek.unsqueeze(-1) * v.unflatten(2, (heads, -1)), ek.unsqueeze(-1)], -1)  # (B, T, h, c + 1)
    channels = x.shape[3]
    kernel = kernel.to(x.dtype)
    reference = kernel.amax(dim=(1, 2), keepdim=True)
    if global_context:
        reference = reference.clamp_min(0.0)
    outside = torch.exp(-reference) if global_context else torch.zeros_like(reference)
    taps = (torch.exp(kernel - reference) - outside).repeat_interleave(channels, dim=0).unsqueeze(1)
    maps = x.flatten(2).transpose(1, 2).unflatten(2, (grid[0], grid[1]))  # (B, h (c + 1), H, W)
    y = F.conv2d(maps, taps, padding=size // 2, groups=heads * channels)
    y = y.flatten(2).transpose(1, 2).unflatten(2, (heads, channels))
    y = y + outside.view(heads, 1) * x.sum(1, keepdim=True)
    num, den = y[..., :-1], y[..., -1:].clamp_min(TINY)
    return _gated(q, v, (num / den).flatten(2), torch.ones_like(k[..., :1]))


def aft_local(q: Tensor | None, k: Tensor, v: Tensor, band: Tensor, mask: Tensor | None = None) -> Tensor:
    """`ops.aft_local` in aten, through the whole (T, T) bias (AFT Eq. 4)."""
    tokens, width = band.shape
    return aft_full(q, k, v, skew(band)[:, width // 2 : width // 2 + tokens], mask)


def _shifted_exp(k: Tensor, mask: Tensor | None) -> Tensor:
    k = k if k.dtype == torch.float64 else k.float()
    if mask is not None:
        k = k.masked_fill(~mask.unsqueeze(-1), -1e30)
    ek = torch.exp(k - k.amax(dim=1, keepdim=True))
    return ek if mask is None else ek * mask.unsqueeze(-1)


def _gated(q: Tensor | None, v: Tensor, num: Tensor, den: Tensor) -> Tensor:
    y = num / den.clamp_min(TINY)
    return y.to(v.dtype) if q is None else (torch.sigmoid(q.to(y.dtype)) * y).to(q.dtype)
