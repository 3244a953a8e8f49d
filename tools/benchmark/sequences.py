"""AFT Tables 2 and 4: training of the pixel and character models, the paper's figures beside those of this machine."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aft_vision.models import create_decoder
from aft_vision.models.decoder import AFTDecoder
from tools.benchmark.compare import PAPER_BASELINE, math_attention, too_large
from tools.benchmark.paper_sequences import SEQUENCE_TABLES, SequenceRow
from tools.benchmark.times import Call, time_calls, time_compiled
from tools.machine import autocast

VOCABULARY = 256


def measure_sequences(
    number: int,
    batch_size: int,
    depth: int | None,
    most_bytes: float,
    device: torch.device,
    dtype: str,
    rounds: int,
    *,
    compiled: bool = False,
    progress: bool = False,
    **model_args: Any,
) -> list[dict[str, Any]]:
    """Measure training iterations of the models of a table, those with one Transformer interleaved.

    Args:
        number: Key of SEQUENCE_TABLES.
        depth: Blocks of each model; None is the row's.
        most_bytes: Materialised attention that takes more is left out.
        dtype: Key of PRECISIONS.
        model_args: Replace those of the rows.

    Returns:
        The rows of the table, and one more for each Transformer, with materialised attention: `name`, `paper` with
        the printed figures or None, `measured` or None, `refused`, why nothing was measured, or None. `measured` has
        `parameters`, `iterations_per_second`, `memory_ratio`, `compiled`, and what `time_calls` gives.
    """
    table = SEQUENCE_TABLES[number]
    own = [place for place, row in enumerate(table.rows) if row.config]
    measured: dict[tuple[int, bool], dict[str, Any]] = {}
    refused: dict[int, str] = {}
    shortened: dict[str, Any] = model_args if depth is None else {**model_args, 'depth': depth}
    for first in dict.fromkeys(table.rows[place].baseline for place in own):
        assert first is not None
        group = [first, *(place for place in own if table.rows[place].baseline == first and place != first)]
        models = {
            place: create_decoder(**{**table.rows[place].model, **shortened}).to(device).train() for place in group
        }
        steps = _make_steps(models, batch_size, device, dtype)
        reason = too_large(
            batch_size, table.rows[first].heads or 1, models[first].context, len(models[first].blocks), most_bytes
        )
        if reason:
            refused[first] = reason
            del steps[first, True]
        measured |= _measure_steps(steps, batch_size, device, rounds, compiled, progress)
    return _rows(table.rows, measured, refused)


def _make_steps(
    models: dict[int, AFTDecoder], batch_size: int, device: torch.device, dtype: str
) -> dict[tuple[int, bool], '_Step']:
    # By place, and whether attention is materialised, which it is in one more of the first model.
    first, model = next(iter(models.items()))
    tokens = torch.randint(VOCABULARY, (batch_size, model.context), device=device)
    steps = {(place, False): _Step(each, tokens, dtype) for place, each in models.items()}
    return {**steps, (first, True): _Step(model, tokens, dtype, written_out=True)}


class _Step:
    """A training iteration: loss, gradients, and an update of AdamW."""

    def __init__(self, model: AFTDecoder, tokens: Tensor, dtype: str, written_out: bool = False) -> None:
        self.model, self.tokens, self.dtype, self.written_out = model, tokens, dtype, written_out
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def make(self, wrap: Callable[..., Any] = lambda function: function) -> Call:
        """The iteration, with `wrap` around the function that gives the loss."""
        loss = wrap(lambda: self.model.nll(self.tokens).mean())

        def iterate() -> None:
            self.optimizer.zero_grad(set_to_none=False)
            with autocast(self.tokens.device, self.dtype):
                if self.written_out:
                    with math_attention():
                        value = loss()
                else:
                    value = loss()
            value.backward()
            self.optimizer.step()

        return iterate


def _measure_steps(
    steps: dict[tuple[int, bool], _Step],
    batch_size: int,
    device: torch.device,
    rounds: int,
    compiled: bool,
    progress: bool,
) -> dict[tuple[int, bool], dict[str, Any]]:
    names = {f'{place} {written_out}': (place, written_out) for place, written_out in steps}
    eager = time_calls({name: steps[key].make() for name, key in names.items()}, device, rounds, progress)
    sensible = {name: steps[key].make for name, key in names.items() if not steps[key].written_out}
    found = time_compiled(sensible, device, rounds, progress) if compiled else {}
    base = next(iter(eager.values()))['peak_bytes']
    return {
        key: {
            **eager[name],
            'parameters': sum(parameter.numel() for parameter in steps[key].model.parameters()),
            'iterations_per_second': 1e3 / eager[name]['milliseconds'],
            'memory_ratio': eager[name]['peak_bytes'] / base,
            'compiled': found.get(name),
        }
        for name, key in names.items()
    }


def _printed(row: SequenceRow, rows: tuple[SequenceRow, ...]) -> dict[str, Any]:
    found = {key: value for key, value in row._asdict().items() if key not in ('name', 'config', 'model', 'baseline')}
    ratio = memory_ratio = None
    if row.baseline is not None and row.iterations_per_second and row.memory_gb:
        first = rows[row.baseline]
        assert first.iterations_per_second is not None
        assert first.memory_gb is not None
        ratio = row.iterations_per_second / first.iterations_per_second
        memory_ratio = row.memory_gb / first.memory_gb
    return {**found, 'ratio': ratio, 'memory_ratio': memory_ratio}


def _rows(
    printed: tuple[SequenceRow, ...], measured: dict[tuple[int, bool], dict[str, Any]], refused: dict[int, str]
) -> list[dict[str, Any]]:
    rows = []
    for place, row in enumerate(printed):
        rows.append(_row(row, _printed(row, printed), measured.get((place, False))))
        if (place, True) in measured or place in refused:
            extra = _row(row, None, measured.get((place, True)), refused.get(place))
            rows.append(extra | {'name': f'{row.name}, {PAPER_BASELINE}'})
    return rows


def _row(
    row: SequenceRow, paper: dict[str, Any] | None, measured: dict[str, Any] | None, refused: str | None = None
) -> dict[str, Any]:
    return {'name': row.name, 'config': row.config, 'paper': paper, 'measured': measured, 'refused': refused}


def format_sequences(number: int, rows: list[dict[str, Any]]) -> str:
    """The rows of a table as text: the paper's columns, then ours."""
    compiled = any(row['measured'] and row['measured']['compiled'] for row in rows)
    head = f'paper: {SEQUENCE_TABLES[number].measured_on}'
    left = f'{"L":>3} {"d":>4} {"h":>2} {"train":>6} {"test":>6} {"it/s":>5} {"ratio":>5} {"GB":>5} {"ratio":>5}'
    right = f'{"params":>11} {"it/s":>7} {"ratio":>5} {"quartiles":>12} {"MiB":>8} {"ratio":>5}'
    lines = [f'{"":34} {head:49} | here', f'{"":34} {left} | {right}' + (' | compiled it/s, ratio' if compiled else '')]
    for row in rows:
        ours = f'left out: {row["refused"]}' if row['refused'] else _format_measured(row['measured'])
        line = f'{row["name"]:34} {_format_printed(row["paper"], number)} | {ours}'
        lines.append(line + (f' | {_format_compiled(row["measured"])}' if compiled else ''))
    return '\n'.join(lines)


