"""AFT Tables 7 and 8: the paper's figures beside those of this machine."""

from typing import Any

import torch

from tools.benchmark.classifiers import classifier_candidate
from tools.benchmark.compare import Candidate, compare, require_figures
from tools.benchmark.models import create_classifier, has_fused_attention
from tools.benchmark.paper import TABLES, PaperRow

MATERIALISED = 'materialised attention'


def measure_table(
    number: int,
    batch_size: int,
    img_size: int | None,
    device: torch.device,
    dtype: str,
    rounds: int,
    compiled: bool = False,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Measure inference of the models of a table, those of one size interleaved.

    Args:
        number: Key of TABLES.
        img_size: Side in pixels; None is the table's.
        dtype: Key of PRECISIONS.

    Returns:
        The rows of the table, and one more for each DeiT, with materialised attention. `paper` has the printed figures
        or None, `measured` ours or None: `parameters`, `images_per_second`, its median `ratio` to the DeiT of the same
        size with `ratio_quartiles`, `peak_memory_bytes` beyond weights and images, `memory_ratio`, and `compiled`, what
        `time_compiled` gives with `images_per_second`, or None.
    """
    table = TABLES[number]
    size = img_size or table.img_size
    printed = {row.name: row for row in table.rows}
    measured: dict[tuple[str | None, bool], dict[str, Any]] = {}
    for baseline in dict.fromkeys(row.baseline for row in table.rows):
        names = [row.model for row in table.rows if row.baseline == baseline and row.model]
        names.sort(key=lambda name: name != printed[baseline].model)
        measured |= _measure_group(names, batch_size, size, device, dtype, rounds, compiled, progress)
    rows = []
    for row in table.rows:
        rows.append(_row(row.name, row, printed[row.baseline], measured.get((row.model, False))))
        if (row.model, True) in measured:
            rows.append(_row(f'{row.name}, {MATERIALISED}', None, row, measured[row.model, True]))
    return rows


def _measure_group(
    names: list[str],
    batch_size: int,
    img_size: int,
    device: torch.device,
    dtype: str,
    rounds: int,
    compiled: bool,
    progress: bool,
) -> dict[tuple[str | None, bool], dict[str, Any]]:
    # By model and whether its attention is materialised; the first is compared to.
    shape = (batch_size, 3, img_size, img_size)
    candidates: dict[tuple[str | None, bool], Candidate] = {}
    parameters: dict[str, int] = {}
    for name in dict.fromkeys(names):
        model = create_classifier(name, img_size, device)
        parameters[name] = sum(parameter.numel() for parameter in model.parameters())
        for written_out in (False, True) if has_fused_attention(model) else (False,):
            candidates[name, written_out] = classifier_candidate(name, shape, device, written_out)
    found = compare(
        list(candidates.values()), device, rounds, dtype=dtype, training=False, compiled=compiled, progress=progress
    )
    require_figures(found)
    return {
        (name, written_out): {
            'parameters': parameters[str(name)],
            'images_per_second': 1e3 * batch_size / row['eager']['milliseconds'],
            'ratio': row['eager']['ratio'],
            'ratio_quartiles': row['eager']['ratio_quartiles'],
            'peak_memory_bytes': row['eager']['peak_bytes'],
            'memory_ratio': row['eager']['peak_bytes'] / found[0]['eager']['peak_bytes'],
            'compiled': row['compiled'] and _compiled(row['compiled'], batch_size),
        }
        for (name, written_out), row in zip(candidates, found, strict=True)
    }


def _compiled(figures: dict[str, Any], batch_size: int) -> dict[str, Any]:
    return (
        figures if 'error' in figures else {**figures, 'images_per_second': 1e3 * batch_size / figures['milliseconds']}
    )


def _row(name: str, row: PaperRow | None, baseline: PaperRow, measured: dict[str, Any] | None) -> dict[str, Any]:
    printed = row and {
        'kernel': row.kernel,
        'heads': row.heads,
        'top1': row.top1,
        'parameters_millions': row.parameters,
        'images_per_second': row.images_per_second,
        'ratio': row.images_per_second / baseline.images_per_second,
        'memory_gb': row.memory_gb,
        'memory_ratio': row.memory_gb / baseline.memory_gb,
    }
    return {'name': name, 'model': row.model if row else baseline.model, 'paper': printed, 'measured': measured}


def format_table(number: int, rows: list[dict[str, Any]]) -> str:
    """The rows of a table as text: the paper's columns, then ours."""
    head = f'paper: {TABLES[number].measured_on}'
    left = f'{"":34} {"kernel":>6} {"heads":>5} {"top-1":>5} {"params":>6} {"img/s":>6} {"ratio":>5} {"GB":>5}'
    right = f'{"params":>11} {"img/s":>8} {"ratio":>5} {"quartiles":>12} {"MiB":>7} {"ratio":>5}'
    if any(row['measured'] and row['measured']['compiled'] for row in rows):
        right += ' | compiled img/s, ratio'
    lines = [f'{"":34} {head:49} | here', f'{left} {"ratio":>5} | {right}']
    return '\n'.join(
        lines + [f'{row["name"]:34} {_printed(row["paper"])} | {_measured(row["measured"])}' for row in rows]
    )


def _printed(row: dict[str, Any] | None) -> str:
    if row is None:
        return f'{"-":>6} {"-":>5} {"-":>5} {"-":>6} {"-":>6} {"-":>5} {"-":>5} {"-":>5}'
    return (
        f'{row["kernel"] or "-":>6} {row["heads"] or "-":>5} {row["top1"]:5.1f} {row["parameters_millions"]:5.1f}M '
        f'{row["images_per_second"]:6g} {row["ratio"]:5.2f} {row["memory_gb"]:5.1f} {row["memory_ratio"]:5.2f}'
    )


def _measured(row: dict[str, Any] | None) -> str:
    if row is None:
        return f'{"-":>11} {"-":>8} {"-":>5} {"-":>12} {"-":>7} {"-":>5}'
    low, high = row['ratio_quartiles']
    return (
        f'{row["parameters"]:11,} {row["images_per_second"]:8.1f} {row["ratio"]:5.2f} {f"{low:.2f} - {high:.2f}":>12} '
        f'{row["peak_memory_bytes"] / 2**20:7.1f} {row["memory_ratio"]:5.2f}{_format_compiled(row["compiled"])}'
    )


def _format_compiled(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return ''
    if 'error' in figures:
        return f' | failed: {figures["error"][:100]}'
    return f' | {figures["images_per_second"]:.1f}, ' + ('-' if figures['ratio'] is None else f'{figures["ratio"]:.2f}')
