"""The sections of a report on a model: description, training, position biases, and predictions on photographs."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from aft_vision.data.class_names import class_labels, class_names, match_classes
from aft_vision.layers import aft_mixers
from aft_vision.sizes import default_size
from aft_vision.visualize.accuracy import (
    MAX_CLASSES,
    MIN_IMAGES,
    by_class,
    draw_classes,
    draw_examples,
    predict_labelled,
)
from aft_vision.visualize.attention import (
    attention_heads,
    draw_attention,
    draw_relative_attention,
    relative_attention,
)
from aft_vision.visualize.biases import bias_statistics, draw_position_biases
from aft_vision.visualize.capture import capture_mixers, token_grid
from aft_vision.visualize.figure import evenly_spaced, figure_png
from aft_vision.visualize.history import draw_history
from aft_vision.visualize.keys import draw_key_maps
from aft_vision.visualize.page import definitions, paragraph, picture, table
from aft_vision.visualize.photographs import (
    SkippedImages,
    load_batches,
    load_photograph,
    predictions,
)


class Section(NamedTuple):
    """A section of the report: its title, and a function that returns its HTML."""

    title: str
    build: Callable[[], str]


@dataclass
class Report:
    """The parts of a report.

    Args:
        model: An AFT model in evaluation mode.
        photographs: Images to show with their keys, attention and predictions.
        averaged: Images for the average relative attention; if empty, it is left out.
        labelled: Images that accuracy is measured on; those whose folders are named after no class are left out.
        size: (H, W) of the images in pixels; None means the model's size.
        before: The same model before some change, such as regularisation; its position biases are on the left.
        vit: A ViT whose attention is shown next to the model's.
        history: Epochs of the training run, as `draw_history` takes them.
        targets: Words for the targets of the training loss, as `draw_history` takes them.
        facts: Further facts about the model, such as its accuracy.
        query: (row, column) of the token whose attention is drawn; None means the centre.
        max_heads: Number of heads to draw per layer.
        skipped: Receives images of `averaged` and `labelled` that cannot be decoded.
    """

    model: nn.Module
    photographs: Sequence[Path]
    averaged: Sequence[Path] = ()
    labelled: Sequence[Path] = ()
    size: tuple[int, int] | None = None
    before: nn.Module | None = None
    vit: nn.Module | None = None
    history: Sequence[Mapping[str, float]] = ()
    targets: str = ''
    facts: Mapping[str, str] = field(default_factory=dict)
    query: tuple[int, int] | None = None
    max_heads: int = 16
    skipped: SkippedImages = field(default_factory=SkippedImages)

    @property
    def name(self) -> str:
        """Return the architecture of the model."""
        return _name(self.model)


def report_sections(report: Report) -> list[Section]:
    """Return the sections of a page; each is built when its function is called.

    Raises:
        ValueError: the model has no AFT mixer.
    """
    if not aft_mixers(report.model):
        raise ValueError(f'expected an AFT model, got {type(report.model).__name__}, which has no AFT mixer')
    sections = [Section('Model', partial(_model_section, report))]
    if report.history:
        sections.append(Section('Training', partial(_training_section, report)))
    folders = sorted({path.parent.name for path in report.labelled})
    if any(place is not None for place in match_classes(class_labels(report.model), folders)):
        sections.append(Section('Accuracy', partial(_accuracy_section, report)))
    if any(mixer.evaluated_bias() is not None for mixer in aft_mixers(report.model)):
        sections.append(Section('Position biases', partial(_bias_section, report)))
    if report.averaged:
        sections.append(Section('Average relative attention', partial(_relative_section, report)))
    for path in report.photographs:
        title = f'{_truth(report.model, path) or path.parent.name}/{path.name}'
        sections.append(Section(title, partial(_photograph_section, report, path)))
    return sections


def model_facts(model: Any, size: tuple[int, int] | None = None) -> dict[str, str]:
    """Describe an AFT model: its size, its mixer and its input of (H, W) pixels, by default its own size."""
    mixers = aft_mixers(model)
    bias = mixers[0].evaluated_bias()
    height, width = size or default_size(model)
    grid = token_grid(model, (height, width))
    facts = {
        'Architecture': _name(model),
        'Parameters': f'{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million',
        'Mixer': type(mixers[0]).__name__.replace('AFT', 'AFT-').lower().replace('aft', 'AFT'),
        'Layers': str(len(mixers)),
    }
    if bias is not None and len(bias) > 1:
        facts['Kernel'] = f'{bias.shape[1]} \u00d7 {bias.shape[2]} tokens'
        facts['Heads'] = str(len(bias))
    facts['Input'] = f'{height} \u00d7 {width} pixels, {grid[0]} \u00d7 {grid[1]} tokens'
    facts['Classes'] = str(model.num_classes)
    return facts


def _model_section(report: Report) -> str:
    return definitions({**model_facts(report.model, report.size), **report.facts})


def _training_section(report: Report) -> str:
    last = report.history[-1]
    alt = f'Curves of loss, accuracy and learning rate over {int(last["epoch"]) + 1} epochs'
    return picture(figure_png(draw_history(report.history, report.targets)), alt)


def _accuracy_section(report: Report) -> str:
    names = class_names(report.model)
    answers = predict_labelled(report.model, report.labelled, report.size, report.skipped)
    if not answers:
        return paragraph(f'{report.skipped.describe()}.')
    right = sum(each.is_right for each in answers)
    share = right / len(answers)
    error = math.sqrt(share * (1 - share) / len(answers))
    height, width = report.size or default_size(report.model)
    classes = by_class(answers, names)
    images = Counter(each.truth for each in answers)
    count = sum(number >= MIN_IMAGES for number in images.values())
    parts = [
        paragraph(
            f'Top-1 {100 * share:.1f}% with a standard error of {100 * error:.1f}, on {len(answers)} images whose '
            f'folders are named after classes. The model sees all at {height} \u00d7 {width} pixels. '
            'Points in the picture have intervals of 95 % (Wilson), and the number of images is in brackets. '
            f'{len(images) - count} of {len(images)} classes, which have fewer than {MIN_IMAGES} images, are left out.'
            + (f' {report.skipped.describe()}.' if report.skipped.paths else '')
        )
    ]
    by = f'class: the {MAX_CLASSES} lowest and highest of {count}' if len(classes) == MAX_CLASSES < count else 'class'
    if len(classes) > 1:
        alt = f'Top-1 by {by}, with intervals of 95 %: {len(classes)} classes'
        parts.append(picture(figure_png(draw_classes(classes, by, share)), alt))
    alt = f'Right predictions above, wrong ones below, with the class of each image, of {len(answers)} images'
    caption = 'Evenly spaced over the right answers (above) and the wrong ones (below); percent is the probability.'
    parts.append(picture(figure_png(draw_examples(answers, names, report.model, size=report.size)), alt, caption))
    return ''.join(parts)


def _decimals(value: float) -> str:
    return 'none' if math.isnan(value) else f'{value:.3f}'


def _bias_section(report: Report) -> str:
    heads = report.max_heads if report.before is None else max(1, report.max_heads // 2)
    figure = draw_position_biases(report.model, heads, before=report.before)
    models = [('', report.model)] if report.before is None else [('before: ', report.before), ('', report.model)]
    columns, statistics = ['layer'], []
    for title, model in models:
        columns += [f'{title}{name}' for name in ('entropy', 'share below 0.1', 'largest')]
        statistics.append(bias_statistics(model))
    rows = []
    for layer in zip(*statistics, strict=True):
        cells = [
            text
            for row in layer
            for text in (_decimals(row['entropy']), f'{100 * row["unbiased"]:.1f}%', f'{row["largest"]:.2f}')
        ]
        rows.append([str(layer[-1]['layer']), *cells])
    uniform = statistics[-1][0]['uniform']
    legend = paragraph(
        f'Entropy is that of softmax(w) in nats, the mean over heads (AFT Eq. 9); equal biases have {uniform:.3f}. '
        'Share below 0.1 counts the biases with |exp(w)\u00a0-\u00a01| < 0.1; largest is the largest '
        '|exp(w)\u00a0-\u00a01|.'
    )
    is_centred = aft_mixers(report.model)[0].on_grid
    words = paragraph(
        'A position bias w multiplies the weight of a source by exp(w), independent of the image.'
        + ' The centre of a picture is the token itself.' * is_centred
    )
    alt = f'Position biases of {len(rows)} layers: a picture of exp(w) - 1 for each layer and head drawn'
    return words + picture(figure_png(figure), alt) + legend + table('Sparsity of the position biases', columns, rows)


def _relative_section(report: Report) -> str:
    maps: dict[str, Tensor] = {}
    heads: dict[str, list[int]] = {}
    # All together are as wide as the other pictures.
    left = report.max_heads
    for model, size in ((report.vit, None), (report.model, report.size)):
        if model is not None:
            name = _name(model) if _name(model) not in maps else f'{_name(model)} (this one)'
            heads[name] = evenly_spaced(attention_heads(model), max(1, left if model is report.model else left // 2))
            maps[name] = relative_attention(
                model, load_batches(report.averaged, model, size, report.skipped), heads[name]
            )
            left -= len(heads[name])
    words = paragraph(
        f'Mean over {len(report.skipped.kept(report.averaged))} images and all query positions. The implicit '
        'attention of AFT is softmax(key + position bias) over the sources (AFT Eq. 3). Class and register tokens are '
        'left out.'
    )
    alt = f'Average attention by the offset from query to key, for each layer and head drawn, of {" and ".join(maps)}'
    return words + picture(figure_png(draw_relative_attention(maps, heads)), alt)


def _photograph_section(report: Report, path: Path) -> str:
    photograph = load_photograph(path, report.model, report.size)
    logits, layers = capture_mixers(report.model, photograph.images.to(next(report.model.parameters()).device))
    top = predictions(report.model, logits)
    height, width = layers[0].grid
    query = report.query or (height // 2, width // 2)
    keys = draw_key_maps(photograph, layers, max_heads=report.max_heads)
    weights = draw_attention(photograph, report.model, query, max_heads=report.max_heads)
    place = f'row {query[0] + 1}, column {query[1] + 1}'
    truth = _truth(report.model, path)
    return (
        table(
            f'Prediction, truth: {truth}' if truth else 'Prediction',
            ['class', 'probability'],
            [[name, f'{100 * chance:.1f}%'] for name, chance in top],
        )
        + picture(figure_png(keys), f'{path.name}, and below it the keys of each layer and head drawn')
        + picture(
            figure_png(weights),
            f'{path.name}, and below it the weights that the token at {place} gives the others, by layer and head',
            f'The framed token is at {place} of {height} \u00d7 {width}. Class: {truth or "unknown"}, '
            f'prediction: {top[0][0]}.',
        )
    )


def _truth(model: nn.Module, path: Path) -> str | None:
    """Return the name of the class that the folder of a photograph is named after, or None."""
    (place,) = match_classes(class_labels(model), [path.parent.name])
    return None if place is None else class_names(model)[place]


def _name(model: Any) -> str:
    return model.pretrained_cfg.get('architecture') or type(model).__name__
