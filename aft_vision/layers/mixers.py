"""The AFT token mixers: projections around one operation of `aft_vision.ops`.

In `timm.layers.is_exportable()` mode they request `backend='aten'`, because exporters do not support
custom operators; the causal mixers have no aten form.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from timm.layers import is_exportable, register_notrace_function, to_2tuple, trunc_normal_
from torch import Tensor, nn

from aft_vision import ops
from aft_vision.layers.base import TokenMixer, register_mixer
from aft_vision.layers.frozen import LOWERINGS, freeze_axial, freeze_conv, freeze_pairs, tokens_to_maps
from aft_vision.layers.position_bias import (
    AxisBias,
    FactorizedBias,
    PairwiseBias,
    StandardizedKernel,
    check_kernel_size,
)
from aft_vision.ops import aten
from aft_vision.ops.causal.bias import BandBias

# A leaf for FX, which cannot branch on whether a traced mask is None.
torch.fx.wrap('tokens_to_maps')


class AFTMixer(TokenMixer):
    """An AFT mixer: one projection to queries, keys and values, and one after the operation.

    Args:
        dim: channels C of the input and output, and D of the operation.
        key_dim: channels of the keys.
        query_gate: False leaves out the query and its sigmoid (Table 12).
        qkv_bias: biases on queries, keys and values. The bias on keys cancels in every operation; DeiT has it.
        proj_bias: a bias on the output projection.
        out_proj: False leaves out the output projection (Table 3 counts none).
        proj_drop: dropout rate after the output projection.
    """

    # TorchScript reads Final annotations only from the last subclass, but these from every class.
    __constants__: ClassVar[list[str]] = ['causal', 'exportable', 'query_gate']

    def __init__(
        self,
        dim: int,
        key_dim: int,
        query_gate: bool = True,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        out_proj: bool = True,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.query_gate, self.key_dim = query_gate, key_dim
        self.exportable = is_exportable()
        self.split_sizes = [dim, key_dim, dim] if query_gate else [key_dim, dim]
        self.qkv = nn.Linear(dim, sum(self.split_sizes), bias=qkv_bias, device=device, dtype=dtype)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, device=device, dtype=dtype) if out_proj else nn.Identity()
        self.proj_drop = nn.Dropout(proj_drop)

    def reset_parameters(self) -> None:
        """Initialise all parameters, the projections as DeiT does."""
        for projection in (self.qkv, self.proj):
            if isinstance(projection, nn.Linear):
                trunc_normal_(projection.weight, std=0.02)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)
        self.init_weights()

    def _freeze(self, grid: tuple[int, int] | None, lowering: str) -> nn.Module:
        self.exportable = True
        return self

    def _backend(self) -> str:
        # Exporters do not support custom operators.
        return 'aten' if self.exportable and not torch.jit.is_scripting() else 'auto'

    def project_qkv(self, x: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        return self._split(self.qkv(x))

    def _split(self, projected: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        parts = projected.split(self.split_sizes, dim=-1)
        if self.query_gate:
            return parts[0], parts[1], parts[2]
        return None, parts[0], parts[1]


class GridMixer(AFTMixer):
    """A token mixer on a grid of any size, with one key for each head.

    Args:
        dim: channels C.
        num_heads: h, which divides dim. None means one head per channel.
        local_conv: add a 3 x 3 depthwise convolution of the values to the mean, after the gate; not in the paper.
        kwargs: of `AFTMixer`.
    """

    on_grid = True

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        local_conv: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, resolve_num_heads(dim, num_heads), device=device, dtype=dtype, **kwargs)
        self.local_conv = (
            nn.Conv2d(dim, dim, kernel_size=3, padding=1, groups=dim, device=device, dtype=dtype)
            if local_conv
            else None
        )

    def init_weights(self) -> None:
        if self.local_conv is not None:
            trunc_normal_(self.local_conv.weight, std=0.02)
            if self.local_conv.bias is not None:
                nn.init.zeros_(self.local_conv.bias)

    def dense_bias(self, grid: tuple[int, int] | None, targets: Tensor, tokens: int) -> Tensor:
        kernel = self._kernel_on(grid)
        if kernel is None:
            return super().dense_bias(grid, targets, tokens)
        assert grid is not None
        return kernel_rows(kernel, grid, targets, self._bias_outside())

    def _bias_outside(self) -> float:
        return 0.0

    def _kernel_on(self, grid: tuple[int, int] | None) -> Tensor | None:
        return self.evaluated_bias()

    def project_output(self, y: Tensor, v: Tensor, grid: tuple[int, int], mask: Tensor | None) -> Tensor:
        """Return tokens (B, T, dim) from the result of the operation and its values, both (B, T, C)."""
        if self.local_conv is not None:
            y = y + self.local_conv(tokens_to_maps(v, grid, mask)).flatten(2).transpose(1, 2)
        return self.proj_drop(self.proj(y))


class PairMixer(AFTMixer):
    """A token mixer with a learned bias for each pair of positions, or for those in a window.

    Args:
        dim: channels C.
        num_tokens: T, including prefix tokens. A shorter sequence uses the first rows, and columns, of the bias.
        window: s, in tokens along the sequence; None for all pairs.
        grid: (H, W) of the tokens after the prefix; the bias is resampled for other grids.
        factorize_bias: False stores the whole (T, T) bias (Tables 3 and 9).
        bias_dim: width d' of the factors.
        kwargs: of `AFTMixer`.
    """

    bias_names = ('position_bias.*',)
    given = ('num_tokens', 'grid', 'window')

    def __init__(
        self,
        dim: int,
        num_tokens: int,
        window: int | None,
        grid: tuple[int, int] | None = None,
        factorize_bias: bool = True,
        bias_dim: int = 128,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, dim, device=device, dtype=dtype, **kwargs)
        self.window = num_tokens if window is None else min(window, num_tokens)
        options: Any = dict(grid=grid, window=window, causal=self.causal, device=device, dtype=dtype)
        self.position_bias: FactorizedBias | PairwiseBias = (
            FactorizedBias(num_tokens, bias_dim, **options) if factorize_bias else PairwiseBias(num_tokens, **options)
        )
        self.reset_parameters()

    def init_weights(self) -> None:
        self.position_bias.reset_parameters()

    @torch.jit.ignore
    def set_grid(self, grid: tuple[int, int]) -> None:
        self.position_bias.set_grid(grid)

    def resample(self, name: str, value: Tensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
        if name in ('position_bias.u', 'position_bias.v') and value.shape[-1] == self.get_parameter(name).shape[-1]:
            return rows(value)
        if name == 'position_bias.weight' and value.shape[0] == value.shape[1]:
            return rows(rows(value).t()).t()
        return value

    def learned_bias(self) -> Tensor:
        return self.position_bias()[None]

    def dense_bias(self, grid: tuple[int, int] | None, targets: Tensor, tokens: int) -> Tensor:
        bias = self.position_bias(grid if self.position_bias.grid is not None else None)
        return self._rows(bias, targets)[None, :, :tokens]

    def _rows(self, bias: Tensor, targets: Tensor) -> Tensor:
        return bias[targets]

    def _freeze(self, grid: tuple[int, int] | None, lowering: str) -> nn.Module:
        bias = self.position_bias.double()(grid)
        weights = aten.full_weights(self._rows(bias, torch.arange(len(bias))))
        return freeze_pairs(self, aten.mix_full, weights)


@register_mixer
class AFTFull(PairMixer):
    """AFT-full token mixer with a learned bias for each pair of positions (AFT Eq. 2, AFT Eq. 7).

    Args:
        dim, num_tokens, grid, kwargs: of `PairMixer`.
    """

    name = 'full'

    def __init__(self, dim: int, num_tokens: int, grid: tuple[int, int] | None = None, **kwargs: Any) -> None:
        super().__init__(dim, num_tokens, None, grid, **kwargs)

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project_qkv(x)
        bias = self.position_bias(grid, copy=False)
        # A full slice would stay in the exported graph, and Core ML's converter does not support it.
        if grid is None and not (self.exportable and bias.shape[0] == x.shape[1]):
            bias = shorten_bias(bias, x.shape[1])
        if self.causal:
            y = ops.aft_full_causal(q, k, v, bias, mask)
        else:
            weights = self.position_bias.weights(bias, v)
            y = ops.aft_full(q, k, v, bias, mask, self._backend(), weights=weights)
        return self.proj_drop(self.proj(y))


@register_mixer
class AFTLocal(PairMixer):
    """AFT-local token mixer: position biases inside a window of the sequence, none outside (AFT Eq. 4).

    Args:
        dim, num_tokens, grid, kwargs: of `PairMixer`.
        window_size: s, in tokens along the sequence, at least 1: |t - t'| < s.
    """

    name = 'local'

    def __init__(
        self, dim: int, num_tokens: int, window_size: int, grid: tuple[int, int] | None = None, **kwargs: Any
    ) -> None:
        if not isinstance(window_size, int):
            raise ValueError(f'window_size must be one number, along the sequence, got {window_size}')
        if window_size < 1:
            raise ValueError(f"the window must be at least 1 (a window of 0 is mixer='simple'), got {window_size}")
        super().__init__(dim, num_tokens, window_size, grid, **kwargs)

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project_qkv(x)
        band = self.position_bias(grid, copy=False)
        if grid is None and not (self.exportable and band.shape[0] == x.shape[1]):
            band = band[: x.shape[1]]
        if self.causal:
            y = ops.aft_local_causal(q, k, v, band, mask)
        else:
            y = ops.aft_local(q, k, v, band, mask, self._backend())
        return self.proj_drop(self.proj(y))

    def _rows(self, bias: Tensor, targets: Tensor) -> Tensor:
        return BandBias(bias).rows(targets) if self.causal else aten.unbanded(bias)[targets]


@register_mixer
class AFTSimple(AFTMixer):
    """AFT-simple token mixer: one global, key-weighted mean, multiplied by a gate (AFT Eq. 5).

    Args:
        dim: channels C.
        kwargs: of `AFTMixer`.
    """

    name = 'simple'

    def __init__(self, dim: int, **kwargs: Any) -> None:
        super().__init__(dim, dim, **kwargs)
        self.reset_parameters()

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project_qkv(x)
        y = ops.aft_simple_causal(q, k, v, mask) if self.causal else ops.aft_simple(q, k, v, mask, self._backend())
        return self.proj_drop(self.proj(y))


@register_mixer
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
        tau: temperature of the Gumbel sample, 0.5 by default; may change during training.
        straight_through: in training too, bias only the offset with the largest entry, with the gradient of the sample.
        kwargs: of `GridMixer`.
    """

    name = 'conv'
    bias_names = ('kernel.*',)
    lowerings = LOWERINGS
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
        tau: float | None = None,
        straight_through: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        if gumbel and not global_context:
            raise ValueError('gumbel=True needs global_context=True, got global_context=False')
        if straight_through and not gumbel:
            raise ValueError('straight_through=True needs gumbel=True, got gumbel=False')
        if tau is not None and not gumbel:
            raise ValueError(f'tau={tau} needs gumbel=True, got gumbel=False')
        if tau is not None and not tau > 0:
            raise ValueError(f'tau must be positive, got {tau}')
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        self.gumbel, self.straight_through, self.tau = gumbel, straight_through, 0.5 if tau is None else tau
        self.global_context = global_context
        num_heads = self.split_sizes[-2]
        self.kernel = StandardizedKernel(num_heads, kernel_size, standardize_kernel, device=device, dtype=dtype)
        self.reset_parameters()

    def init_weights(self) -> None:
        super().init_weights()
        self.kernel.reset_parameters()

    def learned_bias(self) -> Tensor:
        return self.kernel()

    def evaluated_bias(self) -> Tensor:
        """Return the position biases w (h, s, s) of evaluation: after AFT Eq. 8, and the maximum of AFT Eq. 10."""
        kernel = self.kernel()
        return ops.hard_kernel(kernel) if self.gumbel else kernel

    def onehot(self) -> 'AFTOnehot':
        """Build the one-hot mixer of one trained with gumbel=True, with the same projections (AFT Eq. 10)."""
        parameter, heads = self.kernel.weight, self.split_sizes[-2]
        # On the meta device, because the projections are replaced.
        mixer = AFTOnehot(self.split_sizes[-1], heads, parameter.shape[-1], query_gate=self.query_gate, device='meta')
        mixer.offset, weight = ops.onehot_kernel(self.kernel())
        mixer.weight = nn.Parameter(weight.clone(), requires_grad=parameter.requires_grad)
        mixer.qkv, mixer.proj, mixer.proj_drop = self.qkv, self.proj, self.proj_drop
        mixer.local_conv, mixer.exportable = self.local_conv, self.exportable
        return mixer.train(self.training)

    def _bias_outside(self) -> float:
        return 0.0 if self.global_context else -torch.inf

    def _freeze(self, grid: tuple[int, int] | None, lowering: str) -> nn.Module:
        self.kernel.double()
        if lowering == 'conv':
            return freeze_conv(self)
        if grid is None:
            raise ValueError("lowering='matmul' needs the token grid (H, W), got None")
        return freeze_pairs(self, aten.mix_matmul, aten.conv_matrix(self.evaluated_bias(), grid, self.global_context))

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        if grid is None:
            raise ValueError('AFTConv needs the token grid (H, W), got None')
        q, k, v = self.project_qkv(x)
        kernel = self.kernel(copy=False)
        if self.gumbel and not self.training and not self.exportable:
            offset, weight = ops.onehot_kernel(kernel)
            y = ops.aft_onehot(q, k, v, offset, weight, grid, mask)
        else:
            if self.gumbel:
                if self.training:
                    kernel = ops.gumbel_kernel(kernel, self.tau, self.straight_through)
                else:
                    kernel = ops.hard_kernel(kernel)
            # No kernel takes those of a window alone.
            weights = self.kernel.weights(kernel, v) if self.global_context else None
            y = ops.aft_conv(q, k, v, kernel, grid, mask, self.global_context, self._backend(), weights=weights)
        return self.project_output(y, v, grid, mask)


