"""Image classifiers of timm at several sizes, with DeiT small as the measure."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tools.benchmark.compare import (
    PAPER_BASELINE,
    Candidate,
    Prepared,
    compare,
    describe_error,
    format_comparison,
    too_large,
)
from tools.benchmark.models import check_model, create_classifier
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
        The rows of `compare` with `height`, `width`, `images_per_second` of the eager form and `parameters`; `refused`
        in place of all figures where a model cannot take such images.

    Raises:
        ValueError: timm has no model of that name.
    """
    for name in models:
        check_model(name)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        shape, place = (batch_size, 3, *size), {'height': size[0], 'width': size[1]}
        reasons = {name: refusal(name, size, device) for name in dict.fromkeys([BASELINE, *models])}
        candidates = [classifier_candidate(name, shape, device) for name, reason in reasons.items() if not reason]
        if not reasons[BASELINE]:
            written_out = classifier_candidate(BASELINE, shape, device, written_out=True)
            tokens, layers = 1 + size[0] // PATCH * (size[1] // PATCH), DEPTH if training else 1
            reasons[written_out.name] = too_large(batch_size, HEADS, tokens, layers, most_bytes)
            if not reasons[written_out.name]:
                candidates.insert(1, written_out)
        with autocast(device, dtype):
            for row in (
                compare(candidates, device, rounds, training=training, compiled=compiled, progress=progress)
                if candidates
                else []
            ):
                row['eager']['images_per_second'] = 1e3 * batch_size / row['eager']['milliseconds']
                if reasons[BASELINE]:
                    row['eager'] |= {'ratio': None, 'ratio_quartiles': None}
                rows.append({**place, **row, 'refused': None})
        rows += [{**place, 'name': name, 'refused': reason} for name, reason in reasons.items() if reason]
    return rows


@torch.inference_mode()
def refusal(name: str, size: tuple[int, int], device: torch.device) -> str | None:
    """Why a model cannot take images of a size, or None where it can."""
    try:
        create_classifier(name, size, device)(torch.zeros(1, 3, *size, device=device))
    except (ValueError, AssertionError, RuntimeError) as error:
        return describe_error(error)
    return None


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

        return Prepared(forward, [each for each in model.parameters() if training])

    title = f'{name}, materialised, {PAPER_BASELINE}' if written_out else name
    return Candidate(title, prepare, compiles=not written_out)


def format_classifiers(rows: Sequence[dict[str, Any]]) -> str:
    """A block for each size."""
    lines = []
    for size in dict.fromkeys((row['height'], row['width']) for row in rows):
        own = [row for row in rows if (row['height'], row['width']) == size]
        lines.append(f'{size[0]} x {size[1]} px')
        if measured := [row for row in own if not row['refused']]:
            lines.append(format_comparison(measured, indent='  '))
        lines += [f'  {row["name"]} refused: {row["refused"]}' for row in own if row['refused']]
    return '\n'.join(lines)
