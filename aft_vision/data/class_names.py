"""Comparison of the names of classes: of a data set, and of the weights that know its classes."""

import re
import unicodedata
from collections.abc import Sequence
from functools import cache

from timm.data import ImageNetInfo

SYNSET = re.compile(r'n\d{8}')
# Names that a message lists.
MAX_LISTED = 3


def match_classes(trained: Sequence[str], wanted: Sequence[str]) -> list[int | None]:
    """Return the place among trained classes of each wanted one, None for another class.

    Accents count in either form of Unicode. A synset of ImageNet (n01440764) is the same class as its words (`tench,
    Tinca tinca`) or the first of them.
    """
    of_both = (*trained, *wanted)
    # Words stand for synsets only where one side has synsets.
    mixed = any(map(SYNSET.fullmatch, of_both)) and not all(map(SYNSET.fullmatch, of_both))
    keys = [_keys(name, mixed) for name in trained]
    places: dict[str, list[int]] = {}
    for place, each in enumerate(keys):
        for key in each:
            places.setdefault(key, []).append(place)
    found: list[int | None] = []
    for index, name in enumerate(wanted):
        candidates = sorted({place for key in _keys(name, mixed) for place in places.get(key, ())})
        # Some words are those of two classes, such as crane, which their place tells apart.
        own = [index] if index in candidates else candidates
        found.append(own[0] if len(own) == 1 else None)
    return found


def list_names(names: Sequence[str]) -> str:
    """Return a few names for a message."""
    return ', '.join(names[:MAX_LISTED]) + (f' and {len(names) - MAX_LISTED} more' if len(names) > MAX_LISTED else '')


def _keys(name: str, mixed: bool) -> list[str]:
    key = unicodedata.normalize('NFC', name)
    return [key, *_synsets().get(key.lower(), ())] if mixed else [key]


@cache
def _synsets() -> dict[str, list[str]]:
    """Return the synsets of ImageNet-1k by their words, all of them and the first."""
    info, found = ImageNetInfo(), dict[str, list[str]]()
    for synset in info.label_names():
        words = info.label_name_to_description(synset).lower()
        for text in {words, words.partition(',')[0]}:
            found.setdefault(text, []).append(synset)
    return found
