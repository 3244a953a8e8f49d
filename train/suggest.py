"""Errors about unknown names, with the nearest valid ones."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from aft_vision.models.transfer_source import did_you_mean

# The trainers of sections that a single one has.
SECTIONS = {
    'convert': 'train.convert',
    'distill': 'train.imagenet',
    'regularize': 'train.imagenet',
    'generate': 'train.fastformer',
}
# How alike a suggestion is, by difflib.
MIN_SIMILARITY = 0.8


def unknown(key: str, value: Any, valid: Iterable[str], kind: str) -> str:
    """Return the message of an error: the value of a key is none of the valid names, and which is meant."""
    return f'{key} = {value!r} is not {kind}{did_you_mean(str(value), valid)}'


def unknown_key(key: str, value: Any, keys: Iterable[str]) -> str:
    """Return an error message for an unknown key, with the nearest `section.key`, or what there is to choose from."""
    keys, (section, _, last) = list(dict.fromkeys(keys)), key.rpartition('.')
    if key in keys:
        return f'{key} = {value!r} is not an argument of this model'
    first, said = key.partition('.')[0], f'{key} = {value!r} is not a key'
    if first in SECTIONS and first not in keys:
        return f'{said}; the section {first} is one of python -m {SECTIONS[first]}'
    own = [each for each in keys if each.startswith(f'{section}.')]
    near = get_close_matches(key, own, cutoff=MIN_SIMILARITY) or [
        each for each in keys if each.rpartition('.')[2] == last
    ]
    near = near or get_close_matches(key, keys, n=1, cutoff=MIN_SIMILARITY)
    if near:
        return f'{said}; the nearest is {" or ".join(near)}'
    names = [each.removeprefix(f'{section}.') for each in own] or [each for each in keys if '.' not in each]
    return f'{said}; {f"the section {section} has" if own else "the sections are"} {", ".join(names)}'
