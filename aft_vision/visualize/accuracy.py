"""Accuracy on labelled photographs: by class, confusions, and some right and wrong answers."""

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aft_vision.data.class_names import class_labels, match_classes
from aft_vision.data.images import Decoding
from aft_vision.visualize.figure import literal, new_figure
from aft_vision.visualize.photographs import SkippedImages, load_batches, load_photograph

# Classes of a picture.
MAX_CLASSES = 40
# The quantile of a two-sided interval of 95 %.
NORMAL = 1.96


class LabelledPrediction(NamedTuple):
    """A photograph whose class is known, and what a model takes it for.

    Attributes:
        truth, prediction: Indices of classes.
        probability: Share that the model gives its prediction, in [0, 1].
        truth_probability: Share that it gives the truth, in [0, 1].
    """

    path: Path
    truth: int
    prediction: int
    probability: float
    truth_probability: float

    @property
    def is_right(self) -> bool:
        """Return whether the prediction is the truth."""
        return self.truth == self.prediction


def label_photographs(model: Any, paths: Sequence[Path], folder: Path | None = None) -> list[int | None]:
    """Return for each photograph the class that its outermost matching folder is named after, or None.

    Args:
        folder: A folder of all of them, above which no folder counts, and which may itself be named after a class;
            None for the parent of each.
    """
    labels, classes = class_labels(model), list[int | None]([None] * len(paths))
    folders = [
        (*path.relative_to(folder or path.parent).parts[:-1], (folder or path.parent).resolve().name) for path in paths
    ]
    # Folders of one level together, because the number of names tells equal words of two classes apart.
    for level in zip_longest(*folders):
        names = sorted({name for name, index in zip(level, classes, strict=True) if name and index is None})
        index_of = dict(zip(names, match_classes(labels, names), strict=True))
        classes = [index_of.get(name) if index is None else index for name, index in zip(level, classes, strict=True)]
    return classes


@torch.no_grad()
def predict_labelled(
    model: Any,
    truths: Mapping[Path, int | None],
    size: tuple[int, int] | None = None,
    skipped: SkippedImages | None = None,
    decoding: Decoding | None = None,
) -> list[LabelledPrediction]:
    """Classify photographs whose class is known, and leave out the others.

    Args:
        truths: Class of each photograph or None, as from `label_photographs`.
        size: (H, W) in pixels that the model sees; None is its own.
        skipped: Receives images that cannot be decoded; None makes them errors.
        decoding: Options of reading the files; None for the default ones.
    """
    known = {path: truth for path, truth in truths.items() if truth is not None}
    labelled = list(known)
    logits = [model(batch) for batch in load_batches(labelled, model, size, skipped, decoding)]
    if not logits:
        return []
    shares = torch.cat(logits).float().softmax(1).cpu()
    labelled = labelled if skipped is None else skipped.kept(labelled)
    classes = torch.tensor([known[path] for path in labelled])
    (probability, prediction), of_truth = shares.max(1), shares.gather(1, classes[:, None])[:, 0]
    columns = (classes, prediction, probability, of_truth)
    return [LabelledPrediction(*each) for each in zip(labelled, *(column.tolist() for column in columns), strict=True)]


def interval(right: int, count: int) -> tuple[float, float]:
    """Return the Wilson interval of 95 % of a share, of `right` of `count`, in [0, 1]."""
    share, spread = right / count, NORMAL**2 / count
    centre = (share + spread / 2) / (1 + spread)
    half = NORMAL / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def by_class(answers: Sequence[LabelledPrediction]) -> dict[int, list[LabelledPrediction]]:
    """Return photographs by their class, the least accurate first."""
    groups: dict[int, list[LabelledPrediction]] = {}
    for each in answers:
        groups.setdefault(each.truth, []).append(each)
    return {truth: groups[truth] for truth in sorted(groups, key=lambda truth: (share_right(groups[truth]), truth))}


