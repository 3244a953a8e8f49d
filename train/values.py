"""Values of an experiment, read from YAML in the type of their key.

PyYAML reads YAML 1.1, where `0123`, `1_000`, `12:30:00` and `no` are numbers and booleans. Here a key of text keeps the
characters, also those of `1.10`, and the values of other keys are those of YAML 1.2's core schema.
"""

import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import yaml

NULL = re.compile(r'null|Null|NULL|~|')
BOOLEAN = re.compile(r'true|True|TRUE|false|False|FALSE')
# A leading 0 means base 8 in YAML 1.1 and base 10 in YAML 1.2, so that it is no number here.
INTEGER = re.compile(r'[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+')
FLOAT = re.compile(
    r'[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)'
)
# Only YAML 1.1 takes these for numbers and booleans.
YAML_1_1_NUMBER = re.compile(
    r'[-+]?(?:[0-9][0-9_]*(?::[0-5]?[0-9])*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?|0b[01_]+|0x[0-9a-fA-F_]+)'
)
# (H, W) in pixels, for which one side may be given.
PAIRS = (tuple[int, int], tuple[int, int] | None)
YAML_1_1_BOOLEANS = {'yes': 'true', 'y': 'true', 'on': 'true', 'no': 'false', 'n': 'false', 'off': 'false'}


class Plain(str):
    """The characters of an unquoted value in YAML."""

    __slots__ = ()


class Argument(str):
    """The characters after `=` on the command line."""

    __slots__ = ()


class _Loader(yaml.SafeLoader):
    """A loader that leaves the type of unquoted values open, and refuses a key that is given twice."""

    # The key `<<`, which merges mappings, is no text.
    yaml_implicit_resolvers: typing.ClassVar = {'<': yaml.SafeLoader.yaml_implicit_resolvers['<']}

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value]
        twice = [name for index, name in enumerate(names) if name in names[:index]]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f'found duplicate key {twice[0]}', node.start_mark)
        return super().construct_mapping(node, deep)

    def construct_text(self, node: Any) -> str:
        return str(node.value) if node.style else Plain(node.value)


_Loader.add_constructor('tag:yaml.org,2002:str', _Loader.construct_text)


def read_yaml(text: str) -> Any:
    """Read YAML with every unquoted value as Plain, for `typed`.

    Raises:
        yaml.YAMLError: the text is not valid, or gives a key twice.
    """
    return yaml.load(text, Loader=_Loader)


def typed(value: Any, hint: Any, key: str = '') -> Any:
    """Return a value, and every value in it, in the types of their keys.

    Args:
        value: From `read_yaml`, or an Argument.
        hint: A type, or the hints of a section by key. A key without a hint has the type of YAML 1.2's core schema, and
            may not look like a number or a boolean of YAML 1.1, unless it is quoted; `object` allows that.
        key: `section.key`, for errors.

    Raises:
        ValueError: an argument is not valid YAML, or a value is a number or a boolean only in YAML 1.1.
    """
    if isinstance(value, Argument):
        value = _read_argument(value, hint, key)
    if isinstance(value, Mapping):
        hints, other = (hint, Any) if isinstance(hint, Mapping) else ({}, object if hint is object else Any)
        return {
            str(name): typed(each, hints.get(name, other), f'{key}.{name}' if key else str(name))
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [typed(each, int if hint in PAIRS else hint, key) for each in value]
    kinds = _kinds(hint)
    if isinstance(value, Plain):
        value = _read_plain(value, kinds)
        if isinstance(value, str) and hint is Any:
            _check_free(value, key)
    if isinstance(value, str) and kinds and str not in kinds:
        _check_old(value, kinds, key)
    return [value, value] if type(value) is int and hint in PAIRS else value


def _read_argument(text: str, hint: Any, key: str) -> Any:
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in '\'"'
    if str in _kinds(hint) and not _is_several(hint) and not quoted:
        return Plain(text)
    try:
        return read_yaml(text) if text else Plain(text)
    except yaml.YAMLError as error:
        raise ValueError(f'expected a YAML value after = in the override {f"{key}={text}"!r}, got: {error}') from error


def _read_plain(text: Plain, kinds: set[type]) -> Any:
    value = _core(str(text))
    if str not in kinds or type(value) in kinds:
        return value
    # null is no text; the empty text is one where there has to be one.
    return None if value is None and text else str(text)


def _core(text: str) -> Any:
    """Read an unquoted value by YAML 1.2's core schema."""
    if NULL.fullmatch(text):
        return None
    if BOOLEAN.fullmatch(text):
        return text.lower() == 'true'
    if INTEGER.fullmatch(text):
        return int(text, 10 if text.lstrip('+-').isdecimal() else 0)
    return float(re.sub(r'\.(?=[a-zA-Z])', '', text)) if FLOAT.fullmatch(text) else text


def _check_old(value: str, kinds: set[type], key: str) -> None:
    """Raise a ValueError for a number or a boolean of YAML 1.1, which OmegaConf would convert."""
    if kinds & {int, float} and YAML_1_1_NUMBER.fullmatch(value) and _core(value) == value:
        read = yaml.safe_load(value)
        why = 'has a leading 0' if read == value else f'is a number only in YAML 1.1, which reads {read}'
        raise ValueError(f'{key} = {value!r} {why}; write it in base 10, without a leading 0, underscore or colon')
    if bool in kinds and value.lower() in YAML_1_1_BOOLEANS:
        raise ValueError(f'{key} = {value!r} is a boolean only in YAML 1.1; write {YAML_1_1_BOOLEANS[value.lower()]}')


def _check_free(value: str, key: str) -> None:
    """Raise a ValueError for an unquoted value of unknown type that YAML 1.1 does not take for text."""
    if type(read := yaml.safe_load(value)) in (int, float, bool) or YAML_1_1_NUMBER.fullmatch(value):
        raise ValueError(
            f'{key} = {value!r} is {read!r} in YAML 1.1 and text in YAML 1.2; write the number, true or false, or for '
            f'the text the value in quotes, "{value}"'
        )


def _kinds(hint: Any) -> set[type]:
    """Return the types of a value, or of each of several; none if any type is allowed."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return set(map(type, parts))
    if origin in (typing.Union, types.UnionType, tuple, list, Sequence):
        kinds = [_kinds(part) for part in parts if part is not ...]
        return set().union(*kinds) if all(kinds) else set()
    return {hint} if hint in (str, int, float, bool, type(None)) else set()


def _is_several(hint: Any) -> bool:
    several = (tuple, list, Sequence)
    return typing.get_origin(hint) in several or any(
        typing.get_origin(each) in several for each in typing.get_args(hint)
    )
