"""Learned position biases as modules (AFT Eq. 4, 7, 8). Their output depends only on their parameters.

`fuse()` makes that output a constant for inference, with what the kernels compute from it alone, and keeps that at the
last other grid. From then on the parameters have no gradients, and may change only by `load_state_dict`, a move or a
cast, which compute the constant again; after any other write call `fuse()` again. `train()` of a fused module is an
error. Compiled, exported and scripted graphs hold the constant too.

Modules return copies, which may be written. The mixers pass `copy=False` and read the constant itself, or the
parameter.
"""

from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module, resample_abs_pos_embed
from torch import Tensor, nn

from aft_vision.layers.fused import check_trainable
from aft_vision.ops import (
    bias_weights,
    factorized_band_row,
    factorized_bias,
    local_band_row,
    local_bias,
    standardized_kernel,
)
from aft_vision.ops.common.ordinary import is_ordinary

# Plain torch.fx cannot branch on the shapes that they check.
torch.fx.wrap('factorized_bias')
torch.fx.wrap('standardized_kernel')


class FusedModule(nn.Module):
    """A module whose result depends only on its parameters, and which can be fused for inference.

    Attributes:
        operator: the one of `ops` whose kernels compute weights from the result; '' without one.
        fused: the constant result, None until fused.
    """

    operator: ClassVar[str] = ''
    # Of the constants alone, which a scripted module does not have.
    __jit_ignored_attributes__: ClassVar[list[str]] = ['resized', 'kept']
    fused: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        # Not part of the state dict, because it can be computed from the parameters.
        self.register_buffer('fused', None, persistent=False)
        # The last other grid and the result there.
        self.resized: tuple[tuple[int, int], Tensor] | None = None
        # Weights of the constant (True) and of the result at another grid (False), each after the result and the type
        # of values that they were made for.
        self.kept: dict[bool, tuple[Tensor, torch.dtype, Tensor]] = {}

    def compute(self) -> Tensor:
        """Compute the result from the parameters."""
        raise TypeError(f'{type(self).__name__} must define compute()')

    def compute_at(self, grid: tuple[int, int]) -> Tensor:
        """Compute the result at a grid from the parameters."""
        raise TypeError(f'{type(self).__name__} has no grid')

    @torch.jit.ignore
    def fuse(self) -> 'FusedModule':
        """Make the result a constant for inference, with the parameters of now; they may not change any more.

        Returns:
            The module itself, as `timm.utils.reparameterize_model` expects.
        """
        self.eval().requires_grad_(False)
        # A normal tensor even in inference mode, and never the parameter itself.
        with torch.inference_mode(False), torch.no_grad():
            self.fused, self.resized, self.kept = self.compute().clone(), None, {}
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Files and copies have neither a result of another grid nor weights, which may be large.
        return {**self.__dict__, 'resized': None, 'kept': {}}

    def train(self, mode: bool = True) -> 'FusedModule':
        check_trainable(self, self.fused is not None, mode)
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> 'FusedModule':
        super()._apply(*args, **kwargs)
        return self if self.fused is None else self.fuse()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.fused is not None:
            self.fuse()

    def _value(self) -> Tensor:
        # Return the constant, or compute the result.
        fused = self.fused
        if fused is None:
            return self.compute()
        return fused

    def _value_at(self, grid: tuple[int, int]) -> Tensor:
        # Return the result at a grid: its own, the last other one if that is kept, else compute it.
        if torch.jit.is_scripting():
            return self.compute_at(grid)
        return self._kept_value_at(grid)

    def weights(self, result: Tensor, v: Tensor) -> Tensor | None:
        """Return the weights of a constant for values of this type, or None if the result is not one.

        The first call makes them.
        """
        if torch.jit.is_scripting():
            return None
        return self._kept_weights(result, v)

    @torch.jit.unused
    def _kept_weights(self, result: Tensor, v: Tensor) -> Tensor | None:
        if self.fused is None or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return None
        own, resized = result is self.fused, self.resized
        kept = self.kept.get(own)
        # Another thread may replace them at any time.
        if kept is not None and kept[0] is result and kept[1] == v.dtype:
            return kept[2]
        if not own and (resized is None or result is not resized[1]):
            return None
        weights = bias_weights(self.operator, result, v)
        # A later call may have some where this one has none: a transform or a mode sees it.
        if weights is not None:
            self.kept[own] = result, v.dtype, weights
        return weights

    @torch.jit.unused
    def _kept_value_at(self, grid: tuple[int, int]) -> Tensor:
        # A captured graph does not compare grids, which would fix the grid; resampling to the same grid is the
        # identity.
        if torch.compiler.is_compiling():
            return self.compute_at(grid)
        if grid == getattr(self, 'grid', None):
            return self._value()
        if self.fused is None or torch.jit.is_tracing():
            return self.compute_at(grid)
        # Another thread may replace it at any time.
        resized = self.resized
        if resized is None or resized[0] != grid:
            # The old one and its weights are freed before the new one is made.
            self.resized = resized = None
            self.kept.pop(False, None)
            with torch.inference_mode(False), torch.no_grad():
                resized = grid, self.compute_at(grid)
            # A mode or a transform makes a tensor of its own, and a captured CUDA graph would read one that is freed.
            self.resized = resized if is_ordinary(resized[1:]) and resized[1].is_cpu else None
        return resized[1]