@register_mixer
class AFTOnehot(GridMixer):
    """AFT-conv with one biased offset per head: a global sum and one token of the grid (AFT Eq. 10).

    `aft_vision.models.harden` builds it from a trained AFT-conv. `weight` (h,), the bias w at the offset, is a
    parameter. `offset` (h, 2) int64, (dy, dx) in tokens from target to source, is a buffer. Both start at zero, which
    makes the mixer an AFT-simple with one key per head.

    Args:
        dim: channels C.
        num_heads: h, which divides dim; keys have one channel per head. None means one head per channel.
        kernel_size: s of the original AFT-conv, in tokens, odd; the size of `kernel()`, without effect on the output.
        kwargs: of `GridMixer`.
    """

    name = 'onehot'
    bias_names = ('weight',)
    offset: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        kernel_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        if kernel_size is not None:
            check_kernel_size(kernel_size)
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        self.kernel_size, num_heads = kernel_size, self.split_sizes[-2]
        self.weight = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.register_buffer('offset', torch.empty(num_heads, 2, device=device, dtype=torch.int64))
        self.reset_parameters()

    def init_weights(self) -> None:
        super().init_weights()
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.offset)

    @torch.jit.ignore
    def kernel(self) -> Tensor:
        """Return the position bias as a kernel (h, s, s), zero except at the offsets; s grows to include them all."""
        radius = max(int(self.offset.abs().max()), (self.kernel_size or 1) // 2)
        heads, size = len(self.weight), 2 * radius + 1
        index = (self.offset[:, :1] + radius) * size + self.offset[:, 1:] + radius
        flat = self.weight.new_zeros(heads, size * size).scatter(1, index, self.weight[:, None])
        return flat.view(heads, size, size)

    # None is learned: the other entries of the kernel that was are gone.
    def evaluated_bias(self) -> Tensor:
        return self.kernel()

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        if grid is None:
            raise ValueError('AFTOnehot needs the token grid (H, W), got None')
        q, k, v = self.project_qkv(x)
        y = ops.aft_onehot(q, k, v, self.offset, self.weight, grid, mask, self._backend())
        return self.project_output(y, v, grid, mask)


@register_mixer
class AFTAxial(GridMixer):
    """AFT-axial token mixer: position biases that are a sum over rows and columns (AFT Eq. 2, structured; ours).

    Args:
        dim: channels C.
        num_heads: h, which divides dim; keys and biases have one channel per head. None means one head per channel.
        window_size: s of both axes, or (rows, columns), in tokens: distances below s have a bias, those beyond none.
        standardize_kernel: False trains the raw biases; else the biases of each axis are standardised (AFT Eq. 8).
        resample_bias: stretch the biases over all distances of a grid of another size.
        kwargs: of `GridMixer`.
    """

    name = 'axial'
    bias_names = ('row_bias.*', 'column_bias.*')

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
        if not isinstance(window_size, int) and len(window_size) != 2:
            raise ValueError(f'window_size must be one number, or (rows, columns), got {tuple(window_size)}')
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

    def learned_bias(self) -> Tensor:
        return self.kernel()

    # Beyond its window along one axis, it has a bias along the other.
    def _kernel_on(self, grid: tuple[int, int] | None) -> Tensor:
        return self.kernel(grid)

    def _freeze(self, grid: tuple[int, int] | None, lowering: str) -> nn.Module:
        return freeze_axial(self)

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        if grid is None:
            raise ValueError('AFTAxial needs the token grid (H, W), got None')
        q, k, v = self.project_qkv(x)
        rows, columns = self.row_bias(grid[0], copy=False), self.column_bias(grid[1], copy=False)
        y = ops.aft_axial(q, k, v, rows, columns, grid, mask, self._backend())
        return self.project_output(y, v, grid, mask)


def resolve_num_heads(dim: int, num_heads: int | None) -> int:
    """Return the number of heads h; None means one head per channel.

    Raises:
        ValueError: h does not divide dim.
    """
    num_heads = dim if num_heads is None else num_heads
    if num_heads < 1 or dim % num_heads != 0:
        raise ValueError(f'num_heads must divide dim = {dim}, got {num_heads}')
    return num_heads


# A leaf for FX, which cannot compare a traced length.
@torch.fx.wrap
@register_notrace_function
def shorten_bias(bias: Tensor, tokens: int) -> Tensor:
    """Return the first rows and columns of a bias (T, T); in an ordinary call the bias itself where that is all."""
    if torch.jit.is_scripting():
        return bias[:tokens, :tokens]
    captured = torch.jit.is_tracing() or torch.compiler.is_compiling()
    return bias if bias.shape[0] == tokens and not captured else bias[:tokens, :tokens]


def kernel_rows(kernel: Tensor, grid: tuple[int, int], targets: Tensor, outside: float) -> Tensor:
    """Return the biases (h, Q, H * W) of targets (Q,) from the biases of each offset (h, 2a + 1, 2b + 1)."""
    # w[(y, x), (y + dy, x + dx)] = kernel[rows // 2 + dy, columns // 2 + dx].
    (rows, columns), width = kernel.shape[1:], grid[1]
    sources = torch.arange(grid[0] * grid[1], device=kernel.device)
    dy = sources // width - (targets // width)[:, None] + rows // 2  # (Q, H * W)
    dx = sources % width - (targets % width)[:, None] + columns // 2
    inside = (dy >= 0) & (dy < rows) & (dx >= 0) & (dx < columns)
    taps = kernel[:, dy.clamp(0, rows - 1), dx.clamp(0, columns - 1)]
    return torch.where(inside, taps, taps.new_tensor(outside))
