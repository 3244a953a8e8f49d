"""The attention of the efficient baseline Transformers, as functions of q, k and v.

Shapes: q, k, v and the results are (B, h, N, d) for h heads of width d; `mask` is (B, N), True where a token counts, or
None if all do. Padding is at the end of a row. The output at positions that do not count is finite but meaningless.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# The golden section of 2**32: its multiples, modulo 2**32, are spread evenly over the range.
GOLDEN = 2654435761


def full_mask(mask: Tensor | None) -> Tensor | None:
    """Return the allowed keys, (B, 1, 1, N); all of them in a row without tokens, whose softmax is undefined."""
    if mask is None:
        return None
    return (mask | ~mask.any(1, keepdim=True))[:, None, None, :]


def linear_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the Linear Transformer's attention, with the kernel elu(x) + 1 instead of the exponential."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v_wide = F.elu(q.to(dtype)) + 1, F.elu(k.to(dtype)) + 1, v.to(dtype)
        if mask is not None:
            k, v_wide = (x.masked_fill(~mask[:, None, :, None], 0.0) for x in (k, v_wide))
        total = q @ k.sum(2)[..., None]  # (B, h, N, 1)
        # Zero in a row without a token, and where all products underflow.
        return ((q @ (k.mT @ v_wide)) / total.masked_fill(total == 0, 1.0)).to(v.dtype)


def projected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    project_k: Callable[[Tensor], Tensor],
    project_v: Callable[[Tensor], Tensor],
    mask: Tensor | None = None,
) -> Tensor:
    """Compute Linformer's attention to learned sums over all keys.

    Args:
        project_k, project_v: from (B, h, N, d) to (B, h, slots, d), sums in which each position has its weight.
    """
    if mask is not None:
        k, v = (x.masked_fill(~mask[:, None, :, None], 0.0) for x in (k, v))
    return F.scaled_dot_product_attention(q, project_k(k), project_v(v))


def pool_tokens(x: Tensor, kernel: int, stride: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Compute means of overlapping groups of tokens that count, and the mask of groups with such tokens.

    Args:
        x: (B, N, D), N a multiple of stride.
        kernel: Tokens in a group; group j begins at token j * stride.

    Returns:
        (B, N / stride, D) and the mask of groups, None where no group is empty.
    """
    over = max(kernel - stride, 0)
    counts = x.new_ones(x.shape[:2]) if mask is None else mask.to(x.dtype)
    if mask is not None:
        x = x.masked_fill(~mask[..., None], 0.0)
    total = F.pad(x, (0, 0, 0, over)).unfold(1, kernel, stride).sum(-1)
    counts = F.pad(counts, (0, over)).unfold(1, kernel, stride).sum(-1)
    return total / counts.clamp(min=1.0)[..., None], None if mask is None else counts > 0


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, stride: int = 1, mask: Tensor | None = None
) -> Tensor:
    """Compute attention within a window of keys around each query.

    Query i attends to the keys j with |i // stride - j| <= window / 2.

    Args:
        q: (B, h, N, d), N a multiple of stride * window / 2.
        k, v: (B, h, N / stride, d): one for each group of `stride` queries.
        window: Keys besides the key of the group itself; even.
        mask: (B, N / stride), of keys.
    """
    half = window // 2
    batch, heads, tokens, _ = q.shape
    chunks = tokens // (half * stride)
    offsets = torch.arange(-half, 2 * half, device=q.device)
    groups = torch.arange(half * stride, device=q.device) // stride
    near = (groups[:, None] - offsets).abs() <= half  # (half * stride, 3 * half)
    position = torch.arange(chunks, device=q.device)[:, None] * half + offsets
    inside = (position >= 0) & (position < chunks * half)  # (chunks, 3 * half)
    allowed = (near & inside[:, None])[None].expand(batch, -1, -1, -1)
    if mask is not None:
        counts = F.pad(mask, (half, half)).unfold(1, 3 * half, half)  # (B, chunks, 3 * half)
        allowed = allowed & counts[:, :, None]
        allowed = allowed | ~allowed.any(-1, keepdim=True)
    folded = q.unflatten(2, (chunks, -1)).transpose(1, 2).flatten(0, 1)  # (B * chunks, h, half * stride, d)
    keys, values = (
        F.pad(x, (0, 0, half, half)).unfold(2, 3 * half, half).permute(0, 2, 1, 4, 3).flatten(0, 1) for x in (k, v)
    )  # (B * chunks, h, 3 * half, d)
    y = F.scaled_dot_product_attention(folded, keys, values, attn_mask=allowed.flatten(0, 1)[:, None])
    return y.unflatten(0, (batch, chunks)).transpose(1, 2).reshape(batch, heads, tokens, -1)


