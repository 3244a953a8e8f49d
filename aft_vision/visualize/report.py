"""The sections of a report on a model: accuracy, training, photographs, and the mixers of an AFT model."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from torch import Tensor, nn

from aft_vision.data.class_names import class_names, list_names
from aft_vision.data.images import Decoding
from aft_vision.layers import AFTMixer, token_mixers
from aft_vision.sizes import default_size
from aft_vision.visualize.accuracy import (
    LabelledPrediction,
    by_class,
    class_rows,
    confused_classes,
    draw_confusions,
    draw_examples,
    interval,
    label_photographs,
    predict_labelled,
    share_right,
)
from aft_vision.visualize.attention import (
    attention_heads,
    draw_attention,
    draw_key_maps,
    draw_relative_attention,
    relative_attention,
)
from aft_vision.visualize.biases import bias_statistics, draw_position_biases
from aft_vision.visualize.capture import MixerInputs, capture_mixers, has_keys, has_token_grid, token_grid
from aft_vision.visualize.figure import evenly_spaced, figure_png
from aft_vision.visualize.history import draw_history
from aft_vision.visualize.page import definitions, paragraph, picture, table
from aft_vision.visualize.photographs import (
    Photograph,
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
        model: A classifier in evaluation mode. Only an AFT model with one grid of tokens has pictures of
            position biases, keys and attention.
        photographs: Images to show with their keys, attention and predictions.
        averaged: Images for the average relative attention; if empty, it is left out.
        labelled: Images that accuracy is measured on; those whose folders are named after no class are left out.
        folder: The folder of all images, as `label_photographs` takes it.
        decoding: Options of reading the images; None for the default ones.
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
    folder: Path | None = None
    decoding: Decoding | None = None
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

    @cached_property
    def truths(self) -> dict[Path, int | None]:
        """Return the class of each image of `labelled` and `photographs`, which depends on the folders of all."""
        paths = [*dict.fromkeys([*self.labelled, *self.photographs])]
        return dict(zip(paths, label_photographs(self.model, paths, self.folder), strict=True))

    @cached_property
    def answers(self) -> list[LabelledPrediction]:
        """Return the predictions on the labelled images."""
        truths = {path: self.truths[path] for path in self.labelled}
        return predict_labelled(self.model, truths, self.size, self.skipped, self.decoding)


def report_sections(report: Report) -> list[Section]:
    """Return the sections of a page; each is built when its function is called."""
    sections = []
    if any(report.truths[path] is not None for path in report.labelled):
        for title, build in (
            ('Accuracy', _accuracy_section),
            ('Confusions', _confusion_section),
            ('Worst photographs', _worst_section),
        ):
            sections.append(Section(title, partial(_if_answered, build, report)))
    if report.history:
        sections.append(Section('Training', partial(_training_section, report)))
    sections.append(Section('Model', partial(_model_section, report)))
    for path in report.photographs:
        title = f'{_truth(report, path) or path.parent.name}/{path.name}'
        sections.append(Section(title, partial(_photograph_section, report, path)))
    biases = (mixer.evaluated_bias() for mixer in token_mixers(report.model))
    if has_token_grid(report.model) and any(bias is not None for bias in biases):
        sections.append(Section('Position biases', partial(_bias_section, report)))
    if has_keys(report.model) and report.averaged:
        sections.append(Section('Average relative attention', partial(_relative_section, report)))
    return sections


def model_facts(model: Any, size: tuple[int, int] | None = None) -> dict[str, str]:
    """Describe a model: its size, its mixers and its input of (H, W) pixels, by default its own size."""
    mixers = token_mixers(model)
    bias = mixers[0].evaluated_bias() if mixers else None
    height, width = size or default_size(model)
    facts = {
        'Architecture': _name(model),
        'Parameters': f'{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million',
    }
    if mixers:
        facts['Mixer'] = f'AFT-{mixers[0].name}' if isinstance(mixers[0], AFTMixer) else mixers[0].name
        facts['Layers'] = str(len(mixers))
    if bias is not None and len(bias) > 1:
        facts['Kernel'] = f'{bias.shape[1]} \u00d7 {bias.shape[2]} tokens'
        facts['Heads'] = str(len(bias))
    facts['Input'] = f'{height} \u00d7 {width} pixels'
    if has_token_grid(model):
        rows, columns = token_grid(model, (height, width))
        facts['Input'] += f', {rows} \u00d7 {columns} tokens'
    facts['Classes'] = str(model.num_classes)
    return facts


def _model_section(report: Report) -> str:
    return definitions({**model_facts(report.model, report.size), **report.facts})


def _training_section(report: Report) -> str:
    last = report.history[-1]
    alt = f'Curves of loss, accuracy and learning rate over {int(last["epoch"]) + 1} epochs'
    return picture(figure_png(draw_history(report.history, report.targets)), alt)


def _if_answered(build: Callable[[Report], str], report: Report) -> str:
    """Build a section about the predictions, or say that no labelled image can be decoded."""
    return build(report) if report.answers else paragraph(f'{report.skipped.describe()}.')


def _accuracy_section(report: Report) -> str:
    names, answers = class_names(report.model), report.answers
    share, classes = share_right(answers), by_class(answers)
    low, high = interval(sum(each.is_right for each in answers), len(answers))
    mean = sum(map(share_right, classes.values())) / len(classes)
    height, width = report.size or default_size(report.model)
    unseen = [name for index, name in enumerate(names) if index not in classes]
    words = paragraph(
        f'Top-1 {100 * share:.1f}% ({100 * low:.1f} to {100 * high:.1f}%), the mean over classes '
        f'{100 * mean:.1f}%, on {len(answers)} images whose folders are named after classes. The model sees all at '
        f'{height} \u00d7 {width} pixels. Intervals are those of 95 % (Wilson).'
        + (f' {len(unseen)} of {len(names)} classes have no image here: {list_names(unseen, 10)}.' if unseen else '')
        + (f' {report.skipped.describe()}.' if report.skipped.paths else '')
    )
    columns = ['class', 'images', 'top-1', 'interval', 'precision', 'mostly taken for']
    caption = 'Lowest first. Precision is the share of right answers among all predictions of the class.'
    return words + table(caption, columns, class_rows(classes, names)) + _examples(report)


def _examples(report: Report, columns: int = 6) -> str:
    """Draw some right answers, and below them some wrong ones."""
    rows = []
    for is_right in (True, False):
        group = [each for each in report.answers if each.is_right == is_right]
        if group:
            rows.append([group[index] for index in evenly_spaced(len(group), columns)])
    alt = f'Right and wrong predictions, with the class of each image, of {len(report.answers)} images'
    caption = 'Evenly spaced over the right answers (green) and the wrong ones (red); percent is the probability.'
    return picture(_answers_png(report, rows), alt, caption)


def _answers_png(report: Report, rows: Sequence[Sequence[LabelledPrediction]]) -> bytes:
    names = class_names(report.model)
    return figure_png(draw_examples(rows, names, report.model, size=report.size, decoding=report.decoding))


def _confusion_section(report: Report) -> str:
    answers = report.answers
    drawn = confused_classes(answers)
    count = len({index for each in answers for index in (each.truth, each.prediction)})
    some = f' Of {count} classes the {len(drawn)} most often confused are drawn.' if len(drawn) < count else ''
    alt = f'Confusion matrix of {len(drawn)} classes: images of each class by their prediction'
    words = paragraph(
        f'Images of the class of a row that are taken for that of a column; colours are shares of the row.{some}'
    )
    return words + picture(figure_png(draw_confusions(answers, class_names(report.model), drawn)), alt)


def _worst_section(report: Report, count: int = 12, columns: int = 6) -> str:
    names = class_names(report.model)
    worst = sorted(report.answers, key=lambda each: each.truth_probability)[:count]
    rows = [worst[start : start + columns] for start in range(0, len(worst), columns)]
    words = paragraph(
        'The images whose class the model gives the least probability: rare views, or folders and labels to check.'
    )
    alt = f'The {len(worst)} images with the largest loss, with their class and prediction'
    cells = [
        [
            str(each.path.relative_to(report.folder) if report.folder else each.path),
            f'{names[each.truth]} ({100 * each.truth_probability:.1f}%)',
            f'{names[each.prediction]} ({100 * each.probability:.1f}%)',
        ]
        for each in worst
    ]
    listed = table('In the order of the pictures', ['image', 'class', 'prediction'], cells)
    return words + picture(_answers_png(report, rows), alt) + listed


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
            for text in (
                f'{row["entropy"]:.3f}'.replace('nan', 'none'),
                f'{100 * row["unbiased"]:.1f}%',
                f'{row["largest"]:.2f}',
            )
        ]
        rows.append([str(layer[-1]['layer']), *cells])
    uniform = statistics[-1][0]['uniform']
    legend = paragraph(
        f'Entropy is that of softmax(w) in nats, the mean over heads (AFT Eq. 9); equal biases have {uniform:.3f}. '
        'Share below 0.1 counts the biases with |exp(w)\u00a0-\u00a01| < 0.1; largest is the largest '
        '|exp(w)\u00a0-\u00a01|.'
    )
    is_centred = token_mixers(report.model)[0].on_grid
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
                model, load_batches(report.averaged, model, size, report.skipped, report.decoding), heads[name]
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
    photograph = load_photograph(path, report.model, report.size, report.decoding)
    images, truth = photograph.images.to(next(report.model.parameters()).device), _truth(report, path)
    if has_keys(report.model):
        logits, layers = capture_mixers(report.model, images)
    else:
        logits, layers = report.model(images), []
    top = predictions(report.model, logits)
    answer = table(
        f'Prediction, truth: {truth}' if truth else 'Prediction',
        ['class', 'probability'],
        [[name, f'{100 * chance:.1f}%'] for name, chance in top],
    )
    said = f'Class: {truth or "unknown"}, prediction: {top[0][0]}.'
    return answer + _photograph_pictures(report, photograph, layers, said)


def _photograph_pictures(report: Report, photograph: Photograph, layers: Sequence[MixerInputs], said: str) -> str:
    """Draw the keys and the attention of a photograph; for a model without mixers the photograph."""
    name = photograph.path.name
    if not layers:
        file = io.BytesIO()
        Image.fromarray(photograph.pixels.numpy()).save(file, 'png')
        return picture(file.getvalue(), f'{name}, as the model sees it', said)
    height, width = layers[0].grid
    query = report.query or (height // 2, width // 2)
    position = f'row {query[0] + 1}, column {query[1] + 1}'
    keys = draw_key_maps(photograph, layers, max_heads=report.max_heads)
    weights = draw_attention(photograph, report.model, query, max_heads=report.max_heads)
    return picture(figure_png(keys), f'{name}, and below it the keys of each layer and head drawn') + picture(
        figure_png(weights),
        f'{name}, and below it the weights that the token at {position} gives the others, by layer and head',
        f'The framed token is at {position} of {height} \u00d7 {width}. {said}',
    )


def _truth(report: Report, path: Path) -> str | None:
    """Return the name of the class that a folder of a photograph is named after, or None."""
    index = report.truths[path]
    return None if index is None else class_names(report.model)[index]


def _name(model: Any) -> str:
    return model.pretrained_cfg.get('architecture') or type(model).__name__
