"""The base class of the token mixers."""

from typing import Any, ClassVar

import torch
from timm.layers import is_exportable, register_notrace_function, trunc_normal_
from torch import Tensor, nn

from aft_vision.layers.position_bias import FactorizedBias, FusedModule, PairwiseBias


class AFTMixer(nn.Module):
    """A token mixer: one projection to queries, keys and values, and one after the operation.

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
        """Initialise all parameters, the projections as DeiT does."""
        for projection in (self.qkv, self.proj):
            if isinstance(projection, nn.Linear):
                trunc_normal_(projection.weight, std=0.02)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise the position bias; the model initialises the projections."""

    @torch.jit.ignore
    def fuse(self) -> 'AFTMixer':
        """Precompute for inference everything that depends only on the position-bias parameters.

        Returns:
            The mixer itself, as `timm.utils.reparameterize_model` expects.
        """
        for module in self.children():
            if isinstance(module, FusedModule):
                module.fuse()
        return self

    @torch.jit.ignore
    def set_grid(self, grid: tuple[int, int]) -> None:
        """Resample the position bias permanently to another grid (H, W), if it has one."""
        for module in self.children():
            if isinstance(module, FactorizedBias | PairwiseBias):
                module.set_grid(grid)

    def _backend(self) -> str:
        # Exporters do not support custom operators.
        return 'aten' if self.exportable and not torch.jit.is_scripting() else 'auto'

    def _project(self, x: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
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
        num_heads: h, which divides dim. None is one head per channel.
        local_conv: add a 3 x 3 depthwise convolution of the values to the mean, after the gate; not in the paper.
        kwargs: of `AFTMixer`.
    """

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

    def _output(self, y: Tensor, v: Tensor, grid: tuple[int, int], mask: Tensor | None) -> Tensor:
        # (B, T, C) after the operation, from its result and its values.
        if self.local_conv is not None:
            y = y + self.local_conv(tokens_to_maps(v, grid, mask)).flatten(2).transpose(1, 2)
        return self.proj_drop(self.proj(y))


# A leaf for FX, which cannot branch on whether a traced mask is None.
@torch.fx.wrap
@register_notrace_function
def tokens_to_maps(x: Tensor, grid: tuple[int, int], mask: Tensor | None) -> Tensor:
    """Return tokens (B, H * W, C) as maps (B, C, H, W), 0 where the mask (B, H * W) is False."""
    if mask is not None:
        x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], grid[0], grid[1])


def resolve_num_heads(dim: int, num_heads: int | None) -> int:
    """Return the number of heads h; None means one head per channel.

    Raises:
        ValueError: h does not divide dim.
    """
    num_heads = dim if num_heads is None else num_heads
    if num_heads < 1 or dim % num_heads != 0:
        raise ValueError(f'num_heads must divide dim = {dim}, got {num_heads}')
    return num_heads
