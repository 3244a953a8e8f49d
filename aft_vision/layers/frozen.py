"""Token mixers with constant position weights, for files that other runtimes load.

Eq. 8 and the exponentials of the bias are computed once, in float64, and stored as constants. AFT-axial stores its
biases, whose exponentials depend on the grid.
"""

from typing import Any

import torch
from timm.layers import register_notrace_function
from torch import Tensor, nn

from aft_vision.ops import aten
from aft_vision.ops.common.numerics import gated

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
        order: order of the channels of queries and values between the projections.
    """

    def __init__(self, mixer: Any, order: Tensor | slice = slice(None)) -> None:
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

    def _keep(self, name: str, weights: Tensor) -> None:
        dtype = torch.float64 if self.value.weight.dtype == torch.float64 else torch.float32
        self.register_buffer(name, weights.to(dtype).contiguous())

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        q, v = None if self.query is None else self.query(x), self.value(x)
        y = self.mix(q, self.key(x), v, grid, mask)
        if self.local_conv is not None:
            assert grid is not None
            y = y + self.local_conv(tokens_to_maps(v, grid, mask)).flatten(2).transpose(1, 2)
        return self.proj(y)

    def mix(self, q: Tensor | None, k: Tensor, v: Tensor, grid: tuple[int, int] | None, mask: Tensor | None) -> Tensor:
        """Return the result of the operation between the projections, (B, T, C)."""
        raise TypeError(f'{type(self).__name__} must define mix()')


class FrozenConv(FrozenMixer):
    """AFT-conv as a global sum plus a depthwise convolution, for any grid (AFT Eq. 6)."""

    taps: Tensor
    outside: Tensor

    def __init__(self, mixer: Any) -> None:
        taps, outside = aten.conv_taps(_kernel(mixer), mixer.global_context)
        order = torch.arange(mixer.split_sizes[-1]).view(len(taps), -1).t().flatten()
        # Without a projection after it the result keeps its order.
        heads_last = isinstance(mixer.proj, nn.Linear)
        super().__init__(mixer, order if heads_last else slice(None))
        self.heads_last = heads_last
        self._keep('taps', taps)
        self._keep('outside', outside)

    def mix(self, q: Tensor | None, k: Tensor, v: Tensor, grid: tuple[int, int] | None, mask: Tensor | None) -> Tensor:
        assert grid is not None
        if not self.heads_last:
            return aten.mix_conv(q, k, v, self.taps, self.outside, grid, mask)
        return gated(q, v, aten.conv_means(k, v, self.taps, self.outside, grid, mask))


class FrozenMatmul(FrozenMixer):
    """AFT-conv as one product with a (T, T) matrix per head, for one grid (AFT Eq. 6)."""

    matrix: Tensor

    def __init__(self, mixer: Any, grid: tuple[int, int]) -> None:
        super().__init__(mixer)
        self._keep('matrix', aten.conv_matrix(_kernel(mixer), grid, mixer.global_context))

    def mix(self, q: Tensor | None, k: Tensor, v: Tensor, grid: tuple[int, int] | None, mask: Tensor | None) -> Tensor:
        return aten.mix_matmul(q, k, v, self.matrix, mask)


class FrozenAxial(FrozenMixer):
    """AFT-axial as one product along columns and one along rows, for every grid."""

    rows: Tensor
    columns: Tensor

    def __init__(self, mixer: Any) -> None:
        super().__init__(mixer)
        self.resample = mixer.row_bias.resample
        self._keep('rows', mixer.row_bias.double().compute())
        self._keep('columns', mixer.column_bias.double().compute())

    def mix(self, q: Tensor | None, k: Tensor, v: Tensor, grid: tuple[int, int] | None, mask: Tensor | None) -> Tensor:
        assert grid is not None
        rows, columns = self.rows, self.columns
        if self.resample:
            rows, columns = _resample_axis(rows, grid[0]), _resample_axis(columns, grid[1])
        return aten.aft_axial(q, k, v, rows, columns, grid, mask)


class FrozenFull(FrozenMixer):
    """AFT-full or AFT-local as a product with one (T, T) matrix (AFT Eq. 2, AFT Eq. 4)."""

    weights: Tensor

    def __init__(self, mixer: Any, bias: Tensor) -> None:
        super().__init__(mixer)
        self._keep('weights', aten.full_weights(bias))

    def mix(self, q: Tensor | None, k: Tensor, v: Tensor, grid: tuple[int, int] | None, mask: Tensor | None) -> Tensor:
        return aten.mix_full(q, k, v, self.weights, mask)


def _kernel(mixer: Any) -> Tensor:
    mixer.kernel.double()
    return mixer.evaluated_bias()


def _resample_axis(bias: Tensor, length: int) -> Tensor:
    # As `layers.position_bias.resample_axis`. The graph of F.interpolate for any length divides by zero for one token,
    # which has one source, whose bias cancels.
    reach = bias.shape[1] // 2
    distance = torch.arange(1 - length, length, dtype=bias.dtype, device=bias.device)
    place = distance * reach / distance[-1:].clamp(min=1) + reach
    below = place.floor()
    lower, upper = bias[:, below.long()], bias[:, place.ceil().long()]
    return lower + (upper - lower) * (place - below)
