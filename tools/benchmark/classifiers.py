"""Image classifiers of timm at several sizes, with DeiT small as the measure."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tools.benchmark.columns import format_comparison
from tools.benchmark.compare import PAPER_BASELINE, Candidate, Prepared, compare, too_large
from tools.benchmark.models import check_model, create_classifier
from tools.benchmark.times import describe_error
from tools.machine import autocast

BASELINE = 'deit_small_patch16_224'
# Of the baseline.
HEADS, DEPTH, PATCH = 6, 12, 16
MODELS = (
    'aft_conv_small',
    'aft_conv_small_k11_h16',
    'aft_full_small',
    'poolformer_s12',
    'convnext_tiny',
    'mambaout_tiny',
    'xcit_small_12_p16_224',
)
SIZES = ((224, 224), (384, 384), (512, 512), (1024, 1024))


def measure_classifiers(
    models: Sequence[str],
    sizes: Sequence[tuple[int, int]],
    batch_size: int,
    device: torch.device,
    dtype: str,
    rounds: int,
    *,
    training: bool = False,
    compiled: bool = False,
    most_bytes: float = math.inf,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Measure models and BASELINE on images of each size, those of one size interleaved.

    Args:
        models: Names; one with fused attention is not measured with materialised attention, but BASELINE is.
        sizes: (H, W) in pixels.
        dtype: Key of PRECISIONS.
        most_bytes: Materialised attention that takes more is refused.

    Returns:
        The rows of `compare` with `height`, `width` and, of the eager form, `images_per_second`; `refused`, where a
        model cannot take such images, or `failed`, with the reason. What is refused, or fails when it is first tried,
        has no direction and no figures.

    Raises:
        ValueError: timm has no model of that name.
    """
    for name in models:
        check_model(name)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        shape = (batch_size, 3, *size)
        candidates, left_out = _candidates(models, shape, device, dtype, DEPTH if training else 1, most_bytes)
        found: list[dict[str, Any]] = []
        if candidates:
            found = compare(
                candidates, device, rounds, dtype=dtype, training=training, compiled=compiled, progress=progress
            )
        found = [_rated(row, batch_size, BASELINE not in left_out) for row in found]
        found += [{'name': name, 'refused': None, 'failed': None, **why} for name, why in left_out.items()]
        rows += [{'height': size[0], 'width': size[1], **row} for row in found]
    return rows


def _rated(row: dict[str, Any], batch_size: int, has_baseline: bool) -> dict[str, Any]:
    # A row of `compare` with images/s, and without ratios where they are not to BASELINE.
    row = {**row, 'refused': None, 'failed': row['eager'].get('error')}
    if not row['failed']:
        row['eager'] |= {'images_per_second': 1e3 * batch_size / row['eager']['milliseconds']}
    for figures in (row['eager'], row['compiled'] or {}) if not has_baseline else ():
        figures.update(dict.fromkeys(figures.keys() & {'ratio', 'ratio_quartiles'}))
    return row


def _candidates(
    models: Sequence[str],
    shape: tuple[int, int, int, int],
    device: torch.device,
    dtype: str,
    layers: int,
    most_bytes: float,
) -> tuple[list[Candidate], dict[str, dict[str, str]]]:
    # BASELINE, as it is and written out, and the models; and what cannot be measured, with what `probe` says of it.
    found: list[Candidate] = []
    left_out: dict[str, dict[str, str]] = {}
    for name in dict.fromkeys([BASELINE, *models]):
        if why := probe(name, shape, device, dtype):
            left_out[name] = why
            continue
        found.append(classifier_candidate(name, shape, device))
        if name == BASELINE:
            written_out = classifier_candidate(name, shape, device, written_out=True)
            tokens = 1 + shape[2] // PATCH * (shape[3] // PATCH)
            if reason := too_large(shape[0], HEADS, tokens, layers, most_bytes):
                left_out[written_out.name] = {'refused': reason}
            else:
                found.append(written_out)
    return found, left_out


@torch.inference_mode()
def probe(name: str, shape: tuple[int, ...], device: torch.device, dtype: str = 'float32') -> dict[str, str]:
    """Try a model on images as they are measured, which tunes the kernels of a GPU for them.

    Args:
        shape: (B, 3, H, W).
        dtype: Key of PRECISIONS.

    Returns:
        `refused`, why it does not take such images; `failed`, what else went wrong; or nothing.
    """
    try:
        model = create_classifier(name, shape[2:], device)
        with autocast(device, dtype):
            model(torch.zeros(shape, device=device))
    except (ValueError, AssertionError) as error:
        return {'refused': describe_error(error)}
    # A lack of memory, or a bug: the others are measured all the same.
    except Exception as error:
        return {'failed': describe_error(error)}
    return {}


def classifier_candidate(
    name: str, shape: tuple[int, ...], device: torch.device, written_out: bool = False
) -> Candidate:
    """A model on images of a shape (B, 3, H, W): as it is deployed, or in training.

    Args:
        written_out: Its attention forms its weights, by timm's own code, which is what DeiT had.
    """

    def prepare(training: bool) -> Prepared:
        model = create_classifier(name, shape[2:], device, materialised=written_out, training=training)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)

        def forward() -> Tensor:
            return model(images)

        return Prepared(forward, [each for each in model.parameters() if training], [images, *model.buffers()])

    title = f'{name}, materialised, {PAPER_BASELINE}' if written_out else name
    return Candidate(title, prepare, compiles=not written_out)


def format_classifiers(rows: Sequence[dict[str, Any]]) -> str:
    """A block for each size."""
    lines = []
    for size in dict.fromkeys((row['height'], row['width']) for row in rows):
        own = [row for row in rows if (row['height'], row['width']) == size]
        lines.append(f'{size[0]} x {size[1]} px')
        if measured := [row for row in own if 'eager' in row]:
            lines.append(format_comparison(measured, indent='  '))
        for word in ('refused', 'failed'):
            lines += [f'  {row["name"]} {word}: {row[word]}' for row in own if row[word] and 'eager' not in row]
    return '\n'.join(lines)
