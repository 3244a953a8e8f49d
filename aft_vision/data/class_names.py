"""Names of the classes of a model, and their comparison with the classes of a data set."""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from timm.data import ImageNetInfo, infer_imagenet_subset

# Alone, or after the words of two classes.
SYNSET = re.compile(r'(?:^|\()(n\d{8})\)?$')


def normal_name(name: str) -> str:
    """Return the name of a class in the one form of Unicode in which names are compared."""
    return unicodedata.normalize('NFC', name)


def match_classes(trained: Sequence[str], wanted: Sequence[str]) -> list[int | None]:
    """Return the index among trained classes of each wanted one, None for another class; no index is returned twice.

    Accents count in either form of Unicode. A synset of ImageNet (n01440764) is the same class as its words (`tench,
    Tinca tinca`), the first of them, and that with the synset (`crane (n03126707)`), which are also equal to each other
    unless another class has exactly the wanted name.
    """
    exact = _indices([[normal_name(name)] for name in trained])
    matches = [exact.get(normal_name(name), []) for name in wanted]
    if not all(matches):
        of_synsets = _indices([_synsets_of(name) for name in trained])
        matches = [
            others or sorted({other for key in _synsets_of(name) for other in of_synsets.get(key, ())})
            for name, others in zip(wanted, matches, strict=True)
        ]
    # Two classes may have the same words, such as crane; their index tells them apart.
    if len(trained) == len(wanted):
        matches = [[index] if index in others else others for index, others in enumerate(matches)]
    claims = Counter(others[0] for others in matches if len(others) == 1)
    return [
        others[0]
        if len(others) == 1 and (claims[others[0]] == 1 or _is_own(trained, wanted, others[0], index))
        else None
        for index, others in enumerate(matches)
    ]


def class_labels(model: Any) -> list[str]:
    """Return the labels of a model's classes: of its configuration, for ImageNet identifiers, else their numbers."""
    labels = getattr(model, 'pretrained_cfg', {}).get('label_names')
    if labels:
        return list(labels)
    subset = infer_imagenet_subset(model)
    return (
        [f'class {index}' for index in range(model.num_classes)]
        if subset is None
        else ImageNetInfo(subset).label_names()
    )


def class_names(model: Any) -> list[str]:
    """Return the names of a model's classes: its labels, as `in_words`.

    Raises:
        ValueError: it has labels of another number of classes.
    """
    names = in_words(class_labels(model)) if model.num_classes else []
    if len(names) != model.num_classes:
        raise ValueError(f'expected label_names of {model.num_classes} classes, as the model has, got {len(names)}')
    return names


def in_words(labels: Sequence[str]) -> list[str]:
    """Return labels of classes as they are or, if all are identifiers of ImageNet such as n01440764, their words.

    Of several words for a class the first is taken. A word of two classes, or of a class outside ImageNet-1k,
    which `match_classes` does not know by its words, is followed by the identifier.
    """
    if not all(re.fullmatch(r'n\d{8}', label) for label in labels):
        return list(labels)
    info = ImageNetInfo()
    try:
        words = [info.label_name_to_description(label).partition(',')[0] for label in labels]
    except KeyError:
        # Not an identifier that ImageNet has.
        return list(labels)
    counts, known = Counter(word.lower() for word in words), {*info.label_names()}
    return [
        word if counts[word.lower()] == 1 and label in known else f'{word} ({label})'
        for word, label in zip(words, labels, strict=True)
    ]


def _is_own(trained: Sequence[str], wanted: Sequence[str], other: int, index: int) -> bool:
    # Of several wanted classes that a trained one may be, take the one with its name, else the one with its index.
    names = [normal_name(name) for name in wanted]
    named = normal_name(trained[other])
    return names.index(named) == index if named in names else len(trained) == len(wanted) and other == index


def _indices(keys: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    """Return the indices of the classes that have each key."""
    indices: dict[str, list[int]] = {}
    for index, each in enumerate(keys):
        for key in each:
            indices.setdefault(key, []).append(index)
    return indices


def list_names(names: Sequence[str], most: int = 3) -> str:
    """Return the first names of a list, and how many more there are."""
    return ', '.join(names[:most]) + (f' and {len(names) - most} more' if len(names) > most else '')


def _synsets_of(name: str) -> list[str]:
    """Return the synsets of ImageNet that a name may mean, [] for none."""
    if named := SYNSET.search(name):
        return [named[1]]
    return _synsets().get(normal_name(name).lower().replace('_', ' '), [])


@cache
def _synsets() -> dict[str, list[str]]:
    """Return the synsets of ImageNet-1k by their words, all of them and the first."""
    info, synsets = ImageNetInfo(), dict[str, list[str]]()
    for synset in info.label_names():
        words = info.label_name_to_description(synset).lower()
        for text in {words, words.partition(',')[0]}:
            synsets.setdefault(text, []).append(synset)
    return synsets
