"""AFT Tables 2, 4, 7 and 8: the paper's figures next to those of this machine."""

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from aft_vision.models import AFTDecoder, create_decoder
from tools.benchmark.compare import PAPER_BASELINE, Candidate, Prepared, compare, most_bytes, too_large, written_out
from tools.benchmark.models import attention_too_large, classifier, create, has_fused_attention, with_rate
from tools.benchmark.paper import TABLES, PaperRow
from tools.benchmark.printer import Report

VOCABULARY = 256


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure a table: training iterations of sequences, or inference of images."""
    table = TABLES[args.number]
    is_sequence = table.folder is not None
    for option, unused in (('img_size', is_sequence), ('depth', not is_sequence)):
        if unused and getattr(args, option) is not None:
            numbers = '7 and 8' if is_sequence else '2 and 4'
            raise ValueError(f'--{option.replace("_", "-")} is for tables {numbers}, got table {args.number}')
    batch, size = args.batch_size or (1 if is_sequence else 32), args.img_size or table.size
    sizes = dict(img_size=size, depth=args.depth, most=most_bytes(args.most_gib, device), compiled=args.compile)
    rows = measure_table(args.number, batch, device, args.dtype, args.rounds, **sizes)
    what = f'training iterations, T = {table.size}' if is_sequence else f'inference at {size} px'
    cut = '' if args.depth is None else f', every model cut to {args.depth} block{"s" * (args.depth > 1)}'
    return Report(rows, f'AFT Table {args.number}: {what}, batch of {batch}{cut}; the paper: {table.measured_on}')


def measure_table(
    number: int,
    batch: int,
    device: torch.device,
    dtype: str,
    rounds: int,
    *,
    img_size: int = 224,
    depth: int | None = None,
    most: float = math.inf,
    compiled: bool = False,
    **model_args: Any,
) -> list[dict[str, Any]]:
    """Measure the models of a table, those with one baseline interleaved.

    Args:
        number: Key of TABLES.
        img_size: Side in pixels, of Tables 7 and 8.
        depth: Blocks of each model, of Tables 2 and 4; None is the row's.
        most: Bytes; materialised attention that takes more is left out.
        model_args: Replace those of the rows of Tables 2 and 4.

    Returns:
        The rows of the table: the printed figures (`paper_...`) with those of `compare`, `parameters` and `per_second`
        (iterations or images); one more for each baseline with materialised attention, or why it was left out, and for
        each compiled form.
    """
    table = TABLES[number]
    measure = partial(compare, device=device, rounds=rounds, dtype=dtype, compiled=compiled)
    shortened = model_args if depth is None else {**model_args, 'depth': depth}
    found: dict[int, list[dict[str, Any]]] = {}
    ours = [place for place, row in enumerate(table.rows) if row.model]
    for first in dict.fromkeys(table.rows[place].baseline for place in ours):
        assert first is not None
        group = {place: table.rows[place] for place in [first, *(place for place in ours if place != first)]}
        group = {place: row for place, row in group.items() if row.baseline == first}
        if table.folder is None:
            measured = _images(group, (batch, 3, img_size, img_size), device, most, measure)
        else:
            measured = _sequences(group, batch, device, most, measure, shortened)
        found |= measured
    rows = []
    for place, row in enumerate(table.rows):
        own, *others = found.get(place, [{}])
        base = None if row.baseline is None else table.rows[row.baseline].printed
        rows.append({**own, 'name': row.name, 'model': row.model, **_printed(row.printed, base)})
        rows += [{**other, 'name': f'{row.name}{other["name"].partition("@")[2]}'} for other in others]
    return rows


def _printed(printed: dict[str, float], base: dict[str, float] | None) -> dict[str, Any]:
    paper = {'parameters', 'speed', 'memory_gb'}
    found = {f'paper_{key}' if key in paper else key: value for key, value in printed.items()}
    if base is not None and 'speed' in printed:
        found['paper_ratio'] = printed['speed'] / base['speed']
        found['paper_memory_ratio'] = printed['memory_gb'] / base['memory_gb']
    return found


def _images(
    group: dict[int, PaperRow],
    shape: tuple[int, int, int, int],
    device: torch.device,
    most: float,
    measure: Callable[..., list[dict[str, Any]]],
) -> dict[int, list[dict[str, Any]]]:
    candidates, parameters, refused = [], {}, {}
    for place, row in group.items():
        model = create(str(row.model), shape[2:])
        parameters[place] = sum(parameter.numel() for parameter in model.parameters())
        candidates.append(classifier(str(row.model), shape, device)._replace(name=str(place)))
        if has_fused_attention(model):
            paper = classifier(str(row.model), shape, device, materialised=True)
            if reason := attention_too_large(model, shape[0], False, most):
                refused[place] = reason
            else:
                candidates.append(paper._replace(name=f'{place}@, {PAPER_BASELINE}'))
    rows = measure(candidates, directions=('forward',))
    return _by_place([with_rate(row, shape[0]) for row in rows], parameters, refused)


def _sequences(
    group: dict[int, PaperRow],
    batch: int,
    device: torch.device,
    most: float,
    measure: Callable[..., list[dict[str, Any]]],
    model_args: dict[str, Any],
) -> dict[int, list[dict[str, Any]]]:
    first = next(iter(group))
    models = {
        place: create_decoder(str(row.model), **{**(row.arguments or {}), **model_args}).to(device).train()
        for place, row in group.items()
    }
    candidates = [iteration(str(place), model, batch, device) for place, model in models.items()]
    refused = {}
    baseline, heads = models[first], int(group[first].printed['heads'])
    if reason := too_large(batch, heads, baseline.context, len(baseline.blocks), most):
        refused[first] = reason
    else:
        paper = written_out(iteration(str(first), baseline, batch, device))
        candidates.append(paper._replace(name=f'{first}@, {PAPER_BASELINE}'))
    rows = measure(candidates, directions=('training',))
    parameters = {place: sum(each.numel() for each in model.parameters()) for place, model in models.items()}
    return _by_place([with_rate(row, 1) for row in rows], parameters, refused)


def iteration(name: str, model: AFTDecoder, batch: int, device: torch.device) -> Candidate:
    """Return a training iteration: loss of random tokens, gradients, and an update of AdamW."""

    def prepare(training: bool) -> Prepared:
        tokens = torch.randint(VOCABULARY, (batch, model.context), device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def learn(loss: torch.Tensor) -> None:
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()

        return Prepared(lambda: model.nll(tokens).mean(), list(model.parameters()), [tokens], learn)

    return Candidate(name, prepare)


def _by_place(
    rows: list[dict[str, Any]], parameters: dict[int, int], refused: dict[int, str]
) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        place = int(row['name'].partition('@')[0])
        found.setdefault(place, []).append({**row, 'parameters': parameters[place]})
    for place, reason in refused.items():
        found[place].append({'name': f'@, {PAPER_BASELINE}', 'refused': reason})
    return found
