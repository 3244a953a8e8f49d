"""What this project promises in speed and memory: the figures, their verdicts and their table."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm


class Figure(NamedTuple):
    """A measured figure.

    Args:
        quartiles: Over the rounds, where it is a time.
        paper: The same against materialised attention, the paper's baseline, where that was measured.
    """

    value: float
    quartiles: tuple[float, float] | None = None
    paper: float | None = None


class Goal(NamedTuple):
    """One promise.

    Args:
        row: Of the table of goals; figures of one row belong together.
        measure: Makes the figure, of a number of rounds; None where the device for it is missing.
        at_most: Whether less is better.
        most_rounds: Rounds that are enough for it; None is as many as are wanted.
    """

    row: int
    what: str
    floor: float
    goal: float
    measure: Callable[[int], Figure] | None
    at_most: bool = False
    most_rounds: int | None = None

    def verdict(self, figure: Figure | None) -> str:
        """`goal`, `floor`, `below`, or `open` where nothing was measured."""
        if figure is None:
            return 'open'
        for name, bound in (('goal', self.goal), ('floor', self.floor)):
            if (figure.value <= bound) if self.at_most else (figure.value >= bound):
                return name
        return 'below'


def measure_goals(goals: Sequence[Goal], rounds: int, progress: bool = False) -> list[dict[str, Any]]:
    """Measure every goal.

    Returns:
        A row for each: `row`, `what`, `floor`, `goal`, `at_most`, `measured` (None where open), `quartiles`, `paper`
        (against the paper's baseline, or None), `verdict`.
    """
    rows = []
    for goal in tqdm(goals, desc='goals', leave=False, disable=not progress):
        turns = rounds if goal.most_rounds is None else min(rounds, goal.most_rounds)
        figure = None if goal.measure is None else goal.measure(turns)
        row = {name: getattr(goal, name) for name in ('row', 'what', 'floor', 'goal', 'at_most')}
        found = {
            'measured': figure and figure.value,
            'quartiles': figure and figure.quartiles,
            'paper': figure and figure.paper,
        }
        rows.append({**row, **found, 'verdict': goal.verdict(figure)})
    return rows


def format_goals(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    head = f'{"row":>3} {"what":72} {"floor":>6} {"goal":>6} {"measured":>8} {"quartiles":>13}'
    lines = [head + " paper's verdict"]
    for row in rows:
        value = '' if row['measured'] is None else f'{row["measured"]:8.2f}'
        quartiles = '' if row['quartiles'] is None else '{:.2f} - {:.2f}'.format(*row['quartiles'])
        paper = '' if row['paper'] is None else f'{row["paper"]:.2f}'
        sign = '<' if row['at_most'] else ' '
        bounds = f'{sign}{row["floor"]:5.2f} {sign}{row["goal"]:5.2f}'
        lines.append(f'{row["row"]:3} {row["what"]:72} {bounds} {value:8} {quartiles:>13} {paper:>7} {row["verdict"]}')
    return '\n'.join(lines)
