"""Keys over a photograph (AFT Fig. 9 to 12)."""

from collections.abc import Iterator, Sequence
from typing import Any

from aft_vision.visualize.capture import MixerInputs
from aft_vision.visualize.figure import (
    SEQUENTIAL,
    Block,
    Cell,
    TopPicture,
    choose,
    draw_grid,
    format_number,
    layer_rows,
)
from aft_vision.visualize.photographs import Photograph


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