class _PairBias(FusedModule):
    # A bias for each pair of tokens, or its band, from the parameters of a subclass.

    operator: ClassVar[str] = 'aft_full'

    def __init__(self, num_tokens: int, grid: tuple[int, int] | None, window: int | None, causal: bool) -> None:
        super().__init__()
        self.grid, self.window, self.causal = grid, window, causal
        self.num_prefix_tokens = _prefix_tokens(num_tokens, grid)

    def reset_parameters(self) -> None:
        """Initialise the parameters."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.01)

    def forward(self, grid: tuple[int, int] | None = None, copy: bool = True) -> Tensor:
        """Return the bias at a grid, None for its own: (T, T), or with a window (T, 2s - 1), (T, s) if causal.

        Args:
            copy: False may return the constant or the parameter, for a caller that does not write to it.
        """
        bias = self._value() if grid is None else self._value_at(grid)
        return bias.clone() if copy else bias

    @torch.jit.ignore
    def set_grid(self, grid: tuple[int, int]) -> None:
        """Resample the parameters permanently to another grid (H, W)."""
        with torch.no_grad():
            for name, old in list(self.named_parameters()):
                # A transposed view cannot be saved as safetensors.
                new = self._resampled(old, grid).contiguous()
                setattr(self, name, nn.Parameter(new, requires_grad=old.requires_grad))
        self.grid = (grid[0], grid[1])
        if self.fused is not None:
            self.fuse()

    def _resampled(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return _resample_tokens(x, grid, self.grid, self.num_prefix_tokens)


@register_notrace_module
class FactorizedBias(_PairBias):
    """The position bias w = u v^T of AFT-full, or its band for AFT-local (AFT Eq. 7).

    At another grid, u and v are resampled over (H, W) as ViT position embeddings are, and the rows of prefix tokens
    are kept. This is an extension of the paper.

    Args:
        num_tokens: T, including prefix tokens.
        bias_dim: width d' of the factors.
        grid: (H, W) of the tokens after the prefix; None for a sequence.
        window: s, in tokens, to return the band of AFT Eq. 4; None returns the whole bias.
        causal: with a window, return the band of the causal mixer.
    """

    def __init__(
        self,
        num_tokens: int,
        bias_dim: int = 128,
        grid: tuple[int, int] | None = None,
        window: int | None = None,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_tokens, grid, window, causal)
        self.u = nn.Parameter(torch.empty(num_tokens, bias_dim, device=device, dtype=dtype))
        self.v = nn.Parameter(torch.empty(num_tokens, bias_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def compute(self) -> Tensor:
        window = self.window
        if window is not None:
            window = min(window, self.u.shape[0])
        return factorized_bias(self.u, self.v, window, self.causal)

    def compute_at(self, grid: tuple[int, int]) -> Tensor:
        return factorized_bias(self._resampled(self.u, grid), self._resampled(self.v, grid), self.window, self.causal)

    @torch.jit.unused
    def band_row(self, position: Tensor, window: int) -> Tensor:
        """Return the row of the causal band at a position, for a step of decoding."""
        return factorized_band_row(self.u, self.v, position, window)


@register_notrace_module
class PairwiseBias(_PairBias):
    """The position bias w as one parameter per pair (Tables 3 and 9), or its band (AFT Eq. 4).

    The whole (T, T) is stored even with a window, as Table 3 counts it. At another grid, both axes are resampled over
    (H, W). This is an extension of the paper.

    Args:
        num_tokens: T, including prefix tokens.
        grid: (H, W) of the tokens after the prefix; None for a sequence.
        window: s, in tokens, to return the band of AFT Eq. 4; None returns the whole bias.
        causal: with a window, return the band of the causal mixer.
    """

    def __init__(
        self,
        num_tokens: int,
        grid: tuple[int, int] | None = None,
        window: int | None = None,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_tokens, grid, window, causal)
        self.weight = nn.Parameter(torch.empty(num_tokens, num_tokens, device=device, dtype=dtype))
        self.reset_parameters()

    def compute(self) -> Tensor:
        window = self.window
        if window is not None:
            window = min(window, self.weight.shape[0])
        return self._band(self.weight, window)

    def compute_at(self, grid: tuple[int, int]) -> Tensor:
        return self._band(self._resampled(self.weight, grid), self.window)

    @torch.jit.unused
    def band_row(self, position: Tensor, window: int) -> Tensor:
        """Return the row of the causal band at a position, for a step of decoding."""
        return local_band_row(self.weight, position, window)

    def _resampled(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        rows = _resample_tokens(x, grid, self.grid, self.num_prefix_tokens)
        return _resample_tokens(rows.t(), grid, self.grid, self.num_prefix_tokens).t()

    def _band(self, bias: Tensor, window: int | None) -> Tensor:
        return bias if window is None else local_bias(bias, window, self.causal)


class _Standardized(FusedModule):
    # A raw bias of each head, standardised with a gain and a shift (AFT Eq. 8).

    def __init__(
        self,
        shape: tuple[int, ...],
        standardize: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.gamma = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if standardize else None
        self.beta = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if standardize else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the raw bias at random, and gamma and beta to 0: the mixer starts as AFT-simple."""
        nn.init.trunc_normal_(self.weight, std=0.02)
        if self.gamma is not None and self.beta is not None:
            nn.init.zeros_(self.gamma)
            nn.init.zeros_(self.beta)

    def compute(self) -> Tensor:
        gamma, beta = self.gamma, self.beta
        if gamma is None or beta is None:
            return self.weight
        return standardized_kernel(self.weight.flatten(1).unsqueeze(1), gamma, beta).view_as(self.weight)


