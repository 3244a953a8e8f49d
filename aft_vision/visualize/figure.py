"""Figures without a window, with grids of small pictures."""

import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aft_vision.files import replacing_output

# Colour maps of values around 0, and of values from small to large.
DIVERGING, SEQUENTIAL = 'RdBu_r', 'viridis'
# In inches, like all lengths below; a page shows 100 pixels per inch.
MARGIN, LABEL, LINE, GAP, PHOTOGRAPH = 0.1, 0.62, 0.17, 0.05, 1.9
COLOR_BAR = 2.6
DPI = 150
# (y, x, height, width), in parts of a picture
Frame = tuple[float, float, float, float]
# (x, y, width, height)
Box = tuple[float, float, float, float]


class Cell(NamedTuple):
    """One small picture.

    Attributes:
        values: (H, W), or (H, W, 3) colours, uint8.
        low, high: Values at the ends of the colour map.
        title: Text above it.
        caption: Text below it.
        mark: A frame (y, x, height, width), as fractions of the picture.
    """

    values: Tensor
    low: float = 0.0
    high: float = 1.0
    title: str = ''
    caption: str = ''
    mark: Frame | None = None


class Block(NamedTuple):
    """Rows of cells under one title, each row with a label."""

    title: str
    rows: Sequence[tuple[str, Sequence[Cell]]]


class TopPicture(NamedTuple):
    """The picture on top of a grid: (H, W, 3) uint8, the text next to it, and a frame as in a cell."""

    pixels: Tensor
    text: str
    frame: Frame | None = None


def new_figure(width: float, height: float) -> Any:
    """Make an empty matplotlib figure of this size in inches, without a window.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'aft-vision[viz]'") from error
    return Figure(figsize=(width, height), layout='constrained')


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure as a PNG, complete or not at all; its folder is made if it is missing."""
    with replacing_output(path) as file:
        figure.savefig(file, dpi=DPI)


def figure_png(figure: Any) -> bytes:
    """Return a figure as PNG bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format='png', dpi=DPI, pil_kwargs={'compress_level': 9})
    return buffer.getvalue()


def literal(name: str) -> str:
    """Write a name so that matplotlib draws it as it is: dollars begin no formula, an underscore hides nothing."""
    # Bytes of a file's name that are not UTF-8 have no glyph.
    name = os.fsencode(name).decode(errors='replace')
    return f'{" " if name.startswith("_") else ""}{name}'.replace('$', r'\$')


def evenly_spaced(count: int, at_most: int) -> list[int]:
    """Return up to `at_most` evenly spaced indices below `count`, including the first and the last.

    Raises:
        ValueError: at_most is below 1.
    """
    if at_most < 1:
        raise ValueError(f'expected to draw at least one of {count}, got {at_most}')
    return torch.linspace(0, count - 1, min(count, at_most)).round().long().tolist()


def choose(noun: str, chosen: Sequence[int] | None, known: Iterable[int], at_most: int = sys.maxsize) -> list[int]:
    """Return the chosen ones of some indices, or evenly spaced ones for None.

    Raises:
        ValueError: a chosen index is not one of them.
    """
    known = list(known)
    if chosen is None:
        return [known[index] for index in evenly_spaced(len(known), at_most)]
    wrong: list[Any] = [index + 1 for index in chosen if index not in known] or ([] if chosen else ['none'])
    if wrong:
        is_range = known == list(range(len(known)))
        numbers = f'1 to {len(known)}' if is_range else ', '.join(str(index + 1) for index in known)
        raise ValueError(f'expected {noun}s that can be drawn ({numbers}), got {wrong[0]}')
    return list(chosen)


def layer_rows(
    layers: Sequence[int], heads: Sequence[int], cells: Callable[[int], Iterable[Cell]]
) -> list[tuple[str, list[Cell]]]:
    """Return the rows of a Block, one per layer, with the cells of its heads; the first row has titles."""
    rows = []
    for layer in layers:
        titles = [f'head {head + 1}' if layer == layers[0] else '' for head in heads]
        titled = [cell._replace(title=title) for cell, title in zip(cells(layer), titles, strict=True)]
        rows.append((f'layer {layer + 1}', titled))
    return rows


def draw_grid(
    blocks: Sequence[Block],
    title: str,
    note: str,
    scale: Sequence[str],
    cmap: str,
    side: float = 0.62,
    aspect: float = 1.0,
    photograph: TopPicture | None = None,
) -> Any:
    """Draw blocks of small pictures side by side, with a colour bar below.

    Args:
        title: Title of the figure.
        note: Explanation of captions and colours, below the title; lines separated by line feeds.
        scale: Labels of the colour bar, evenly spaced from end to end.
        cmap: Colour map, by matplotlib's name.
        side: Width of a cell, in inches.
        aspect: Height of a cell over its width.
        photograph: Picture on top.

    Returns:
        A matplotlib Figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    size = (side, side * aspect)
    # Approximate width of a title.
    widths = [
        max(max(len(cells) for _, cells in block.rows) * (side + GAP), 0.08 * len(block.title)) for block in blocks
    ]
    labels = [LABEL if any(label for label, _ in block.rows) else 2 * GAP for block in blocks]
    labels[0] = max(labels[0], MARGIN)
    notes = note.split('\n')
    top = MARGIN + 1.4 * LINE + LINE * len(notes) + 3 * GAP
    grid_top = top + (PHOTOGRAPH + LINE if photograph else 0.0)
    heights = [_block_height(block, size[1]) for block in blocks]
    width = max(sum(labels) + sum(widths) + MARGIN, 7.2)
    height = grid_top + max(heights) + 3 * LINE + MARGIN
    figure = new_figure(width, height)
    figure.set_layout_engine('none')
    # Its coordinates are inches from the upper left corner. Hundreds of axes would take half a minute.
    axes = figure.add_axes((0, 0, 1, 1))
    _text(axes, MARGIN, MARGIN + 0.7 * LINE, title, 10, weight='bold')
    for index, line in enumerate(notes):
        _text(axes, MARGIN, MARGIN + (2.1 + index) * LINE, line, 8)
    if photograph is not None:
        _draw_photograph(axes, photograph, top, width)
    left = 0.0
    for block, label, block_width in zip(blocks, labels, widths, strict=True):
        _draw_block(axes, block, left + label, grid_top, size, cmap)
        left += label + block_width
    _draw_color_bar(axes, labels[0], grid_top + max(heights) + LINE, scale, cmap)
    axes.set(xlim=(0, width), ylim=(height, 0), aspect='auto')
    axes.set_axis_off()
    return figure


