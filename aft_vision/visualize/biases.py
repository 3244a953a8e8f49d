"""Learned position biases: values, pictures and sparsity."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aft_vision.layers import AFTMixer
from aft_vision.visualize.capture import mixer_layers
from aft_vision.visualize.figure import (
    DIVERGING,
    SEQUENTIAL,
    Block,
    Cell,
    check_indices,
    check_layers,
    draw_grid,
    layer_rows,
    number,
)


@torch.no_grad()
def mixer_bias(mixer: AFTMixer) -> Tensor | None:
    """Return the position bias w of a mixer in evaluation, at its own grid.

    Returns:
        AFT-conv and one-hot models: (h, s, s), after AFT Eq. 8, and with one offset per head after AFT Eq. 10.
        AFT-axial: (h, 2a - 1, 2b - 1), the sums of its biases. AFT-full: (1, T, T), AFT Eq. 7. AFT-local:
        (1, T, 2s - 1), or (1, T, s) if causal, AFT Eq. 4. AFT-simple: None.
    """
    return mixer.evaluated_bias()


def position_biases(model: nn.Module) -> list[Tensor]:
    """Return exp(w) - 1 of each mixer in the order of the layers, as shown in AFT Fig. 1.

    Returns:
        As `mixer_bias`, float32 on the CPU.

    Raises:
        ValueError: no layer of the model has a position bias.
    """
    return list(_biases_by_layer(model).values())


def _biases_by_layer(model: nn.Module) -> dict[int, Tensor]:
    found = {layer: mixer_bias(mixer) for mixer, layer in mixer_layers(model).items()}
    biases = {layer: bias.detach().float().expm1().cpu() for layer, bias in found.items() if bias is not None}
    if not biases:
        raise _without_biases(model)
    return biases


def bias_rows(mixer: AFTMixer, grid: tuple[int, int] | None, queries: Tensor, tokens: int) -> Tensor:
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
        ValueError: as `position_biases`.
    """
    rows = []
    for mixer, layer in mixer_layers(model).items():
        bias = mixer_bias(mixer)
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


def _entropy(mixer: AFTMixer, bias: Tensor) -> float:
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
    layers = check_layers(layers, biases[list(biases)[-1]])
    heads = check_indices('head', heads, len(biases[list(biases)[-1]][layers[0]]), max_heads)
    if exponentiated:
        biases = {title: {layer: bias + 1 for layer, bias in each.items()} for title, each in biases.items()}
    cell = _CellMaker(exponentiated)
    many = len(heads) > 1
    blocks: list[Block] = []
    for title, each in biases.items():
        rows = (_head_rows if many else _layer_rows)(each, heads, layers, cell)
        # The rows of both models show the same layers.
        blocks.append(Block(title, [('' if blocks else label, cells) for label, cells in rows]))
    return draw_grid(blocks, cell.title, cell.note, cell.ends, cell.cmap, 0.62 if many else 1.7)


class _CellMaker:
    """A function that makes the picture of one head, with its own scale."""

    def __init__(self, exponentiated: bool) -> None:
        self.exponentiated = exponentiated
        self.cmap = SEQUENTIAL if exponentiated else DIVERGING
        if exponentiated:
            self.title = 'Exponentiated position biases exp(w)'
            self.note = 'The bias multiplies the weight of a source by exp(w). Below: the smallest and the largest.'
            self.ends: tuple[str, ...] = ('smallest', 'largest')
        else:
            self.title = 'Position biases exp(w) - 1'
            self.note = (
                'Red: the bias increases the weight of a source; blue: decreases it; white: no change.\n'
                'Each picture has its own scale, given below it.'
            )
            self.ends = ('minus the number', '0', 'plus the number')

    def __call__(self, bias: Tensor, title: str = '') -> Cell:
        low, high = _limits(bias, self.exponentiated)
        caption = f'{number(low)} to {number(high)}' if self.exponentiated else f'\u00b1{number(high)}'
        return Cell(bias, low, high, title, caption)


def _head_rows(
    biases: Mapping[int, Tensor], heads: Sequence[int], layers: Sequence[int], cell: _CellMaker
) -> list[tuple[str, list[Cell]]]:
    return layer_rows(layers, heads, lambda layer: [cell(biases[layer][head]) for head in heads])


def _layer_rows(
    biases: Mapping[int, Tensor], heads: Sequence[int], layers: Sequence[int], cell: _CellMaker
) -> list[tuple[str, list[Cell]]]:
    cells = [cell(biases[layer][heads[0]], f'layer {layer + 1}') for layer in layers]
    columns = min(4, math.ceil(math.sqrt(len(cells))))
    return [('', cells[start : start + columns]) for start in range(0, len(cells), columns)]


def _limits(values: Tensor, exponentiated: bool) -> tuple[float, float]:
    if exponentiated:
        low, high = values.min().item(), values.max().item()
        return low, max(high, low + 1e-6)
    limit = max(values.abs().max().item(), 1e-6)
    return -limit, limit


def _check_match(biases: Sequence[Mapping[int, Tensor]]) -> None:
    found = [
        f'{len(next(iter(each.values())))} heads in the layers {", ".join(str(layer + 1) for layer in each)}'
        for each in biases
    ]
    if found[0] != found[-1]:
        raise ValueError(
            f'expected two models with biases in the same layers and as many heads, got {found[0]} before and '
            f'{found[-1]} after'
        )
