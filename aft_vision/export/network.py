"""AFT vision transformers in plain PyTorch: the evaluation network that an exported folder carries.

`aft_vision.inline` copies these classes, with the operations that they need, into one file. They have the state
dict of the timm model and compute what it computes in evaluation. Dropout, stochastic depth and Gumbel noise are left
out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_vision.ops.aten import aft_axial, aft_conv, aft_full, aft_local, aft_onehot, aft_simple
from aft_vision.ops.common.numerics import without_autocast
from aft_vision.ops.position_bias import factorized_bias, local_bias, onehot_kernel, standardized_kernel

Grid = tuple[int, int]


@dataclass(frozen=True)
class Architecture:
    """The sizes and parts of a network.

    Args:
        img_size: (H, W) in pixels that the position parameters are for.
        patch_size: (H, W) in pixels.
        embed_dim: width C.
        hidden_dim: width inside an MLP.
        mixer: 'full', 'local', 'simple', 'conv', 'onehot' or 'axial'.
        mixer_args: of the class of that mixer.
        query_gate: whether a mixer has queries, whose sigmoid multiplies its result.
        attention_blocks: indices of blocks with softmax attention in place of the mixer.
        attention_args: of `Attention`.
        any_size: whether images may have another size; position parameters are then resampled.
        pad: whether images are padded to whole patches; otherwise they must consist of them.
        pos_embed: whether there is a position embedding; `no_embed_class` leaves out the prefix tokens.
        mlp_norm: whether the MLPs of attention blocks normalise their hidden values.
        global_pool: '', 'token', 'avg', 'max' or 'avgmax'.
    """

    img_size: Grid
    patch_size: Grid
    in_chans: int
    embed_dim: int
    depth: int
    hidden_dim: int
    mixer: str
    mixer_args: Mapping[str, Any] = field(default_factory=dict)
    query_gate: bool = True
    qkv_bias: bool = True
    proj_bias: bool = True
    attention_blocks: tuple[int, ...] = ()
    attention_args: Mapping[str, Any] = field(default_factory=dict)
    activation: str = 'gelu'
    norm_eps: float = 1e-6
    layer_scale: bool = False
    any_size: bool = False
    pad: bool = False
    embed_bias: bool = True
    embed_norm: bool = False
    class_token: bool = False
    reg_tokens: int = 0
    pos_embed: bool = False
    no_embed_class: bool = False
    pre_norm: bool = False
    mlp_norm: bool = False
    final_norm: bool = True
    fc_norm: bool = False
    global_pool: str = 'avg'
    pool_include_prefix: bool = False

    @property
    def grid(self) -> Grid:
        """(H, W) in tokens that the position parameters are for."""
        return self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1]

    @property
    def prefix(self) -> int:
        """Tokens before those of the image."""
        return int(self.class_token) + self.reg_tokens


class Mixer(nn.Module):
    """Projections around an operation that mixes tokens.

    Args:
        arch: the network's.
        key_dim: channels of the keys.
        local_conv: add a 3 x 3 depthwise convolution of the values.
    """

    def __init__(self, arch: Architecture, key_dim: int, local_conv: bool = False) -> None:
        super().__init__()
        dim = arch.embed_dim
        self.split_sizes = [dim, key_dim, dim] if arch.query_gate else [key_dim, dim]
        self.qkv = nn.Linear(dim, sum(self.split_sizes), bias=arch.qkv_bias)
        self.proj = nn.Linear(dim, dim, bias=arch.proj_bias)
        self.local_conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim) if local_conv else None

    def forward(self, x: Tensor, grid: Grid, mask: Tensor | None = None) -> Tensor:
        """Mix tokens (B, T, C) on a grid (H, W); mask (B, T) is True where a token counts."""
        *query, k, v = self.qkv(x).split(self.split_sizes, dim=-1)
        with without_autocast(x.device.type):
            y = self.mix(query[0] if query else None, k, v, grid, mask)
        if self.local_conv is not None:
            maps = v if mask is None else v.masked_fill(~mask.unsqueeze(-1), 0.0)
            maps = maps.transpose(1, 2).unflatten(2, (grid[0], grid[1]))
            y = y + self.local_conv(maps).flatten(2).transpose(1, 2)
        return self.proj(y)

    def mix(self, q: Tensor | None, k: Tensor, v: Tensor, grid: Grid, mask: Tensor | None) -> Tensor:
        """Return the result of the operation between the projections, (B, T, C)."""
        raise TypeError(f'{type(self).__name__} must define mix()')


class SimpleMixer(Mixer):
    """AFT-simple: no position bias (AFT Eq. 5)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch, arch.embed_dim)

    def mix(self, q: Tensor | None, k: Tensor, v: Tensor, grid: Grid, mask: Tensor | None) -> Tensor:
        return aft_simple(q, k, v, mask)


