"""The AFT token mixers: projections around one operation of `aft_vision.ops`.

All are called as `mixer(x, grid, mask)`: x (B, T, C), grid (H, W) in tokens or None, mask (B, T) bool, True where a
token counts. In `timm.layers.is_exportable()` mode they request `backend='aten'`, because exporters do not support
custom operators; the causal mixers have no aten form.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function, to_2tuple
from torch import Tensor

from aft_vision import ops
from aft_vision.layers.base import AFTMixer, GridMixer
from aft_vision.layers.onehot import AFTOnehot
from aft_vision.layers.position_bias import AxisBias, FactorizedBias, PairwiseBias, StandardizedKernel


class AFTFull(AFTMixer):
    """AFT-full token mixer with a learned bias for each pair of positions (AFT Eq. 2, AFT Eq. 7).

    Args:
        dim: channels C.
        num_tokens: T, including prefix tokens. A shorter sequence uses the first rows and columns of the bias.
        grid: (H, W) of the tokens after the prefix; the bias is resampled for other grids.
        factorize_bias: False stores the whole (T, T) bias (Table 9).
        bias_dim: width d' of the factors.
        causal: mask the future.
        kwargs: of `AFTMixer`.
    """

    causal: Final[bool]

    def __init__(
        self,
        dim: int,
        num_tokens: int,
        grid: tuple[int, int] | None = None,
        factorize_bias: bool = True,
        bias_dim: int = 128,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, dim, device=device, dtype=dtype, **kwargs)
        self.causal = causal
        self.position_bias = _create_bias(num_tokens, grid, factorize_bias, bias_dim, None, causal, device, dtype)
        self.reset_parameters()

    def init_weights(self) -> None:
        self.position_bias.reset_parameters()

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        q, k, v = self._project(x)
        bias = self.position_bias(grid)
        # A full slice would stay in the exported graph, and Core ML's converter does not support it.
        if grid is None and not (self.exportable and bias.shape[0] == x.shape[1]):
            bias = shorten_bias(bias, x.shape[1])
        if self.causal:
            y = ops.aft_full_causal(q, k, v, bias, mask)
        else:
            y = ops.aft_full(q, k, v, bias, mask, self._backend())
        return self.proj_drop(self.proj(y))


class AFTLocal(AFTMixer):
    """AFT-local token mixer: position biases inside a window of the sequence, none outside (AFT Eq. 4).

    Args:
        dim: channels C.
        num_tokens: T, including prefix tokens. A shorter sequence uses the first rows of the bias.
        window_size: s, in tokens along the sequence, at least 1: |t - t'| < s.
        grid: (H, W) of the tokens after the prefix; the bias is resampled for other grids.
        factorize_bias: False stores the whole (T, T) bias (Table 3).
        bias_dim: width d' of the factors.
        causal: mask the future.
        kwargs: of `AFTMixer`.
    """

    causal: Final[bool]

    def __init__(
        self,
        dim: int,
        num_tokens: int,
        window_size: int,
        grid: tuple[int, int] | None = None,
        factorize_bias: bool = True,
        bias_dim: int = 128,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, dim, device=device, dtype=dtype, **kwargs)
        if window_size < 1:
            raise ValueError(f"window_size must be at least 1 (a window of 0 is mixer='simple'), got {window_size}")
        self.causal = causal
        self.position_bias = _create_bias(
            num_tokens, grid, factorize_bias, bias_dim, window_size, causal, device, dtype
        )
        self.reset_parameters()

    def init_weights(self) -> None:
        self.position_bias.reset_parameters()

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        q, k, v = self._project(x)
        band = self.position_bias(grid)
        if grid is None and not (self.exportable and band.shape[0] == x.shape[1]):
            band = band[: x.shape[1]]
        if self.causal:
            y = ops.aft_local_causal(q, k, v, band, mask)
        else:
            y = ops.aft_local(q, k, v, band, mask, self._backend())
        return self.proj_drop(self.proj(y))


class AFTSimple(AFTMixer):
    """AFT-simple token mixer: one global, key-weighted mean, multiplied by a gate (AFT Eq. 5).

    Args:
        dim: channels C.
        causal: mask the future.
        kwargs: of `AFTMixer`.
    """

    causal: Final[bool]

    def __init__(self, dim: int, causal: bool = False, **kwargs: Any) -> None:
        super().__init__(dim, dim, **kwargs)
        self.causal = causal
        self.reset_parameters()

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        q, k, v = self._project(x)
        y = ops.aft_simple_causal(q, k, v, mask) if self.causal else ops.aft_simple(q, k, v, mask, self._backend())
        return self.proj_drop(self.proj(y))


class AFTConv(GridMixer):
    """AFT-conv token mixer: relative position biases shared over the grid (AFT Eq. 6, AFT Eq. 8).

    Args:
        dim: channels C.
        num_heads: h, which divides dim; keys have one channel per head. None means one head per channel.
        kernel_size: s, in tokens, odd; may exceed the grid.
        standardize_kernel: False trains the raw kernel (Table 10).
        global_context: False gives tokens outside the window no weight (the degenerate variant of Sec. 5.3).
        gumbel: one biased offset per head: sampled in training, the one with the largest bias in evaluation (AFT Eq.
            10).
        tau: temperature of that sample; may change during training.
        straight_through: in training too, bias only the offset with the largest entry, with the gradient of the sample.
        kwargs: of `GridMixer`.
    """

    gumbel: Final[bool]
    straight_through: Final[bool]
    global_context: Final[bool]

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        kernel_size: int = 11,
        standardize_kernel: bool = True,
        global_context: bool = True,
        gumbel: bool = False,
        tau: float = 0.5,
        straight_through: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        if gumbel and not global_context:
            raise ValueError('gumbel=True needs global_context=True, got global_context=False')
        if straight_through and not gumbel:
            raise ValueError('straight_through=True needs gumbel=True, got gumbel=False')
        if tau <= 0:
            raise ValueError(f'tau must be positive, got {tau}')
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        self.gumbel, self.straight_through, self.tau = gumbel, straight_through, tau
        self.global_context = global_context
        num_heads = self.split_sizes[-2]
        self.kernel = StandardizedKernel(num_heads, kernel_size, standardize_kernel, device=device, dtype=dtype)
        self.reset_parameters()

    def init_weights(self) -> None:
        super().init_weights()
        self.kernel.reset_parameters()

    def evaluated_kernel(self) -> Tensor:
        """Return the position biases w (h, s, s) of evaluation: after AFT Eq. 8, and the maximum of AFT Eq. 10."""
        kernel = self.kernel()
        return ops.hard_kernel(kernel) if self.gumbel else kernel

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        if grid is None:
            raise ValueError('AFTConv needs the token grid (H, W), got None')
        q, k, v = self._project(x)
        kernel = self.kernel()
        if self.gumbel and not self.training and not self.exportable:
            offset, weight = ops.onehot_kernel(kernel)
            y = ops.aft_onehot(q, k, v, offset, weight, grid, mask)
        else:
            if self.gumbel:
                if self.training:
                    kernel = ops.gumbel_kernel(kernel, self.tau, self.straight_through)
                else:
                    kernel = ops.hard_kernel(kernel)
            y = ops.aft_conv(q, k, v, kernel, grid, mask, self.global_context, self._backend())
        return self._output(y, v, grid, mask)


class AFTAxial(GridMixer):
    """AFT-axial token mixer: position biases that are a sum over rows and columns (AFT Eq. 2, structured; ours).

    Args:
        dim: channels C.
        num_heads: h, which divides dim; keys and biases have one channel per head. None is one head per channel.
        window_size: s of both axes, or (rows, columns), in tokens: distances below s have a bias, those beyond none.
        standardize_kernel: False trains the raw biases; else those of each axis are standardised (AFT Eq. 8).
        resample_bias: stretch the biases over all distances of a grid of another size.
        kwargs: of `GridMixer`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        window_size: int | tuple[int, int] = 14,
        standardize_kernel: bool = True,
        resample_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        self.row_bias, self.column_bias = (
            AxisBias(self.split_sizes[-2], size, standardize_kernel, resample_bias, device=device, dtype=dtype)
            for size in to_2tuple(window_size)
        )
        self.reset_parameters()

    def init_weights(self) -> None:
        super().init_weights()
        self.row_bias.reset_parameters()
        self.column_bias.reset_parameters()

    @torch.jit.ignore
    def kernel(self, grid: tuple[int, int] | None = None) -> Tensor:
        """Return the bias of every offset of a grid (H, W), (h, 2H - 1, 2W - 1); without one, of those learned."""
        axes = (self.row_bias, self.column_bias)
        sizes = grid or tuple((axis.weight.shape[1] + 1) // 2 for axis in axes)
        biases = (axis(size) for axis, size in zip(axes, sizes, strict=True))
        rows, columns = (
            F.pad(bias, [size - (bias.shape[1] + 1) // 2] * 2) for bias, size in zip(biases, sizes, strict=True)
        )
        return rows[:, :, None] + columns[:, None, :]

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        if grid is None:
            raise ValueError('AFTAxial needs the token grid (H, W), got None')
        q, k, v = self._project(x)
        rows, columns = self.row_bias(grid[0]), self.column_bias(grid[1])
        y = ops.aft_axial(q, k, v, rows, columns, grid, mask, self._backend())
        return self._output(y, v, grid, mask)


# A leaf for FX, which cannot compare a traced length.
@torch.fx.wrap
@register_notrace_function
def shorten_bias(bias: Tensor, tokens: int) -> Tensor:
    """Return the first rows and columns of a bias (T, T); in an ordinary call the bias itself where that is all."""
    if torch.jit.is_scripting():
        return bias[:tokens, :tokens]
    captured = torch.jit.is_tracing() or torch.compiler.is_compiling()
    return bias if bias.shape[0] == tokens and not captured else bias[:tokens, :tokens]


MIXERS: dict[str, type[AFTMixer]] = {
    'full': AFTFull,
    'local': AFTLocal,
    'simple': AFTSimple,
    'conv': AFTConv,
    'onehot': AFTOnehot,
    'axial': AFTAxial,
}


def create_mixer(name: str, dim: int, **kwargs: Any) -> AFTMixer:
    """Build a mixer by name.

    Args:
        name: 'full', 'local', 'simple', 'conv', 'onehot' or 'axial'.
        dim: channels C.
        kwargs: of the mixer.

    Raises:
        ValueError: the name is unknown.
        TypeError: the mixer has no such argument.
    """
    if name not in MIXERS:
        raise ValueError(f'mixer must be one of {", ".join(MIXERS)}, got {name!r}')
    return MIXERS[name](dim, **kwargs)


def _create_bias(
    num_tokens: int,
    grid: tuple[int, int] | None,
    factorize: bool,
    bias_dim: int,
    window: int | None,
    causal: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> FactorizedBias | PairwiseBias:
    if factorize:
        return FactorizedBias(num_tokens, bias_dim, grid, window, causal, device=device, dtype=dtype)
    return PairwiseBias(num_tokens, grid, window, causal, device=device, dtype=dtype)
