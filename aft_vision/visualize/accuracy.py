"""Accuracy on labelled photographs: by class, and some right and wrong answers."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aft_vision.data.class_names import class_labels, match_classes
from aft_vision.visualize.figure import evenly_spaced, literal, new_figure
from aft_vision.visualize.photographs import SkippedImages, load_batches, load_photograph

MAX_CLASSES = 40
# With fewer images the interval of 95 % is wider than 40 points, and equal classes look very different.
MIN_IMAGES = 20
# The quantile of a two-sided interval of 95 %.
NORMAL = 1.96


class LabelledPrediction(NamedTuple):
    """A photograph whose class is known, and what a model takes it for.

    Attributes:
        truth, prediction: Indices of classes.
        probability: Share that the model gives its prediction, in [0, 1].
    """

    path: Path
    truth: int
    prediction: int
    probability: float

    @property
    def is_right(self) -> bool:
        """Return whether the prediction is the truth."""
        return self.truth == self.prediction


@torch.no_grad()
def predict_labelled(
    model: Any,
    paths: Sequence[Path],
    size: tuple[int, int] | None = None,
    skipped: SkippedImages | None = None,
) -> list[LabelledPrediction]:
    """Classify photographs whose folders are named after classes of the model, and leave out the others.

    Args:
        size: (H, W) in pixels that the model sees; None is its own.
        skipped: Receives images that cannot be decoded; None makes them errors.
    """
    names = sorted({path.parent.name for path in paths})
    places = zip(names, match_classes(class_labels(model), names), strict=True)
    index = {name: place for name, place in places if place is not None}
    labelled = [path for path in paths if path.parent.name in index]
    logits = [model(batch) for batch in load_batches(labelled, model, size, skipped)]
    if not logits:
        return []
    probability, prediction = torch.cat(logits).float().softmax(1).max(1)
    labelled = labelled if skipped is None else skipped.kept(labelled)
    truths = [index[path.parent.name] for path in labelled]
    found = zip(labelled, truths, prediction.tolist(), probability.tolist(), strict=True)
    return [LabelledPrediction(*each) for each in found]


def interval(right: int, count: int) -> tuple[float, float]:
    """Return the Wilson interval of 95 % of a share, of `right` of `count`, in [0, 1]."""
    share, spread = right / count, NORMAL**2 / count
    centre = (share + spread / 2) / (1 + spread)
    half = NORMAL / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def by_class(answers: Sequence[LabelledPrediction], names: Sequence[str]) -> dict[str, list[LabelledPrediction]]:
    """Return photographs by the name of their class, the most accurate class last.

    Classes of fewer than MIN_IMAGES are left out. Of more than MAX_CLASSES, those at both ends are returned.
    """
    groups: dict[str, list[LabelledPrediction]] = {}
    for each in answers:
        groups.setdefault(names[each.truth], []).append(each)
    groups = {name: group for name, group in groups.items() if len(group) >= MIN_IMAGES}
    order = sorted(groups, key=lambda name: (_share(groups[name]), name))
    if len(order) > MAX_CLASSES:
        order = order[: MAX_CLASSES // 2] + order[-MAX_CLASSES // 2 :]
    return {name: groups[name] for name in order}


def draw_classes(groups: dict[str, list[LabelledPrediction]], label: str, total: float) -> Any:
    """Draw the accuracy of classes as points with intervals of 95 %, and that of all as a line.

    Args:
        groups: From `by_class`.
        label: Of the axis.
        total: Accuracy of all photographs, in [0, 1].

    Returns:
        A matplotlib Figure.
    """
    figure = new_figure(7.5, 1.3 + 0.28 * len(groups))
    axes = figure.subplots()
    for place, group in enumerate(groups.values()):
        low, high = interval(sum(each.is_right for each in group), len(group))
        axes.plot([100 * low, 100 * high], [place, place], color='C0', linewidth=1.5)
        axes.plot(100 * _share(group), place, 'o', color='C0')
    axes.axvline(100 * total, color='0.5', linestyle=':', label=f'all: {100 * total:.1f}%')
    axes.set_yticks(range(len(groups)), [literal(f'{name} ({len(group)})') for name, group in groups.items()])
    axes.set(xlim=(0, 100), ylim=(-0.6, len(groups) - 0.4), xlabel='top-1 (%), interval of 95 %', ylabel=label)
    axes.grid(axis='x', alpha=0.3)
    axes.legend(loc='lower right', bbox_to_anchor=(1, 1), fontsize='small', frameon=False)
    return figure


def draw_examples(
    answers: Sequence[LabelledPrediction],
    names: Sequence[str],
    model: Any,
    columns: int = 6,
    size: tuple[int, int] | None = None,
) -> Any:
    """Draw photographs with their class above and the prediction below, a row of right ones and a row of wrong ones.

    Args:
        answers: At least one photograph.
        columns: Photographs of a row, evenly spaced.
        size: As in `predict_labelled`.

    Returns:
        A matplotlib Figure.
    """
    rows = []
    for is_right in (True, False):
        group = [each for each in answers if each.is_right == is_right]
        if group:
            rows.append([group[place] for place in evenly_spaced(len(group), columns)])
    figure = new_figure(1.8 * columns, 2.6 * len(rows))
    for row, panels in zip(rows, figure.subplots(len(rows), columns, squeeze=False), strict=True):
        for axes in panels:
            axes.set_axis_off()
        color = 'C2' if row[0].is_right else 'C3'
        for axes, each in zip(panels, row, strict=False):
            axes.imshow(load_photograph(each.path, model, size).pixels.numpy())
            axes.set_title(f'truth: {names[each.truth]}', fontsize=9, parse_math=False)
            words = f'prediction ({100 * each.probability:.0f}%):\n{names[each.prediction]}'
            style: dict[str, Any] = dict(ha='center', va='top', fontsize=9, color=color, parse_math=False)
            axes.text(0.5, -0.04, words, transform=axes.transAxes, **style)
    return figure


def _share(group: Sequence[LabelledPrediction]) -> float:
    return sum(each.is_right for each in group) / len(group)