def _format_printed(paper: dict[str, Any] | None, number: int) -> str:
    bits = '6.2f' if number == 2 else '6.3f'
    columns = {
        'depth': '3',
        'dim': '4',
        'heads': '2',
        'train_bits': bits,
        'test_bits': bits,
        'iterations_per_second': '5.2f',
        'ratio': '5.2f',
        'memory_gb': '5.1f',
        'memory_ratio': '5.2f',
    }
    cells = []
    for name, layout in columns.items():
        value = paper and paper[name]
        cells.append(f'{"-":>{layout[0]}}' if value is None else f'{value:{layout}}')
    return ' '.join(cells)


def _format_measured(found: dict[str, Any] | None) -> str:
    if found is None:
        return f'{"-":>11} {"-":>7} {"-":>5} {"-":>12} {"-":>8} {"-":>5}'
    low, high = found['ratio_quartiles']
    return (
        f'{found["parameters"]:11,} {found["iterations_per_second"]:7.3f} {found["ratio"]:5.2f} '
        f'{f"{low:.2f} - {high:.2f}":>12} {found["peak_bytes"] / 2**20:8.1f} {found["memory_ratio"]:5.2f}'
    )


def _format_compiled(found: dict[str, Any] | None) -> str:
    if found is None or found['compiled'] is None:
        return '-'
    if 'error' in found['compiled']:
        return f'failed: {found["compiled"]["error"][:100]}'
    ratio = found['compiled']['ratio']
    return f'{1e3 / found["compiled"]["milliseconds"]:.3f}, ' + ('-' if ratio is None else f'{ratio:.2f}')