class PositionBias(nn.Module):
    """A position bias for each pair of tokens: w = u v^T (AFT Eq. 7), or w itself.

    Args:
        bias_dim: width of u and v; None stores w.
        window: s of AFT-local, in tokens; None keeps all pairs.
    """

    u: Tensor
    v: Tensor
    weight: Tensor

    def __init__(self, arch: Architecture, bias_dim: int | None, window: int | None = None) -> None:
        super().__init__()
        self.grid, self.prefix, self.window, self.factorized = arch.grid, arch.prefix, window, bias_dim is not None
        tokens = arch.grid[0] * arch.grid[1] + arch.prefix
        for name in ('u', 'v') if self.factorized else ('weight',):
            self.register_parameter(name, nn.Parameter(torch.empty(tokens, bias_dim or tokens)))

    def forward(self, grid: Grid) -> Tensor:
        """Return the bias (T, T) at a grid, or its band (T, 2s - 1)."""
        tokens = grid[0] * grid[1] + self.prefix
        window = None if self.window is None else min(self.window, tokens)
        if self.factorized:
            return factorized_bias(self.resampled(self.u, grid), self.resampled(self.v, grid), window)
        bias = self.resampled(self.resampled(self.weight, grid).t(), grid).t()
        return bias if window is None else local_bias(bias, window)

    def resampled(self, x: Tensor, grid: Grid) -> Tensor:
        return resample_tokens(x, self.grid, grid, self.prefix)


class FullMixer(Mixer):
    """AFT-full: a bias for each pair of tokens (AFT Eq. 2)."""

    def __init__(self, arch: Architecture, bias_dim: int | None) -> None:
        super().__init__(arch, arch.embed_dim)
        self.position_bias = PositionBias(arch, bias_dim)

    def mix(self, q: Tensor | None, k: Tensor, v: Tensor, grid: Grid, mask: Tensor | None) -> Tensor:
        return aft_full(q, k, v, self.position_bias(grid), mask)


class LocalMixer(Mixer):
    """AFT-local: a bias for each pair of tokens in a window (AFT Eq. 4)."""

    def __init__(self, arch: Architecture, bias_dim: int | None, window_size: int) -> None:
        super().__init__(arch, arch.embed_dim)
        self.position_bias = PositionBias(arch, bias_dim, window_size)

    def mix(self, q: Tensor | None, k: Tensor, v: Tensor, grid: Grid, mask: Tensor | None) -> Tensor:
        return aft_local(q, k, v, self.position_bias(grid), mask)


