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

from aft_vision_cli.commandline import expand_home

NULL = re.compile(r'null|Null|NULL|~|')
BOOLEAN = re.compile(r'true|True|TRUE|false|False|FALSE')
# A leading 0 means base 8 in YAML 1.1 and base 10 in YAML 1.2, so that it is no number here.
INTEGER = re.compile(r'[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+')
FLOAT = re.compile(
    r'[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)'
)
# Numbers and booleans of YAML 1.1; those that `_core` leaves are not of YAML 1.2.
YAML_1_1 = re.compile(
    r'[-+]?(?:[0-9][0-9_]*(?::[0-5]?[0-9])*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?|0b[01_]+|0x[0-9a-fA-F_]+)'
    r'|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?'
    r'|(?i:y|yes|on|n|no|off)'
)
# (H, W) in pixels, for which one side may be given.
PAIRS = (tuple[int, int], tuple[int, int] | None)


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
    """Read YAML with every unquoted value as Plain, for `convert_value`.

    Raises:
        yaml.YAMLError: the text is not valid, or gives a key twice.
    """
    return yaml.load(text, Loader=_Loader)


def convert_value(value: Any, hint: Any, key: str = '') -> Any:
    """Return a value, and every value in it, in the types of their keys; a text may begin with `~` or `$HOME`.

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
            str(name): convert_value(each, hints.get(name, other), f'{key}.{name}' if key else str(name))
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [convert_value(each, int if hint in PAIRS else hint, key) for each in value]
    kinds, is_free = _kinds(hint), hint is Any and isinstance(value, Plain)
    if isinstance(value, Plain):
        value = _read_plain(value, kinds)
    is_number = bool(kinds) and str not in kinds
    # OmegaConf would convert the text of a number field.
    if isinstance(value, str) and (is_free or is_number) and YAML_1_1.fullmatch(value) and _core(value) == value:
        raise ValueError(
            f'{key} = {value!r} is a number or a boolean only in YAML 1.1; write a number in base 10 without a leading '
            f'0, underscore or colon, true or false{"" if is_number else ", or a text in quotes"}'
        )
    value = expand_home(value) if isinstance(value, str) else value
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
