"""The AFT token mixers: projections around one operation of `aft_vision.ops`.

All are called as `mixer(x, grid, mask)`: x (B, T, C), grid (H, W) in tokens or None, mask (B, T) bool, True where a
token counts. In `timm.layers.is_exportable()` mode they use the aten forms, since exporters know no custom operator;
the causal ones have none.
"""

from typing import Any, ClassVar, Final

import torch
from timm.layers import is_exportable, trunc_normal_
from torch import Tensor, nn

from aft_vision import ops
from aft_vision.layers.position_bias import FactorizedBias, FusedModule, PairwiseBias, StandardizedKernel
from aft_vision.ops import aten


class AFTMixer(nn.Module):
    """What the mixers share: one projection to queries, keys and values, and one behind the operation.

    Args:
        dim: channels C of the input and output, and D of the operation.
        key_dim: channels of the keys.
        query_gate: False leaves out the query and its sigmoid (Table 12).
        qkv_bias: biases on queries, keys and values. That on keys cancels in every operation; DeiT has it.
        proj_bias: a bias on the projection behind the operation.
        out_proj: False leaves that projection out (Table 3 counts none).
        proj_drop: dropout rate behind the operation.
    """

    # TorchScript reads Final annotations of the last subclass alone, and these of every class.
    __constants__: ClassVar[list[str]] = ['exportable', 'query_gate']

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
        self.query_gate = query_gate
        self.exportable = is_exportable()
        self.split_sizes = [dim, key_dim, dim] if query_gate else [key_dim, dim]
        self.qkv = nn.Linear(dim, sum(self.split_sizes), bias=qkv_bias, device=device, dtype=dtype)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, device=device, dtype=dtype) if out_proj else nn.Identity()
        self.proj_drop = nn.Dropout(proj_drop)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, the projections as DeiT does."""
        for projection in (self.qkv, self.proj):
            if isinstance(projection, nn.Linear):
                trunc_normal_(projection.weight, std=0.02)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw the position bias anew; a model's own scheme draws the projections."""

    @torch.jit.ignore
    def fuse(self) -> 'AFTMixer':
        """Keep for inference what depends on the position bias' parameters alone.

        Returns:
            The mixer itself, as `timm.utils.reparameterize_model` wants it.
        """
        for module in self.children():
            if isinstance(module, FusedModule):
                module.fuse()
        return self

    @torch.jit.ignore
    def set_grid(self, grid: tuple[int, int]) -> None:
        """Resample a position bias that belongs to a grid to another, (H, W), for good."""
        for module in self.children():
            if isinstance(module, FactorizedBias | PairwiseBias):
                module.set_grid(grid)

    def _project(self, x: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        parts = self.qkv(x).split(self.split_sizes, dim=-1)
        if self.query_gate:
            return parts[0], parts[1], parts[2]
        return None, parts[0], parts[1]


class AFTFull(AFTMixer):
    """AFT-full token mixer with a learned bias for each pair of positions (AFT Eq. 2, AFT Eq. 7).

    Args:
        dim: channels C.
        num_tokens: T, prefix tokens included. A shorter sequence uses the first rows and columns of the bias.
        grid: (H, W) of the tokens after the prefix; another grid resamples the bias.
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
        if grid is None:
            bias = bias[: x.shape[1], : x.shape[1]]
        if self.causal:
            y = ops.aft_full_causal(q, k, v, bias, mask)
        elif self.exportable:
            y = aten.aft_full(q, k, v, bias, mask)
        else:
            y = ops.aft_full(q, k, v, bias, mask)
        return self.proj_drop(self.proj(y))


class AFTLocal(AFTMixer):
    """AFT-local token mixer: position biases within a window of the sequence, plain weights outside (AFT Eq. 4).

    Args:
        dim: channels C.
        num_tokens: T, prefix tokens included. A shorter sequence uses the first rows of the bias.
        window_size: s, in tokens along the sequence, at least 1: |t - t'| < s.
        grid: (H, W) of the tokens after the prefix; another grid resamples the bias.
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
        if grid is None:
            band = band[: x.shape[1]]
        if self.causal:
            y = ops.aft_local_causal(q, k, v, band, mask)
        elif self.exportable:
            y = aten.aft_local(q, k, v, band, mask)
        else:
            y = ops.aft_local(q, k, v, band, mask)
        return self.proj_drop(self.proj(y))


class AFTSimple(AFTMixer):
    """AFT-simple token mixer: one global, key-weighted mean behind a gate (AFT Eq. 5).

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
        if self.causal:
            y = ops.aft_simple_causal(q, k, v, mask)
        elif self.exportable:
            y = aten.aft_simple(q, k, v, mask)
        else:
            y = ops.aft_simple(q, k, v, mask)
        return self.proj_drop(self.proj(y))


class AFTConv(AFTMixer):
    """AFT-conv token mixer: relative position biases shared over the grid (AFT Eq. 6, AFT Eq. 8).

    Args:
        dim: channels C.
        num_heads: h, which divides dim; keys have one channel per head. None is one head per channel.
        kernel_size: s, in tokens, odd; may exceed the grid.
        standardize_kernel: False trains the raw kernel (Table 10).
        global_context: False gives tokens outside the window no weight (the degenerate variant of Sec. 5.3).
        gumbel: one biased offset per head: sampled in training, the largest in evaluation (AFT Eq. 10).
        tau: temperature of that sample.
        kwargs: of `AFTMixer`.
    """

    gumbel: Final[bool]
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        num_heads = dim if num_heads is None else num_heads
        if num_heads < 1 or dim % num_heads != 0:
            raise ValueError(f'num_heads must divide dim = {dim}, got {num_heads}')
        if gumbel and not global_context:
            raise ValueError('gumbel=True keeps one offset beside the global context, so it needs global_context=True')
        if tau <= 0:
            raise ValueError(f'tau must be positive, got {tau}')
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        self.gumbel, self.global_context, self.tau = gumbel, global_context, tau
        self.kernel = StandardizedKernel(num_heads, kernel_size, standardize_kernel, device=device, dtype=dtype)
        self.reset_parameters()

    def init_weights(self) -> None:
        self.kernel.reset_parameters()

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        if grid is None:
            raise ValueError('AFTConv needs the token grid (H, W), got None')
        q, k, v = self._project(x)
        kernel = self.kernel()
        if self.gumbel and not self.training:
            if self.exportable:
                y = aten.aft_conv(q, k, v, ops.hard_kernel(kernel), grid, mask, True)
            else:
                offset, weight = ops.onehot_kernel(kernel)
                y = ops.aft_onehot(q, k, v, offset, weight, grid, mask)
        else:
            if self.gumbel:
                kernel = ops.gumbel_kernel(kernel, self.tau)
            if self.exportable:
                y = aten.aft_conv(q, k, v, kernel, grid, mask, self.global_context)
            else:
                y = ops.aft_conv(q, k, v, kernel, grid, mask, self.global_context)
        return self.proj_drop(self.proj(y))


MIXERS: dict[str, type[AFTMixer]] = {'full': AFTFull, 'local': AFTLocal, 'simple': AFTSimple, 'conv': AFTConv}


def create_mixer(name: str, dim: int, **kwargs: Any) -> AFTMixer:
    """The mixer of that name.

    Args:
        name: 'full', 'local', 'simple' or 'conv'.
        dim: channels C.
        kwargs: of the mixer.

    Raises:
        ValueError: there is no mixer of that name.
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