class Kernel(nn.Module):
    """Position biases by distance, standardised for each head (AFT Eq. 8).

    Args:
        shape: (h, ...) of the biases.
        standardize: False leaves out gamma and beta and returns the raw biases.
    """

    def __init__(self, shape: tuple[int, ...], standardize: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.gamma = nn.Parameter(torch.empty(shape[0])) if standardize else None
        self.beta = nn.Parameter(torch.empty(shape[0])) if standardize else None

    def forward(self) -> Tensor:
        if self.gamma is None or self.beta is None:
            return self.weight
        raw = self.weight.flatten(1).unsqueeze(1)
        return standardized_kernel(raw, self.gamma, self.beta).view_as(self.weight)


class ConvMixer(Mixer):
    """AFT-conv: a bias for each offset in a window of the grid (AFT Eq. 6).

    Args:
        num_heads: h.
        kernel_size: s, in tokens.
        standardize_kernel: whether biases are standardised.
        global_context: whether tokens outside the window count, with a bias of 0.
        gumbel: whether only the largest bias of a head counts (AFT Eq. 10).
        local_conv: of `Mixer`.
    """

    def __init__(
        self,
        arch: Architecture,
        num_heads: int,
        kernel_size: int,
        standardize_kernel: bool,
        global_context: bool,
        gumbel: bool,
        local_conv: bool,
    ) -> None:
        super().__init__(arch, num_heads, local_conv)
        self.global_context, self.gumbel = global_context, gumbel
        self.kernel = Kernel((num_heads, kernel_size, kernel_size), standardize_kernel)

    def mix(self, q: Tensor | None, k: Tensor, v: Tensor, grid: Grid, mask: Tensor | None) -> Tensor:
        if self.gumbel:
            offset, weight = onehot_kernel(self.kernel())
            return aft_onehot(q, k, v, offset, weight, grid, mask)
        return aft_conv(q, k, v, self.kernel(), grid, mask, self.global_context)


class OnehotMixer(Mixer):
    """AFT-conv with one biased offset for each head (AFT Eq. 10)."""

    offset: Tensor

    def __init__(self, arch: Architecture, num_heads: int, local_conv: bool) -> None:
        super().__init__(arch, num_heads, local_conv)
        self.weight = nn.Parameter(torch.empty(num_heads))
        self.register_buffer('offset', torch.zeros(num_heads, 2, dtype=torch.int64))

    def mix(self, q: Tensor | None, k: Tensor, v: Tensor, grid: Grid, mask: Tensor | None) -> Tensor:
        return aft_onehot(q, k, v, self.offset, self.weight, grid, mask)


class AxialMixer(Mixer):
    """AFT-axial: biases that are a sum over rows and columns.

    Args:
        num_heads: h.
        window_size: s of rows and of columns, in tokens: distances below s have a bias.
        standardize_kernel: whether biases are standardised.
        resample_bias: whether biases are stretched over all distances of a grid.
        local_conv: of `Mixer`.
    """

    def __init__(
        self,
        arch: Architecture,
        num_heads: int,
        window_size: Grid,
        standardize_kernel: bool,
        resample_bias: bool,
        local_conv: bool,
    ) -> None:
        super().__init__(arch, num_heads, local_conv)
        self.resample_bias = resample_bias
        self.row_bias = Kernel((num_heads, 2 * window_size[0] - 1), standardize_kernel)
        self.column_bias = Kernel((num_heads, 2 * window_size[1] - 1), standardize_kernel)

    def mix(self, q: Tensor | None, k: Tensor, v: Tensor, grid: Grid, mask: Tensor | None) -> Tensor:
        rows, columns = self.row_bias(), self.column_bias()
        if self.resample_bias:
            rows, columns = (
                F.interpolate(bias[None], size=2 * length - 1, mode='linear', align_corners=True)[0]
                for bias, length in zip((rows, columns), grid, strict=True)
            )
        return aft_axial(q, k, v, rows, columns, grid, mask)


MIXERS: dict[str, Callable[..., Mixer]] = {
    'full': FullMixer,
    'local': LocalMixer,
    'simple': SimpleMixer,
    'conv': ConvMixer,
    'onehot': OnehotMixer,
    'axial': AxialMixer,
}


class Attention(nn.Module):
    """Multi-head softmax attention.

    Args:
        num_heads: heads.
        qk_norm: whether queries and keys are normalised.
        scale_norm: whether the result is normalised.
    """

    def __init__(self, arch: Architecture, num_heads: int, qk_norm: bool, scale_norm: bool) -> None:
        super().__init__()
        dim, self.num_heads = arch.embed_dim, num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=arch.qkv_bias)
        self.q_norm = layer_norm(arch, qk_norm, dim // num_heads)
        self.k_norm = layer_norm(arch, qk_norm, dim // num_heads)
        self.norm = layer_norm(arch, scale_norm)
        self.proj = nn.Linear(dim, dim, bias=arch.proj_bias)

    def forward(self, x: Tensor, grid: Grid, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if mask is not None:
            # An image in which nothing counts attends to all of it, so that no result is NaN.
            mask = (mask | ~mask.any(1, keepdim=True))[:, None, None, :]
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, attn_mask=mask)
        return self.proj(self.norm(y.transpose(1, 2).flatten(2)))


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    'gelu': nn.GELU,
    'gelu_tanh': partial(nn.GELU, approximate='tanh'),
    'relu': nn.ReLU,
    'relu6': nn.ReLU6,
    'silu': nn.SiLU,
    'hard_swish': nn.Hardswish,
}


class Mlp(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, arch: Architecture, norm: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(arch.embed_dim, arch.hidden_dim, bias=arch.proj_bias)
        self.act = ACTIVATIONS[arch.activation]()
        self.norm = layer_norm(arch, norm, arch.hidden_dim)
        self.fc2 = nn.Linear(arch.hidden_dim, arch.embed_dim, bias=arch.proj_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.norm(self.act(self.fc1(x))))


class LayerScale(nn.Module):
    """A factor for each channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, arch: Architecture, index: int) -> None:
        super().__init__()
        self.norm1 = layer_norm(arch)
        attends = index in arch.attention_blocks
        self.attn: nn.Module
        if attends:
            self.attn = Attention(arch, **arch.attention_args)
        else:
            self.attn = MIXERS[arch.mixer](arch, **arch.mixer_args)
        self.ls1 = LayerScale(arch.embed_dim) if arch.layer_scale else nn.Identity()
        self.norm2 = layer_norm(arch)
        self.mlp = Mlp(arch, attends and arch.mlp_norm)
        self.ls2 = LayerScale(arch.embed_dim) if arch.layer_scale else nn.Identity()

    def forward(self, x: Tensor, grid: Grid, mask: Tensor | None = None) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x), grid, mask))
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    """A convolution of the patches of an image."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.img_size, self.patch_size = arch.img_size, arch.patch_size
        self.any_size, self.pad = arch.any_size, arch.pad
        self.proj = nn.Conv2d(
            arch.in_chans, arch.embed_dim, arch.patch_size, stride=arch.patch_size, bias=arch.embed_bias
        )
        self.norm = layer_norm(arch, arch.embed_norm)

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Return tokens (B, H * W, C) of images, and their grid (H, W).

        Raises:
            ValueError: the network does not take images of that size.
        """
        size, (height, width) = (x.shape[2], x.shape[3]), self.patch_size
        if not self.any_size and size != tuple(self.img_size):
            raise ValueError(f'expected images of {self.img_size[0]} x {self.img_size[1]} pixels, got {size}')
        if self.pad:
            x = F.pad(x, (0, -size[1] % width, 0, -size[0] % height))
        elif size[0] % height or size[1] % width:
            raise ValueError(f'expected image sides that are multiples of {height} and {width} pixels, got {size}')
        x = self.proj(x)
        return self.norm(x.flatten(2).transpose(1, 2)), (x.shape[2], x.shape[3])


class Network(nn.Module):
    """An AFT vision transformer in evaluation, from images to logits.

    Args:
        arch: its sizes and parts.
        num_classes: 0 leaves out the classifier.
    """

    def __init__(self, arch: Architecture, num_classes: int) -> None:
        super().__init__()
        self.arch, dim = arch, arch.embed_dim
        self.patch_embed = PatchEmbed(arch)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim)) if arch.class_token else None
        self.reg_token = nn.Parameter(torch.empty(1, arch.reg_tokens, dim)) if arch.reg_tokens else None
        tokens = arch.grid[0] * arch.grid[1] + (0 if arch.no_embed_class else arch.prefix)
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, dim)) if arch.pos_embed else None
        self.norm_pre = layer_norm(arch, arch.pre_norm)
        self.blocks = nn.ModuleList(Block(arch, index) for index in range(arch.depth))
        self.norm = layer_norm(arch, arch.final_norm)
        self.fc_norm = layer_norm(arch, arch.fc_norm)
        self.head = nn.Linear(dim, num_classes) if num_classes else nn.Identity()

    def forward(self, images: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Compute logits (B, classes) of images (B, channels, H, W); attn_mask as in `forward_features`."""
        return self.head(self.pool(self.forward_features(images, attn_mask), attn_mask))

    def forward_features(self, images: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Compute the tokens after the final norm.

        Args:
            images: (B, channels, H, W).
            attn_mask: (B, tokens) or (B, H / patch, W / patch) bool, True where a patch counts: for a padded batch of
                mixed sizes.

        Returns:
            (B, T, C), class and register tokens first.
        """
        x, grid = self.patch_embed(images)
        mask = None if attn_mask is None else self.token_mask(attn_mask, len(x), grid)
        x = self.norm_pre(self.embed_positions(x, grid))
        for block in self.blocks:
            x = block(x, grid, mask)
        return self.norm(x)

    def embed_positions(self, x: Tensor, grid: Grid) -> Tensor:
        """Add the prefix tokens and the position embedding to the tokens (B, H * W, C) of a grid."""
        prefix = [token.expand(len(x), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        if self.pos_embed is None:
            return torch.cat([*prefix, x], dim=1)
        embedded = 0 if self.arch.no_embed_class else self.arch.prefix
        positions = resample_tokens(self.pos_embed[0], self.arch.grid, grid, embedded)
        if self.arch.no_embed_class:
            return torch.cat([*prefix, x + positions], dim=1)
        return torch.cat([*prefix, x], dim=1) + positions

    def token_mask(self, mask: Tensor, batch: int, grid: Grid) -> Tensor:
        """Return the mask of all tokens, (B, T), from that of the patches; prefix tokens count.

        Raises:
            ValueError: the mask is not of type bool, or not of the batch and the grid.
        """
        shapes = (batch, *grid), (batch, grid[0] * grid[1])
        if mask.dtype != torch.bool or tuple(mask.shape) not in shapes:
            raise ValueError(
                f'attn_mask must be a bool tensor of shape {shapes[0]} or {shapes[1]}, True where a patch counts, '
                f'got {mask.dtype} of shape {tuple(mask.shape)}'
            )
        mask = mask.flatten(1)
        return torch.cat([mask.new_ones(len(mask), self.arch.prefix), mask], dim=1)

    def pool(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Pool tokens (B, T, C) to the input of the classifier, (B, C)."""
        kind, prefix = self.arch.global_pool, self.arch.prefix
        if kind == 'token':
            x = x[:, 0]
        elif kind:
            first = 0 if self.arch.pool_include_prefix else prefix
            x = x[:, first:]
            if attn_mask is None:
                mean, peak = x.mean(1), x.amax(1)
            else:
                counts = F.pad(attn_mask.flatten(1), (prefix - first, 0), value=True).unsqueeze(-1)
                # A sum of many tokens is above the largest number of float16.
                total = x.masked_fill(~counts, 0.0).sum(1, dtype=torch.promote_types(x.dtype, torch.float32))
                mean = (total / counts.sum(1).clamp(min=1)).to(x.dtype)
                peak = x.masked_fill(~counts, float('-inf')).amax(1).masked_fill(~counts.any(1), 0.0)
            x = {'avg': mean, 'max': peak, 'avgmax': 0.5 * (mean + peak)}[kind]
        return self.fc_norm(x)


def layer_norm(arch: Architecture, present: bool = True, dim: int | None = None) -> nn.Module:
    """Build a LayerNorm of dim channels, by default of the network's width; an identity if it is not present."""
    return nn.LayerNorm(dim or arch.embed_dim, eps=arch.norm_eps) if present else nn.Identity()


def resample_tokens(x: Tensor, old_grid: Grid, grid: Grid, prefix: int) -> Tensor:
    """Resample parameters of tokens (T, n) bicubically to another grid; the rows of prefix tokens are kept."""
    if tuple(old_grid) == tuple(grid):
        return x
    maps = x[prefix:].float().unflatten(0, (old_grid[0], old_grid[1])).permute(2, 0, 1).unsqueeze(0)
    maps = F.interpolate(maps, size=grid, mode='bicubic', antialias=True)
    return torch.cat([x[:prefix], maps[0].flatten(1).t().to(x.dtype)])
