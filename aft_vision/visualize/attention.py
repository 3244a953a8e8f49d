"""Keys, AFT's implicit attention of a query, and averages of attention by relative position for AFT and ViT."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn

from aft_vision.visualize.biases import bias_rows
from aft_vision.visualize.capture import MixerInputs, keyed_layers, run_with_hooks, token_grid
from aft_vision.visualize.figure import (
    SEQUENTIAL,
    Block,
    Cell,
    TopPicture,
    choose,
    draw_grid,
    evenly_spaced,
    format_number,
    layer_rows,
)
from aft_vision.visualize.photographs import Photograph

HEAT = 'inferno'

# Below the attention of a token.
ATTENTION_NOTE = (
    'The softmax over the sources: of key + position bias in AFT, of query times key in a ViT.\n'
    'Each picture has its own scale, from 0 to its largest weight.\n'
    'Below each picture: that weight as a multiple of the weight when all tokens count the same.'
)


@torch.no_grad()
def implicit_attention(inputs: MixerInputs, queries: Sequence[int] | Tensor, heads: Sequence[int] | Tensor) -> Tensor:
    """Compute the weights of all sources for a target: the softmax of k + w over the sources (AFT Eq. 3).

    The factor sigmoid(q) of AFT Eq. 3 is left out, because it is equal for all sources of a target and channel.

    Args:
        inputs: Inputs of one layer.
        queries: Q targets, as indices of tokens including prefix tokens.
        heads: n heads of AFT-conv, whose channels share their weights; channels of the other mixers.

    Returns:
        (B, n, Q, S), at least float32; sums to 1 over the S sources, including prefix tokens.

    Raises:
        ValueError: the mixer is of an unknown kind.
    """
    keys = inputs.k.to(torch.promote_types(inputs.k.dtype, torch.float32))
    queries = torch.as_tensor(queries, device=keys.device)
    heads = torch.as_tensor(heads, device=keys.device)
    bias = bias_rows(inputs.mixer, inputs.grid, queries, keys.shape[1]).to(keys.dtype)
    if len(bias) > 1:
        bias = bias[heads]
    logits = keys[:, :, heads].transpose(1, 2).unsqueeze(2) + bias
    return logits.softmax(-1)


def relative_mean(attention: Tensor, grid: tuple[int, int]) -> Tensor:
    """Average attention by the offset from query to key (AFT Sec. 3.2, footnote 3).

    At each offset, the mean over the queries whose key at that offset is in the grid, so that far offsets, which few
    queries have, do not fade.

    Args:
        attention: (..., H * W, H * W), queries before keys, without prefix tokens.
        grid: (H, W).

    Returns:
        (..., 2H - 1, 2W - 1); [H - 1 + dy, W - 1 + dx] is the weight of the key at offset (dy, dx).
    """
    height, width = grid
    shape = (2 * height - 1, 2 * width - 1)
    token = torch.arange(height * width, device=attention.device)
    dy = token // width - (token // width)[:, None] + height - 1
    dx = token % width - (token % width)[:, None] + width - 1
    index = (dy * shape[1] + dx).flatten()
    total = attention.new_zeros(*attention.shape[:-2], shape[0] * shape[1])
    total.index_add_(-1, index, attention.flatten(-2))
    pairs = torch.bincount(index, minlength=shape[0] * shape[1])
    return (total / pairs).unflatten(-1, shape)


def relative_attention(
    model: nn.Module, batches: Tensor | Iterable[Tensor], heads: Sequence[int] | None = None, max_heads: int = 16
) -> Tensor:
    """Average attention maps by relative position, of a ViT or of AFT (AFT Fig. 1 left, Fig. 5).

    The mean over images and query positions. Attention to and from class and register tokens is left out, and the rest
    is not rescaled. Only one image's (n, T, T) attention of one layer is in memory at a time.

    Args:
        model: A ViT with `timm.layers.Attention`, fused or not, or an `AFTVisionTransformer`, whose attention is the
            implicit one of AFT Eq. 3 without its gate.
        batches: Images (B, 3, H, W) of one size, normalised, or several such batches.
        heads: n heads, or channels of an AFT mixer without heads; None means evenly spaced ones.
        max_heads: Number of evenly spaced heads.

    Returns:
        (layers, n, 2H - 1, 2W - 1) for a grid of (H, W) tokens, float64 on the CPU, as `relative_mean`.

    Raises:
        ValueError: the model has no such mixer, a head does not exist, or there are no images.
    """
    chosen = evenly_spaced(attention_heads(model), max_heads) if heads is None else heads
    mixers = keyed_layers(model, attention=True)
    totals: dict[nn.Module, Tensor] = {}
    images = 0

    def add(mixer: Any, x: Tensor, grid: tuple[int, int], prefix: int) -> None:
        own = choose('head', chosen, range(_heads(mixer)))
        for tokens in x.split(1):
            mean = relative_mean(_attention(mixer, tokens, grid, prefix, own), grid).cpu().double()
            totals[mixer] = totals.get(mixer, torch.zeros_like(mean)) + mean

    for batch in [batches] if isinstance(batches, Tensor) else batches:
        run_with_hooks(model, batch, mixers, add)
        images += len(batch)
    if not images:
        raise ValueError('expected at least one image, got none')
    return torch.stack([*totals.values()]) / images


def attention_heads(model: nn.Module) -> int:
    """Return the least number of heads of a model's token mixers, or of channels for an AFT mixer without heads.

    Raises:
        ValueError: as `relative_attention`.
    """
    return min(map(_heads, keyed_layers(model, attention=True)))


def _heads(mixer: Any) -> int:
    return mixer.num_heads if isinstance(mixer, Attention) else mixer.key_dim


def _attention(
    mixer: Any, x: Tensor, grid: tuple[int, int], prefix: int, heads: Sequence[int], queries: slice = slice(None)
) -> Tensor:
    # (n, H * W or those queries, H * W) of one image (1, T, C), the softmax being over the prefix tokens too.
    if not isinstance(mixer, Attention):
        q, k, v = mixer.project_qkv(x)
        inputs = MixerInputs(mixer, q, k, v, grid, prefix)
        return implicit_attention(inputs, torch.arange(prefix, x.shape[1])[queries], heads)[0, :, :, prefix:]
    # timm's attention; fused, it returns no weights.
    q, k, _ = mixer.qkv(x[0]).unflatten(1, (3, mixer.num_heads, mixer.head_dim)).permute(1, 2, 0, 3)  # (h, T, D / h)
    q, k = mixer.q_norm(q)[list(heads)], mixer.k_norm(k)[list(heads)]
    logits = (q[:, prefix:][:, queries] * mixer.scale) @ k.transpose(1, 2)
    return logits.to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)[..., prefix:]


def draw_relative_attention(maps: Mapping[str, Tensor], heads: Mapping[str, Sequence[int]] | None = None) -> Any:
    """Draw average relative attention maps, with several models side by side (AFT Fig. 1, Fig. 5).

    Args:
        maps: Results of `relative_attention` by model name.
        heads: Indices of these heads by model name; None numbers them from the first.

    Returns:
        A matplotlib Figure: a row per layer and a column per head.

    Raises:
        ImportError: matplotlib is not installed.
    """
    blocks: list[Block] = []
    for name, layer_maps in maps.items():
        labelled = not blocks or len(layer_maps) != len(next(iter(maps.values())))
        shown = heads[name] if heads else range(layer_maps.shape[1])
        rows = layer_rows(range(len(layer_maps)), shown, partial(_relative_cells, layer_maps))
        blocks.append(Block(name, rows if labelled else [('', cells) for _, cells in rows]))
    note = (
        'Mean over images and query positions by the offset from query to key; the centre is the query itself.\n'
        'Each picture has its own scale, from the first to the second number below it.'
    )
    return draw_grid(blocks, 'Average relative attention', note, ('smallest weight', 'largest weight'), SEQUENTIAL)


def _relative_cells(maps: Tensor, layer: int) -> Iterator[Cell]:
    for each in maps[layer]:
        low, high = each.min().item(), each.max().item()
        ends = '\u2013'.join(format_number(100 * end) for end in (low, high))
        yield Cell(each, low, max(high, low + 1e-9), caption=f'{ends}%')


def draw_attention(
    photograph: Photograph,
    model: nn.Module,
    query: tuple[int, int],
    *,
    heads: Sequence[int] | None = None,
    max_heads: int = 16,
    chosen_layers: Sequence[int] | None = None,
    text: str = '',
) -> Any:
    """Draw a token's attention over a photograph, of a ViT or of AFT (AFT Eq. 3): a row per layer, a column per head.

    Args:
        photograph: The input image.
        model: As in `relative_attention`.
        query: (row, column) of the token, from 0.
        heads: Heads, or channels of an AFT mixer without heads, that all drawn layers have; None means evenly spaced
            ones.
        max_heads: Number of evenly spaced heads.
        chosen_layers: Indices of blocks; None means all.
        text: Lines next to the photograph, separated by line feeds.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: the query is outside the grid, a head or layer does not exist, or the model has no mixer of a known
            kind.
        ImportError: matplotlib is not installed.
    """
    layers = keyed_layers(model, attention=True)
    chosen = choose('layer', chosen_layers, layers.values())
    layers = {mixer: layer for mixer, layer in layers.items() if layer in chosen}
    # Those that all drawn layers have.
    heads = choose('head', heads, range(min(map(_heads, layers))), max_heads)
    grid = token_grid(model, (photograph.images.shape[2], photograph.images.shape[3]))
    token, frame = _check_query(query, grid), (query[0] / grid[0], query[1] / grid[1], 1 / grid[0], 1 / grid[1])
    # (n, H * W) of each layer.
    weights: dict[int, Tensor] = {}

    def keep(mixer: Any, x: Tensor, grid: tuple[int, int], prefix: int) -> None:
        weights[layers[mixer]] = _attention(mixer, x, grid, prefix, heads, slice(token, token + 1)).squeeze(1)

    run_with_hooks(model, photograph.images.to(next(model.parameters()).device), layers, keep)
    prefix = getattr(model, 'num_prefix_tokens', 0)

    def cells(layer: int) -> Iterator[Cell]:
        for weight in weights[layer]:
            caption = f'{format_number(weight.max().item() * (len(weight) + prefix))}\u00d7'
            yield Cell(overlay(photograph, weight.unflatten(0, grid)), caption=caption, mark=frame)

    return draw_grid(
        [Block('', layer_rows(chosen, heads, cells))],
        'Attention of the framed token',
        ATTENTION_NOTE,
        ('0', 'the largest weight'),
        HEAT,
        aspect=grid[0] / grid[1],
        photograph=TopPicture(photograph.pixels, text, frame),
    )


def draw_key_maps(
    photograph: Photograph,
    layers: Sequence[MixerInputs],
    *,
    heads: Sequence[int] | None = None,
    max_heads: int = 16,
    chosen_layers: Sequence[int] | None = None,
    text: str = '',
) -> Any:
    """Draw a photograph and the keys below it: a row per layer and a column per head (AFT Fig. 9 to 12).

    These are keys, not exp(k). A constant added to all keys of a channel changes nothing in AFT, and a difference of d
    means that one token has exp(d) times the weight of another.

    Args:
        photograph, max_heads, text: As in `draw_attention`.
        layers: From `capture_mixers` with a batch of 1.
        heads: Heads, or channels if there are none; None means evenly spaced ones.
        chosen_layers: Indices of blocks, those with softmax attention counted; None means all.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: a head or layer does not exist.
        ImportError: matplotlib is not installed.
    """
    heads = choose('head', heads, range(layers[0].k.shape[2]), max_heads)
    inputs, grid = {each.layer: each for each in layers}, layers[0].grid
    chosen = choose('layer', chosen_layers, inputs)

    def cells(layer: int) -> Iterator[Cell]:
        # (n, H, W), without prefix tokens.
        maps = inputs[layer].k[0][inputs[layer].num_prefix_tokens :, heads].float().t().unflatten(1, grid)
        for keys in maps:
            low, high = keys.min().item(), keys.max().item()
            yield Cell(keys, low, max(high, low + 1e-6), caption=format_number(high - low))

    return draw_grid(
        [Block('', layer_rows(chosen, heads, cells))],
        'Keys',
        'Bright tokens have more weight. Each picture has its own scale, from its smallest to its largest key.\n'
        'Below each picture: the difference of the two; a difference of d means exp(d) times the weight.',
        ('smallest key', 'largest key'),
        SEQUENTIAL,
        aspect=grid[0] / grid[1],
        photograph=TopPicture(photograph.pixels, text),
    )


def _check_query(query: tuple[int, int], grid: tuple[int, int]) -> int:
    # The index of the token in the grid.
    if not (0 <= query[0] < grid[0] and 0 <= query[1] < grid[1]):
        raise ValueError(
            f'expected a query row from 1 to {grid[0]} and a column from 1 to {grid[1]}, '
            f'got {query[0] + 1} and {query[1] + 1}'
        )
    return query[0] * grid[1] + query[1]


def overlay(photograph: Photograph, weights: Tensor) -> Tensor:
    """Return colours (H, W, 3), uint8: weights (H', W') as a heat map over the photograph in dark grey."""
    from matplotlib import colormaps

    rows, columns = weights.shape
    step = max(1, 64 // max(rows, columns))
    size = (rows * step, columns * step)
    grey = photograph.pixels.float().mean(2)[None, None].cpu() / 255
    grey = F.interpolate(grey, size, mode='bilinear', antialias=True)[0, 0]
    share = (weights / weights.max().clamp(min=1e-30)).cpu()
    share = share.repeat_interleave(step, 0).repeat_interleave(step, 1)
    background = 0.4 * 255 * (grey * (1 - share))[..., None]
    heat = torch.from_numpy(colormaps[HEAT](share.numpy(), bytes=True))[..., :3]
    return (heat + background).clamp(0, 255).to(torch.uint8)
