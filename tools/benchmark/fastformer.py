"""Fastformer and the encoders it is compared with against the number of tokens (Fastformer Fig. 2)."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aft_vision.visualize import new_figure
from tools.benchmark.compare import DIRECTIONS
from tools.benchmark.curves import draw_curves, fit_scaling, format_scaling
from tools.benchmark.scaling import Limit, Shape, ascending_lengths, measure_until
from tools.benchmark.times import Call
from tools.machine import autocast

BASELINE = 'transformer'
MATERIALISED = 'transformer materialised'
# MIND's topics.
LABELS = 18
# Before the first length a part of its batch tells what the whole could take.
PROBE = 16
QUANTITIES = {'milliseconds': 'time of a text (ms)', 'peak_bytes': 'peak memory of a text (MiB)'}
WORDS = {'forward': 'forward', 'training': 'forward and backward'}


class Size(NamedTuple):
    """Of the encoders; the paper's unless said."""

    dim: int = 256
    heads: int = 16
    depth: int = 2


def measure_fastformer(
    tokens: Sequence[int],
    total_tokens: int,
    limit: Limit,
    device: torch.device,
    dtype: str,
    rounds: int,
    *,
    models: Sequence[str] | None = None,
    size: Size | None = None,
    progress: bool = False,
) -> dict[str, list[dict[str, Any]]]:
    """Measure the classifier of MIND with every encoder at lengths, ascending, those of one length interleaved.

    Args:
        tokens: Lengths T.
        total_tokens: In a batch; it has at least one text.
        limit: Of a call, which takes the whole batch.
        dtype: Key of PRECISIONS.
        models: Names of `encoder_names`; None is all.

    Returns:
        `rows`, `fits` and `stops` as of `measure_until` and `fit_scaling`, each with its `direction` of DIRECTIONS.
        Time and memory are of one text: those of the batch are `batch_milliseconds` and `batch_peak_bytes`.

    Raises:
        ValueError: there are fewer than two lengths, or an option is out of its range.
        ImportError: transformers is not installed.
    """
    known = encoder_names()
    chosen = [name for name in known if models is None or name in models]
    if models is not None and set(models) - set(known):
        raise ValueError(f'expected names among {known}, got {list(models)}')
    if total_tokens < 1:
        raise ValueError(f'expected at least 1 token in a batch, got {total_tokens}')
    shapes = [Shape(max(1, total_tokens // length), length) for length in ascending_lengths(tokens)]
    few = Shape(max(1, shapes[0].batch // PROBE), shapes[0].tokens)
    probes = [] if few in shapes else [few]
    found: dict[str, list[dict[str, Any]]] = {'rows': [], 'fits': [], 'stops': []}
    for direction in DIRECTIONS:
        prepare = _preparer(size or Size(), direction == 'training', device, dtype)
        with torch.set_grad_enabled(direction == 'training'):
            rows, stops = measure_until(chosen, [*probes, *shapes], prepare, limit, device, rounds, progress=progress)
        own = [_of_a_text(row) for row in rows if Shape(row['batch_size'], row['tokens']) not in probes]
        for key, value in {'rows': own, 'fits': fit_scaling(own), 'stops': stops}.items():
            found[key] += [{'direction': direction, **each} for each in value]
    return found


def encoder_names() -> list[str]:
    """The fused Transformer, which is compared to, the materialised one, and the others of `encoder_mixer`."""
    names = list(_fastformer().ENCODERS)
    return [BASELINE, MATERIALISED, *(name for name in names if name != BASELINE)]


def create_classifier(name: str, tokens: int, size: Size) -> nn.Module:
    """The classifier of MIND with an encoder, for texts of so many tokens; its table of words is not used."""
    library = _fastformer()
    config = library.PRESETS['mind_topic'].create_config(
        encoder_mixer=BASELINE if name == MATERIALISED else name,
        attn_implementation='eager' if name == MATERIALISED else 'sdpa',
        hidden_size=size.dim,
        intermediate_size=size.dim,
        num_attention_heads=size.heads,
        num_hidden_layers=size.depth,
        max_position_embeddings=tokens,
        vocab_size=8,
        num_labels=LABELS,
    )
    return library.FastformerForSequenceClassification(config)


def format_fastformer(
    rows: Sequence[dict[str, Any]], fits: Sequence[dict[str, Any]], stops: Sequence[dict[str, Any]]
) -> str:
    """The tables of `format_scaling` for both directions."""
    parts = []
    for direction, words in WORDS.items():
        own = [_directed(each, direction) for each in (rows, fits, stops)]
        parts.append(f'{words}\n{format_scaling(own[0], own[1], own[2], QUANTITIES)}')
    return '\n\n'.join(parts)


def plot_fastformer(rows: Sequence[dict[str, Any]], fits: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw time and memory over the tokens with logarithmic axes, for both directions.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(14, 11)
    for line, (direction, title) in zip(figure.subplots(2, len(QUANTITIES)), WORDS.items(), strict=True):
        for axes, (quantity, words) in zip(line, QUANTITIES.items(), strict=True):
            draw_curves(axes, _directed(rows, direction), _directed(fits, direction), quantity, words)
            axes.set_title(title)
    figure.savefig(path, dpi=150)


def _preparer(size: Size, training: bool, device: torch.device, dtype: str) -> Callable[[str, Shape], Call]:
    # The encoders of a shape share what they get.
    @lru_cache(maxsize=1)
    def inputs(shape: Shape, width: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        embeds = torch.randn(shape.batch, shape.tokens, width, generator=generator)
        return embeds.to(device), torch.randint(LABELS, (shape.batch,), generator=generator).to(device)

    def prepare(name: str, shape: Shape) -> Call:
        model: Any = create_classifier(name, shape.tokens, size).to(device).train(training)
        embeds, labels = inputs(shape, model.config.embedding_size)

        def run() -> Tensor:
            with autocast(device, dtype):
                return model(inputs_embeds=embeds, labels=labels).loss

        # The gradients of the weights are there before a call, and are added to.
        return (lambda: run().backward()) if training else run

    return prepare


def _of_a_text(row: dict[str, Any]) -> dict[str, Any]:
    whole = {key: row[key] for key in QUANTITIES}
    return {
        **row,
        **{key: value / row['batch_size'] for key, value in whole.items()},
        **{f'batch_{key}': value for key, value in whole.items()},
    }


def _directed(rows: Sequence[Mapping[str, Any]], direction: str) -> list[dict[str, Any]]:
    return [dict(row) for row in rows if row['direction'] == direction]


def _fastformer() -> Any:
    try:
        from aft_vision import fastformer
    except ImportError as error:
        raise ImportError(f"text encoders need transformers: pip install 'aft-vision[text]' ({error})") from error
    return fastformer