def class_rows(groups: Mapping[int, Sequence[LabelledPrediction]], names: Sequence[str]) -> list[list[str]]:
    """Return a row of text for each class: name, images, accuracy, its interval, precision and commonest confusion.

    Args:
        groups: From `by_class`.
    """
    predicted = Counter(each.prediction for group in groups.values() for each in group)
    rows = []
    for truth, group in groups.items():
        right = sum(each.is_right for each in group)
        low, high = interval(right, len(group))
        wrong = Counter(names[each.prediction] for each in group if not each.is_right)
        confused = ', '.join(f'{name} ({count})' for name, count in wrong.most_common(1))
        precision = f'{100 * right / predicted[truth]:.1f}%' if predicted[truth] else 'never predicted'
        cells = (str(len(group)), f'{100 * right / len(group):.1f}%', f'{100 * low:.1f} to {100 * high:.1f}%')
        rows.append([names[truth], *cells, precision, confused])
    return rows


def confused_classes(answers: Sequence[LabelledPrediction], at_most: int = MAX_CLASSES) -> list[int]:
    """Return the classes of photographs and predictions in their order; of many, those that are most often confused."""
    wrong = Counter((each.truth, each.prediction) for each in answers if not each.is_right)
    confused = [index for pair, _ in wrong.most_common() for index in pair]
    return sorted([*dict.fromkeys([*confused, *(each.truth for each in answers)])][:at_most])


def draw_confusions(answers: Sequence[LabelledPrediction], names: Sequence[str], classes: Sequence[int]) -> Any:
    """Draw the confusion matrix: photographs of each class by prediction, in colours of their share in the class.

    Args:
        classes: Classes of the rows and columns; all others are left out.

    Returns:
        A matplotlib Figure.
    """
    counts, images = Counter((each.truth, each.prediction) for each in answers), Counter(each.truth for each in answers)
    shares = torch.tensor([[counts[t, p] / max(images[t], 1) for p in classes] for t in classes])
    # With space for the names.
    side = 2.2 + 0.36 * len(classes)
    figure = new_figure(side, side)
    axes = figure.subplots()
    axes.imshow(shares.numpy(), cmap='Blues', vmin=0, vmax=1)
    for row, truth in enumerate(classes):
        for column, prediction in enumerate(classes):
            if count := counts[truth, prediction]:
                color = 'white' if shares[row, column] > 0.5 else 'black'
                axes.text(column, row, str(count), ha='center', va='center', color=color, fontsize=8)
    shown = [names[index] for index in classes]
    labels = [literal(name if len(name) <= 30 else f'{name[:29]}…') for name in shown]
    axes.set_xticks(range(len(classes)), labels, rotation=90, fontsize=9)
    axes.set_yticks(range(len(classes)), labels, fontsize=9)
    axes.set(xlabel='prediction', ylabel='class')
    # Frames of the cells.
    axes.set_xticks([index + 0.5 for index in range(len(classes) - 1)], minor=True)
    axes.set_yticks([index + 0.5 for index in range(len(classes) - 1)], minor=True)
    axes.grid(which='minor', color='0.9')
    axes.tick_params(which='minor', length=0)
    return figure


def draw_examples(
    rows: Sequence[Sequence[LabelledPrediction]],
    names: Sequence[str],
    model: Any,
    columns: int = 6,
    size: tuple[int, int] | None = None,
    decoding: Decoding | None = None,
) -> Any:
    """Draw rows of photographs with their class above and the prediction below, green if right and red if wrong.

    Args:
        rows: At least one photograph in each.
        columns: Photographs of a row, at most.
        size, decoding: As in `predict_labelled`.

    Returns:
        A matplotlib Figure.
    """
    figure = new_figure(1.8 * columns, 2.6 * len(rows))
    for row, panels in zip(rows, figure.subplots(len(rows), columns, squeeze=False), strict=True):
        for axes in panels:
            axes.set_axis_off()
        for axes, each in zip(panels, row, strict=False):
            axes.imshow(load_photograph(each.path, model, size, decoding).pixels.numpy())
            style: dict[str, Any] = dict(fontsize=9, parse_math=False)
            share = '' if each.is_right else f' ({100 * each.truth_probability:.0f}%)'
            axes.set_title(textwrap.fill(f'truth{share}: {names[each.truth]}', 24), **style)
            words = f'prediction ({100 * each.probability:.0f}%):\n{textwrap.fill(names[each.prediction], 24)}'
            style |= dict(ha='center', va='top', color='C2' if each.is_right else 'C3')
            axes.text(0.5, -0.04, words, transform=axes.transAxes, **style)
    return figure


def share_right(group: Sequence[LabelledPrediction]) -> float:
    """Return the share of right answers, in [0, 1]."""
    return sum(each.is_right for each in group) / len(group)