def _block_height(block: Block, cell_height: float) -> float:
    title = 1.2 * LINE if block.title else 0.0
    return title + sum(_row_height(cells, cell_height) for _, cells in block.rows)


def _row_height(cells: Sequence[Cell], cell_height: float) -> float:
    above, below = any(cell.title for cell in cells), any(cell.caption for cell in cells)
    return cell_height + LINE * (above + below) + 1.5 * GAP


def _draw_block(axes: Any, block: Block, left: float, top: float, size: tuple[float, float], cmap: str) -> None:
    if block.title:
        _text(axes, left, top + 0.5 * LINE, block.title, 9, weight='bold')
        top += 1.2 * LINE
    for label, cells in block.rows:
        y = top + (LINE if any(cell.title for cell in cells) else 0.0)
        _text(axes, left - GAP, y + size[1] / 2, label, 8, ha='right')
        for index, cell in enumerate(cells):
            x = left + index * (size[0] + GAP)
            # A map and its limits have no effect on colours.
            _image(axes, cell.values, (x, y, *size), cmap=cmap, vmin=cell.low, vmax=cell.high)
            _text(axes, x + size[0] / 2, y - 0.5 * LINE, cell.title, 7.5, ha='center')
            _text(axes, x + size[0] / 2, y + size[1] + 0.45 * LINE, cell.caption, 7, ha='center', color='0.25')
            if cell.mark is not None:
                _frame(axes, cell.mark, (x, y, *size))
        top += _row_height(cells, size[1])


def _draw_color_bar(axes: Any, left: float, top: float, scale: Sequence[str], cmap: str) -> None:
    _image(axes, torch.linspace(0, 1, 256)[None], (left, top, COLOR_BAR, 0.11), cmap=cmap)
    for index, words in enumerate(scale):
        share = index / (len(scale) - 1)
        anchor = 'left' if share == 0 else 'right' if share == 1 else 'center'
        _text(axes, left + COLOR_BAR * share, top + 0.11 + 0.5 * LINE, words, 7.5, ha=anchor)


def _draw_photograph(axes: Any, photograph: TopPicture, top: float, page_width: float) -> None:
    rows, columns = photograph.pixels.shape[:2]
    width = min(PHOTOGRAPH * columns / rows, page_width - LABEL - 2.2)
    box = (LABEL, top, width, width * rows / columns)
    _image(axes, photograph.pixels, box)
    for index, line in enumerate(photograph.text.split('\n')):
        _text(axes, LABEL + width + 2 * GAP, top + (0.5 + index) * LINE, line, 8)
    if photograph.frame is not None:
        _frame(axes, photograph.frame, box, 1.5)


def _text(axes: Any, x: float, y: float, text: str, size: float, **kwargs: Any) -> None:
    if text:
        axes.text(x, y, text, fontsize=size, va='center', parse_math=False, **kwargs)


def _image(axes: Any, values: Tensor, box: Box, **colors: Any) -> None:
    x, y, width, height = box
    values = values.detach().cpu()
    values = values if values.dtype == torch.uint8 else values.double()
    axes.imshow(values.numpy(), extent=(x, x + width, y + height, y), interpolation='nearest', **colors)


def _frame(axes: Any, frame: Frame, box: Box, line: float = 0.8) -> None:
    from matplotlib.patches import Rectangle

    top, left, height, width = frame
    corner = (box[0] + left * box[2], box[1] + top * box[3])
    for color, thickness in (('black', 2 * line), ('white', line)):
        axes.add_patch(
            Rectangle(corner, width * box[2], height * box[3], fill=False, edgecolor=color, linewidth=thickness)
        )


def format_number(value: float) -> str:
    """Format a number with two digits, without an exponent if possible."""
    if value == 0 or not math.isfinite(value):
        return f'{value:g}'
    digits = max(0, 1 - math.floor(math.log10(abs(value))))
    return f'{value:.{digits}f}' if digits <= 3 else f'{value:.0e}'.replace('e-0', 'e-')
