"""What this project promises in speed and memory: the figures, their verdicts and their table."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from tools.benchmark.times import describe_error


class Figure(NamedTuple):
    """A measured figure.

    Args:
        quartiles: Over the rounds, where it is a time.
        paper: The same against materialised attention, the paper's baseline, where that was measured.
        milliseconds: Of a call of what is compared to, and of ours, on a GPU.
        kernel_milliseconds: Of the kernels in them, without what the host adds, where they could be told.
    """

    value: float
    quartiles: tuple[float, float] | None = None
    paper: float | None = None
    milliseconds: tuple[float, float] | None = None
    kernel_milliseconds: tuple[float, float] | None = None


class Goal(NamedTuple):
    """One promise.

    Args:
        row: Of the table of goals; figures of one row belong together.
        measure: Makes the figure, of a number of rounds; None where the device for it is missing.
        at_most: Whether less is better.
        most_rounds: Rounds that are enough for it; None is as many as are wanted.
        device: Where it is measured.
    """

    row: int
    what: str
    floor: float
    goal: float
    measure: Callable[[int], Figure] | None
    at_most: bool = False
    most_rounds: int | None = None
    device: str = 'cpu'

    def verdict(self, figure: Figure | None) -> str:
        """`goal`, `floor`, `below`, or `open` where nothing was measured."""
        if figure is None:
            return 'open'
        for name, bound in (('goal', self.goal), ('floor', self.floor)):
            if (figure.value <= bound) if self.at_most else (figure.value >= bound):
                return name
        return 'below'


def measure_goals(
    goals: Sequence[Goal], rounds: int, progress: bool = False, show: Callable[[dict[str, Any]], None] | None = None
) -> list[dict[str, Any]]:
    """Measure every goal; one that fails ends nothing.

    Args:
        show: Gets every row as it comes.

    Returns:
        A row for each: `row`, `what`, `floor`, `goal`, `at_most`, `measured` (None where open or failed), `quartiles`,
        `paper` (against the paper's baseline, or None), `milliseconds` and `kernel_milliseconds` (of a GPU, else None),
        `error` (None, or why it failed), `verdict`: that of the goal, or `failed`.
    """
    rows = []
    for goal in tqdm(goals, desc='goals', leave=False, disable=None if progress else True):
        rows.append(_measure(goal, rounds))
        if show is not None:
            show(rows[-1])
    return rows


def format_goals(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    head = f'{"row":>3} {"what":72} {"floor":>6} {"goal":>6} {"measured":>8} {"quartiles":>13}'
    return '\n'.join([head + " paper's verdict", *(format_goal(row) for row in rows)])


def format_goal(row: dict[str, Any]) -> str:
    """A row as a line of text."""
    value = '' if row['measured'] is None else f'{row["measured"]:8.2f}'
    quartiles = '' if row['quartiles'] is None else '{:.2f} - {:.2f}'.format(*row['quartiles'])
    paper = '' if row['paper'] is None else f'{row["paper"]:.2f}'
    sign = '<' if row['at_most'] else ' '
    bounds = f'{sign}{row["floor"]:5.2f} {sign}{row["goal"]:5.2f}'
    verdict = row['verdict'] if row['error'] is None else f'{row["verdict"]}: {row["error"]}'
    line = f'{row["row"]:3} {row["what"]:72} {bounds} {value:8} {quartiles:>13} {paper:>7} {verdict}'
    for words, name in (('ms', 'milliseconds'), ('kernels', 'kernel_milliseconds')):
        if row[name] is not None:
            theirs, own = row[name]
            line += f', {words} {theirs:.4f} / {own:.4f}'
    return line


def _measure(goal: Goal, rounds: int) -> dict[str, Any]:
    turns = rounds if goal.most_rounds is None else min(rounds, goal.most_rounds)
    figure = error = None
    try:
        figure = None if goal.measure is None else goal.measure(turns)
    # Whatever it is: the others are measured all the same.
    except Exception as problem:
        error = describe_error(problem)
    return {
        **{name: getattr(goal, name) for name in ('row', 'what', 'floor', 'goal', 'at_most')},
        'measured': figure and figure.value,
        **{name: figure and getattr(figure, name) for name in Figure._fields[1:]},
        'error': error,
        'verdict': goal.verdict(figure) if error is None else 'failed',
    }
