"""Token mixers with constant position weights, for files that other runtimes load.

Eq. 8 and the exponentials of the bias are computed once, in float64, and stored as constants. AFT-axial stores its
biases, whose exponentials depend on the grid.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers import register_notrace_function
from torch import Tensor, nn

from aft_vision.ops import aten

LOWERINGS = ('conv', 'matmul')


@register_notrace_function
def tokens_to_maps(x: Tensor, grid: tuple[int, int], mask: Tensor | None) -> Tensor:
    """Return tokens (B, H * W, C) as maps (B, C, H, W), 0 where the mask (B, H * W) is False."""
    if mask is not None:
        x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], grid[0], grid[1])


class FlatLinear(nn.Linear):
    """Rows of a projection, as a product of two matrices and a bias.

    ONNX has one operator for that, Gemm. Otherwise a runtime adds the bias by itself, unless it knows the sizes.

    Args:
        linear: the projection.
        rows: which of its outputs, in which order.
        columns: order of its inputs.
    """

    def __init__(
        self, linear: nn.Linear, rows: Tensor | slice = slice(None), columns: Tensor | slice = slice(None)
    ) -> None:
        weight, bias = linear.weight.detach()[rows][:, columns], linear.bias
        super().__init__(weight.shape[1], weight.shape[0], bias is not None, weight.device, weight.dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias.detach()[rows], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2)).view(*x.shape[:-1], self.out_features)


class FrozenMixer(nn.Module):
    """A mixer's projections around an aten form with constant position weights.

    Args:
        mixer: the mixer, which must not be used afterwards: its local convolution is reordered in place.
        form: a function of queries or None, keys, values, the constants, grid and mask.
        order: order of the channels of queries and values between the projections.
        constants: the constants of the form in their order, by the names of their buffers.
    """

    def __init__(
        self, mixer: Any, form: Callable[..., Tensor], order: Tensor | slice = slice(None), **constants: Tensor
    ) -> None:
        super().__init__()
        # Apart, so that no copy splits their result.
        *query, key, value = torch.arange(mixer.qkv.out_features).split(mixer.split_sizes)
        self.query = FlatLinear(mixer.qkv, query[0][order]) if query else None
        self.key, self.value = FlatLinear(mixer.qkv, key), FlatLinear(mixer.qkv, value[order])
        self.proj = FlatLinear(mixer.proj, columns=order) if isinstance(mixer.proj, nn.Linear) else mixer.proj
        self.local_conv: nn.Conv2d | None = getattr(mixer, 'local_conv', None)
        if self.local_conv is not None:
            for parameter in self.local_conv.parameters():
                parameter.data = parameter.data[order]
        self.form, self.constants = form, list(constants)
        dtype = torch.float64 if self.value.weight.dtype == torch.float64 else torch.float32
        for name, constant in constants.items():
            self.register_buffer(name, constant.to(dtype).contiguous())

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        q, v = None if self.query is None else self.query(x), self.value(x)
        constants = [self.get_buffer(name) for name in self.constants]
        y = self.form(q, self.key(x), v, *constants, grid, mask)
        if self.local_conv is not None:
            assert grid is not None
            y = y + self.local_conv(tokens_to_maps(v, grid, mask)).flatten(2).transpose(1, 2)
        return self.proj(y)


def freeze_conv(mixer: Any) -> FrozenMixer:
    """Freeze an AFT-conv as a global sum plus a depthwise convolution, for any grid (AFT Eq. 6)."""
    taps, outside = aten.conv_taps(mixer.evaluated_bias(), mixer.global_context)
    if not isinstance(mixer.proj, nn.Linear):
        # Without a projection after it the result keeps its order.
        return FrozenMixer(mixer, aten.mix_conv, taps=taps, outside=outside)
    heads_last = torch.arange(mixer.split_sizes[-1]).view(len(taps), -1).t().flatten()
    return FrozenMixer(mixer, partial(aten.mix_conv, heads_last=True), heads_last, taps=taps, outside=outside)


def freeze_axial(mixer: Any) -> FrozenMixer:
    """Freeze an AFT-axial as one product along columns and one along rows, for every grid."""
    rows, columns = (axis.double().compute() for axis in (mixer.row_bias, mixer.column_bias))
    return FrozenMixer(mixer, _mix_resampled if mixer.row_bias.resample else aten.aft_axial, rows=rows, columns=columns)


def _mix_resampled(
    q: Tensor | None, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, grid: tuple[int, int], mask: Tensor | None
) -> Tensor:
    return aten.aft_axial(q, k, v, _resample_axis(rows, grid[0]), _resample_axis(columns, grid[1]), grid, mask)


def freeze_pairs(mixer: Any, form: Callable[..., Tensor], weights: Tensor) -> FrozenMixer:
    """Freeze a mixer as a product with constant (T, T) matrices, for one grid (AFT Eq. 2, 4, 6).

    Args:
        form: `aten.mix_full` or `aten.mix_matmul`.
        weights: of the form.
    """
    return FrozenMixer(mixer, partial(_on_any_grid, form), weights=weights)


def _on_any_grid(
    form: Callable[..., Tensor], q: Tensor | None, k: Tensor, v: Tensor, weights: Tensor, grid: Any, mask: Tensor | None
) -> Tensor:
    return form(q, k, v, weights, mask)


def _resample_axis(bias: Tensor, length: int) -> Tensor:
    # As `layers.position_bias.resample_axis`. The graph of F.interpolate for any length divides by zero for one token,
    # which has one source, whose bias cancels.
    reach = bias.shape[1] // 2
    distance = torch.arange(1 - length, length, dtype=bias.dtype, device=bias.device)
    place = distance * reach / distance[-1:].clamp(min=1) + reach
    below = place.floor()
    lower, upper = bias[:, below.long()], bias[:, place.ceil().long()]
    return lower + (upper - lower) * (place - below)
