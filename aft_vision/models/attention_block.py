"""timm's block with softmax attention, called as an AFT block."""

from collections.abc import Sequence

import torch
from timm.layers import register_notrace_function
from timm.models.vision_transformer import Block
from torch import Tensor

from aft_vision.layers.fused import fuse_linear, fuse_mlp


class AttentionBlock(Block):
    """timm's block with multi-head softmax attention among AFT blocks; its arguments are timm's."""

    @torch.jit.ignore
    def fuse(self) -> 'AttentionBlock':
        """Fuse the linear layers for inference, as `AFTBlock.fuse`."""
        fuse_linear(self.attn)
        fuse_mlp(self.mlp)
        return self

    # The grid is for AFT mixers: attention has no position bias.
    def forward(  # type: ignore[override]
        self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None
    ) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attention_mask(mask))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


# A leaf for FX, which cannot branch on whether a traced mask is None.
@torch.fx.wrap
@register_notrace_function
def attention_mask(mask: Tensor | None) -> Tensor | None:
    """Return a mask (B, T) over sources for attention, (B, 1, 1, T).

    A sequence in which nothing counts attends to all of it: no result is NaN, and pooling leaves them out.
    """
    if mask is None:
        return None
    return (mask | ~mask.any(1, keepdim=True))[:, None, None, :]


def attention_heads(dim: int) -> int:
    """Return the heads of softmax attention in an AFT model of that width: at most width / 64, and a divisor."""
    return next(heads for heads in range(max(1, dim // 64), 0, -1) if dim % heads == 0)


def check_attention_blocks(blocks: Sequence[int], allowed: range) -> None:
    """Check the indices of blocks with softmax attention.

    Args:
        blocks: the indices.
        allowed: the indices of blocks that mix tokens.

    Raises:
        ValueError: an index is not one of them.
    """
    unknown = [block for block in blocks if block not in allowed]
    if unknown:
        raise ValueError(
            f'attention_blocks must be indices of the {len(allowed)} blocks that mix tokens, {allowed.start} to '
            f'{allowed.stop - 1}, got {unknown}'
        )
