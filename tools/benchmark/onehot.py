"""The one-offset operation against the convolution that it stands for, with AFT-simple as the bound (AFT Eq. 10)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from aft_vision import ops
from tools.benchmark.compare import Candidate, Prepared, compare, require_figures
from tools.benchmark.operations import KERNEL_SIZE
from tools.machine import PRECISIONS

GRID = (14, 14)
FORMS = ('convolution', 'one-hot', 'AFT-simple')


class Shape(NamedTuple):
    """Batch, channels and heads."""

    batch: int
    dim: int
    heads: int


SHAPES = (Shape(8, 384, 384), Shape(8, 384, 16), Shape(32, 384, 384), Shape(1, 384, 384))


def measure_onehot(
    device: torch.device, dtype: str, rounds: int, shapes: tuple[Shape, ...] = SHAPES, progress: bool = False
) -> list[dict[str, Any]]:
    """Time the three operations on a 14 x 14 grid with an 11 x 11 kernel that is zero but for one entry a head.

    Args:
        dtype: Key of PRECISIONS, of q, k and v.

    Returns:
        A row for each shape, direction of DIRECTIONS and form: what `time_calls` gives, with ratios to the convolution,
        and `difference`: the norm-wise relative difference of its output to the convolution's, None for AFT-simple,
        which computes something else.
    """
    rows = []
    for shape in shapes:
        forms = _forms(shape, device, PRECISIONS[dtype] or torch.float32)
        with torch.no_grad():
            expected, found = (forms[name].forward() for name in FORMS[:2])
        difference = ((found - expected).norm() / expected.norm()).item()
        candidates = [Candidate(name, lambda training, form=form: form) for name, form in forms.items()]  # type: ignore[misc]
        measured = compare(candidates, device, rounds, progress=progress)
        require_figures(measured)
        for row in measured:
            place = {**shape._asdict(), 'direction': row['direction'], 'form': row['name']}
            rows.append({**place, **row['eager'], 'difference': difference if row['name'] == FORMS[1] else None})
    return rows


def _forms(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, Prepared]:
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    tokens = GRID[0] * GRID[1]
    q, v, full_k = (draw(shape.batch, tokens, shape.dim) for _ in range(3))
    k = draw(shape.batch, tokens, shape.heads)
    raw = draw(shape.heads, KERNEL_SIZE, KERNEL_SIZE, dtype=torch.float32)
    kernel, (offset, weight) = ops.hard_kernel(raw), ops.onehot_kernel(raw)
    for x in (q, k, v, full_k, kernel, weight):
        x.requires_grad_()
    found = (
        Prepared(lambda: ops.aft_conv(q, k, v, kernel, GRID), [q, k, v, kernel]),
        Prepared(lambda: ops.aft_onehot(q, k, v, offset, weight, GRID), [q, k, v, weight]),
        Prepared(lambda: ops.aft_simple(q, full_k, v), [q, full_k, v]),
    )
    return dict(zip(FORMS, found, strict=True))


def format_onehot(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [
        f'{"batch":>5} {"dim":>4} {"heads":>5} {"":9}{"":12} {"ms":>8} {"ratio":>6} {"quartiles":>15} {"differs":>8}'
    ]
    for row in rows:
        low, high = row['ratio_quartiles']
        difference = '' if row['difference'] is None else f'{row["difference"]:8.0e}'
        lines.append(
            f'{row["batch"]:5} {row["dim"]:4} {row["heads"]:5} {row["direction"]:9}{row["form"]:12} '
            f'{row["milliseconds"]:8.2f} {row["ratio"]:6.2f} {f"{low:.2f} - {high:.2f}":>15} {difference}'.rstrip()
        )
    return '\n'.join(lines)
