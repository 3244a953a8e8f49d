"""Values of an experiment in YAML.

A key of text keeps its characters, also in `007`, `no` and `1.10`. OmegaConf reads the values of all other keys.
"""

import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf

from train.command_line import expand_home

NULL = re.compile(r'null|Null|NULL|~|')
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
    """Read YAML with every unquoted value as Plain, for `read_value`.

    Raises:
        yaml.YAMLError: the text is not valid, or gives a key twice.
    """
    return yaml.load(text, Loader=_Loader)


def read_value(value: Any, hint: Any = Any, key: str = '') -> Any:
    """Read a value, and every value in it, for the types of their keys; a text may begin with `~` or `$HOME`.

    Args:
        value: From `read_yaml`, or an Argument.
        hint: A type, or the hints of a section by key. For a single type of numbers the characters stay, which
            OmegaConf converts; a value of any type is what OmegaConf makes of it.
        key: `section.key`, for errors.

    Raises:
        ValueError: an argument is not valid YAML.
    """
    if isinstance(value, Argument):
        value = _read_argument(value, hint, key)
    if isinstance(value, Mapping):
        hints = hint if isinstance(hint, Mapping) else {}
        return {
            str(name): read_value(each, hints.get(name, Any), f'{key}.{name}' if key else str(name))
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [read_value(each, int if hint in PAIRS else hint, key) for each in value]
    value = _read_plain(value, _types(hint) - {list, type(None)}) if isinstance(value, Plain) else value
    value = expand_home(value) if isinstance(value, str) else value
    return value if value is None or hint not in PAIRS else [value, value]


def _read_argument(text: str, hint: Any, key: str) -> Any:
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in '\'"'
    if not text or (str in _types(hint) and list not in _types(hint) and not quoted):
        return Plain(text)
    try:
        return read_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f'expected a YAML value after = in the override {f"{key}={text}"!r}, got: {error}') from error


def _read_plain(text: Plain, scalars: set[Any]) -> Any:
    # The empty text is one where there has to be one.
    if NULL.fullmatch(text) and (text or str not in scalars):
        return None
    if len(scalars) == 1 and scalars <= {str, int, float, bool}:
        return str(text)
    value = OmegaConf.to_container(OmegaConf.from_dotlist([f'value={text}']))['value']  # type: ignore[call-overload, index]
    return str(text) if str in scalars and type(value) not in scalars else value


def _types(hint: Any) -> set[Any]:
    """Return the types of a value; for several values the types of each, and `list`."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return set(map(type, parts))
    several = {list} if origin in (tuple, list, Sequence) else set()
    if several or origin in (typing.Union, types.UnionType):
        return several.union(*(_types(part) for part in parts if part is not ...))
    # A section has a mapping of hints.
    return set() if isinstance(hint, Mapping) else {hint}
