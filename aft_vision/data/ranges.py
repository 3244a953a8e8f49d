"""Ranges of an experiment's numbers, declared with the fields of its dataclasses."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """An interval in the usual notation: `[0, 1)` includes 0 and not 1, `[1, inf)` all finite numbers from 1 on."""

    text: str

    def __contains__(self, value: Any) -> bool:
        low, high = (float(end) for end in self.text[1:-1].split(','))
        above = low <= value if self.text[0] == '[' else low < value
        below = value <= high if self.text[-1] == ']' else value < high
        return above and below

    def __str__(self) -> str:
        low, high = self.text[1:-1].split(', ')
        if high == 'inf' and low != '-inf':
            return f'{"at least" if self.text[0] == "[" else "above"} {low}'
        return 'finite' if high == 'inf' else f'in {self.text}'


def within(interval: str, default: Any, unit: str = '') -> Any:
    """Make the field of a number, of several numbers, or of an optional number.

    Args:
        interval: As in Range; `check_ranges` checks every number of the field.
        default: Default of the field.
        unit: Unit of the number, such as `px`.
    """
    metadata = {'range': Range(interval), 'unit': unit}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_ranges(section: Any, name: str = '') -> None:
    """Raise a ValueError for the first number out of range in a dataclass, by its field in the section `name`."""
    for field in dataclasses.fields(section):
        if 'range' in field.metadata:
            more = ', or null' if field.default is None else ''
            key = f'{name}.{field.name}' if name else field.name
            check_range(key, getattr(section, field.name), field.metadata['range'], more)


def check_range(key: str, value: Any, allowed: Range, more: str = '') -> None:
    """Raise a ValueError with the key unless a number, or each of several, is in its range; None passes.

    Args:
        more: Other accepted values, for the message.
    """
    numbers = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if not all(number in allowed for number in numbers):
        finite = '' if is_finite(value) or ', inf' not in allowed.text or '-inf' in allowed.text else ' and finite'
        raise ValueError(f'expected {key} to be {allowed}{finite}{more}, got {value!r}')


def is_finite(value: Any) -> bool:
    """Return whether a value and everything in it is free of NaN and infinity."""
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
