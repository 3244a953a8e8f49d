"""Learned position biases: values, pictures and sparsity."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aft_vision.layers import TokenMixer
from aft_vision.visualize.capture import mixer_layers
from aft_vision.visualize.figure import (
    DIVERGING,
    SEQUENTIAL,
    Block,
    Cell,
    choose,
    draw_grid,
    format_number,
    layer_rows,
)

# Title, note, ends of the scale and colours of a picture.
EXPONENTIATED: tuple[str, str, tuple[str, ...], str] = (
    'Exponentiated position biases exp(w)',
    'The bias multiplies the weight of a source by exp(w). Below: the smallest and the largest.',
    ('smallest', 'largest'),
    SEQUENTIAL,
)
CENTRED: tuple[str, str, tuple[str, ...], str] = (
    'Position biases exp(w) - 1',
    'Red: the bias increases the weight of a source; blue: decreases it; white: no change.\n'
    'Each picture has its own scale, given below it.',
    ('minus the number', '0', 'plus the number'),
    DIVERGING,
)


@torch.no_grad()
def _biases_by_layer(model: nn.Module) -> dict[int, Tensor]:
    # exp(w) - 1 of each layer, of the bias that evaluation uses at the mixer's own grid, (h, ...).
    evaluated = {layer: mixer.evaluated_bias() for mixer, layer in mixer_layers(model).items()}
    biases = {layer: bias.float().expm1().cpu() for layer, bias in evaluated.items() if bias is not None}
    if not biases:
        raise _without_biases(model)
    return biases


def bias_rows(mixer: TokenMixer, grid: tuple[int, int] | None, queries: Tensor, tokens: int) -> Tensor:
    """Return rows of the position bias as the whole (T, T) matrix of AFT Eq. 2.

    Args:
        mixer: Mixer in evaluation mode.
        grid: (H, W) of the tokens after the prefix; None for a sequence.
        queries: (Q,) targets, including prefix tokens.
        tokens: Number of sources S.

    Returns:
        (h, Q, S), or (1, Q, S) if all channels share a bias; minus infinity if a source has no weight.
    """
    rows = mixer.dense_bias(grid, queries, tokens)
    if mixer.causal:
        future = torch.arange(tokens, device=queries.device) > queries[:, None]
        rows = rows.masked_fill(future, -torch.inf)
    return rows


@torch.no_grad()
def bias_statistics(model: nn.Module, threshold: float = 0.1) -> list[dict[str, float]]:
    """Return the sparsity of the position biases by layer.

    Args:
        threshold: A bias with |exp(w) - 1| below it counts as zero.

    Returns:
        Per layer with biases its number `layer` from 1, those with softmax attention counted. `entropy`, the mean over
        heads of the entropy of softmax(w) in nats, AFT Eq. 9: for AFT-conv and AFT-axial over all entries of a head,
        before the choice of AFT Eq. 10; for AFT-full and AFT-local over the sources of a target, of a causal one up to
        it, and averaged over targets; NaN for a one-hot model, whose other entries are gone.
        `uniform`, the entropy of equal biases; of the biases that evaluation uses, `unbiased`, the fraction below the
        threshold, and `largest`, the largest |exp(w) - 1|.

    Raises:
        ValueError: no layer of the model has a position bias.
    """
    rows = []
    for mixer, layer in mixer_layers(model).items():
        bias = mixer.evaluated_bias()
        if bias is None:
            continue
        if not mixer.on_grid:
            tokens = bias.shape[1]
            bias = bias_rows(mixer, None, torch.arange(tokens, device=bias.device), tokens)[0]
        # A causal mixer has none for later tokens.
        is_used = bias != -torch.inf
        change = bias[is_used].cpu().double().expm1().abs()
        rows.append(
            {
                'layer': layer + 1,
                'entropy': _entropy(mixer, bias),
                'uniform': is_used.flatten(1).sum(dim=1).double().log().mean().item(),
                'unbiased': (change < threshold).double().mean().item(),
                'largest': change.max().item(),
            }
        )
    if not rows:
        raise _without_biases(model)
    return rows


def _entropy(mixer: TokenMixer, bias: Tensor) -> float:
    # Compute the entropy of (n, ...) biases, or of the kernel from which one offset per head is chosen.
    learned = mixer.learned_bias() if mixer.on_grid else bias
    if learned is None:
        return math.nan
    shares = learned.flatten(1).cpu().double().softmax(dim=1)
    return torch.special.entr(shares).sum(dim=1).mean().item()


def _without_biases(model: nn.Module) -> ValueError:
    return ValueError(f'expected a model with position biases, got {type(model).__name__}, which has none')


def draw_position_biases(
    model: nn.Module,
    max_heads: int = 16,
    *,
    before: nn.Module | None = None,
    heads: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    exponentiated: bool = False,
) -> Any:
    """Draw exp(w) - 1 of a model: a row per layer and a column per head, or a picture per layer for a single head.

    Red is above 0, where the bias increases a token's weight, blue below. Each picture has its own scale, from minus to
    plus the number below it.

    Args:
        max_heads: Maximal number of columns; heads are evenly spaced.
        before: A model with the same layers and heads to draw on the left.
        heads: Indices of heads; None means evenly spaced ones.
        layers: Indices of blocks, those with softmax attention counted; None is all that have biases.
        exponentiated: Draw exp(w) from the smallest to the largest value, as AFT Fig. 3 does.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: a model has no position biases, the two do not match, or a head or layer does not exist.
        ImportError: matplotlib is not installed.
    """
    models = {'': model} if before is None else {'before': before, 'after': model}
    biases = {title: _biases_by_layer(model) for title, model in models.items()}
    _check_match(list(biases.values()))
    drawn = biases[list(biases)[-1]]
    layers = choose('layer', layers, drawn)
    heads = choose('head', heads, range(len(drawn[layers[0]])), max_heads)
    if exponentiated:
        biases = {title: {layer: bias + 1 for layer, bias in each.items()} for title, each in biases.items()}
    blocks: list[Block] = []
    for title, each in biases.items():
        rows = _rows(each, heads, layers, exponentiated)
        # The rows of both models show the same layers.
        blocks.append(Block(title, [('' if blocks else label, cells) for label, cells in rows]))
    title, note, ends, cmap = EXPONENTIATED if exponentiated else CENTRED
    return draw_grid(blocks, title, note, ends, cmap, 0.62 if len(heads) > 1 else 1.7)


def _rows(
    biases: Mapping[int, Tensor], heads: Sequence[int], layers: Sequence[int], exponentiated: bool
) -> list[tuple[str, list[Cell]]]:
    if len(heads) > 1:
        return layer_rows(layers, heads, lambda layer: [_cell(biases[layer][head], exponentiated) for head in heads])
    cells = [_cell(biases[layer][heads[0]], exponentiated, f'layer {layer + 1}') for layer in layers]
    columns = min(4, math.ceil(math.sqrt(len(cells))))
    return [('', cells[start : start + columns]) for start in range(0, len(cells), columns)]


def _cell(bias: Tensor, exponentiated: bool, title: str = '') -> Cell:
    # The picture of a head, with its own scale.
    low, high = bias.min().item(), bias.max().item()
    if exponentiated:
        high = max(high, low + 1e-6)
        return Cell(bias, low, high, title, f'{format_number(low)} to {format_number(high)}')
    limit = max(-low, high, 1e-6)
    return Cell(bias, -limit, limit, title, f'\u00b1{format_number(limit)}')


def _check_match(biases: Sequence[Mapping[int, Tensor]]) -> None:
    shapes = [
        f'{len(next(iter(each.values())))} heads in the layers {", ".join(str(layer + 1) for layer in each)}'
        for each in biases
    ]
    if shapes[0] != shapes[-1]:
        raise ValueError(
            f'expected two models with biases in the same layers and as many heads, got {shapes[0]} before and '
            f'{shapes[-1]} after'
        )