def block_plan(
    lengths: Tensor, heads: int, blocks: int, num_global: int, num_random: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the blocks that each block of queries attends to: the first, itself, its neighbours and random ones.

    The random ones are fixed by head, block, seed and the length of the row, so that padding does not change them.

    Args:
        lengths: (B,) blocks that a row has.
        blocks: Blocks of the longest row.

    Returns:
        Indices of blocks and whether they count, both (B, h, blocks, num_global + 3 + num_random). A block that is not
        there, or is there twice, does not count.
    """
    device = lengths.device
    rows = torch.arange(blocks, device=device)
    first = torch.arange(num_global, device=device).expand(blocks, -1)
    near = rows[:, None] + torch.arange(-1, 2, device=device)
    fixed = torch.cat([first, near], 1).expand(len(lengths), heads, -1, -1)
    draws = torch.arange(blocks * heads * num_random, device=device).view(blocks, heads, num_random).transpose(0, 1)
    uniform = ((draws + seed * 7919 + 1) * GOLDEN % 2**32).double() / 2**32
    random = (uniform * lengths[:, None, None, None]).long()
    index = torch.cat([fixed, random], 3)
    earlier = torch.ones(index.shape[-1], index.shape[-1], dtype=torch.bool, device=device).tril(-1)
    repeated = ((index[..., :, None] == index[..., None, :]) & earlier).any(-1)
    counts = (index >= 0) & (index < lengths[:, None, None, None]) & ~repeated
    return index.clamp(0, blocks - 1), counts


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size: int,
    num_global: int,
    num_random: int,
    mask: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """Compute BigBird's attention between blocks of tokens.

    The first blocks attend to all and all attend to them; another one attends to them, to itself, to its two neighbours
    and to a few random ones.

    Args:
        q, k, v: (B, h, N, d), N a multiple of block_size.
        num_global, num_random: In blocks.
        seed: Seed of the random blocks, such as the number of the layer.
    """
    batch, heads, tokens, width = q.shape
    blocks, edge = tokens // block_size, min(num_global * block_size, tokens)
    if mask is None:
        mask = torch.ones(batch, tokens, dtype=torch.bool, device=q.device)
    first = F.scaled_dot_product_attention(q[:, :, :edge], k, v, attn_mask=full_mask(mask))
    if edge == tokens:
        return first
    positions = torch.arange(1, tokens + 1, device=q.device)
    lengths = ((mask * positions).amax(1) + block_size - 1) // block_size
    index, counts = block_plan(lengths, heads, blocks, num_global, num_random, seed)
    index, counts = index[:, :, num_global:], counts[:, :, num_global:]
    rows = torch.arange(batch, device=q.device)[:, None, None, None]
    allowed = mask.view(batch, blocks, block_size)[rows, index] & counts[..., None]  # (B, h, blocks, n, block_size)
    flat = (torch.arange(batch * heads, device=q.device).view(batch, heads, 1, 1) * blocks + index).flatten()
    keys, values = (
        x.reshape(-1, block_size * width).index_select(0, flat).view(*index.shape[:3], -1, width) for x in (k, v)
    )  # (B, h, blocks, n * block_size, d)
    scores = (q[:, :, edge:] / math.sqrt(width)).unflatten(2, (-1, block_size)) @ keys.mT
    scores = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    scores = scores.masked_fill(~allowed.flatten(3)[..., None, :], torch.finfo(scores.dtype).min)
    rest = scores.softmax(-1).to(values.dtype) @ values
    return torch.cat([first, rest.flatten(2, 3)], 2)