@register_notrace_module
class StandardizedKernel(_Standardized):
    """The kernel of AFT-conv, standardised per head (AFT Eq. 8).

    Args:
        num_heads: h.
        kernel_size: s, in tokens, odd.
        standardize: False leaves out gamma and beta and returns the raw kernel (Table 10).
    """

    operator: ClassVar[str] = 'aft_conv'

    def __init__(
        self,
        num_heads: int,
        kernel_size: int,
        standardize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_kernel_size(kernel_size)
        super().__init__((num_heads, kernel_size, kernel_size), standardize, device, dtype)

    def forward(self, copy: bool = True) -> Tensor:
        """Return the kernel, (h, s, s).

        Args:
            copy: False may return the constant or the parameter, for a caller that does not write to it.
        """
        kernel = self._value()
        return kernel.clone() if copy else kernel


@register_notrace_module
class AxisBias(_Standardized):
    """The position bias of AFT-axial along one axis, each head standardised as AFT Eq. 8 does its kernel.

    Args:
        num_heads: h.
        window_size: s, in tokens along the axis: distances below s have a bias.
        standardize: False leaves gamma and beta out and gives the raw bias.
        resample: stretch the bias over all distances of an axis of another length; False gives those from s on none.
    """

    resample: Final[bool]

    def __init__(
        self,
        num_heads: int,
        window_size: int,
        standardize: bool = True,
        resample: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if window_size < 1:
            raise ValueError(f'window_size must be at least 1, got {window_size}')
        super().__init__((num_heads, 2 * window_size - 1), standardize, device, dtype)
        self.resample = resample

    def forward(self, length: int, copy: bool = True) -> Tensor:
        """Return the bias of an axis of `length` tokens: (h, 2s - 1), or with `resample` (h, 2 * length - 1).

        Args:
            copy: False may return the constant or the parameter, for a caller that does not write to it.
        """
        bias = self._value()
        if self.resample:
            return resample_axis(bias, length)
        return bias.clone() if copy else bias


def resample_axis(bias: Tensor, length: int) -> Tensor:
    """Stretch a bias (h, 2s - 1) linearly over all distances of an axis of `length` tokens, (h, 2 * length - 1)."""
    # The distance 0 stays in the middle, and the longest one at the end.
    return F.interpolate(bias.unsqueeze(0), size=2 * length - 1, mode='linear', align_corners=True).squeeze(0)


def check_kernel_size(kernel_size: int) -> None:
    """Raise a ValueError unless a kernel size is odd and positive."""
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f'kernel_size must be odd and positive, got {kernel_size}')


def _prefix_tokens(num_tokens: int, grid: tuple[int, int] | None) -> int:
    if grid is None:
        return 0
    prefix = num_tokens - grid[0] * grid[1]
    if prefix < 0:
        raise ValueError(f'grid {tuple(grid)} has more than the num_tokens = {num_tokens} tokens')
    return prefix


def _resample_tokens(x: Tensor, grid: tuple[int, int], old_grid: tuple[int, int] | None, prefix: int) -> Tensor:
    # (T, n) -> (T', n), bicubically over (H, W).
    if old_grid is None:
        raise ValueError(f'a position bias made without a grid cannot be resampled to {grid}')
    new_size = [grid[0], grid[1]]
    return resample_abs_pos_embed(x.unsqueeze(0), new_size, [old_grid[0], old_grid[1]], prefix).squeeze(0)
