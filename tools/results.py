"""Runs of the trainers: their folders, their configs, their results and a table; files that the tools wrote."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the options for the folders of runs, their names, and the output folder."""
    parser.add_argument('runs', nargs='+', type=Path, metavar='RUN', help='the folder of a run')
    parser.add_argument(
        '--names', nargs='+', metavar='NAME', help='names of the runs (default: those of their folders)'
    )
    parser.add_argument(
        '--out', type=Path, default=Path(), metavar='DIR', help='output folder (default: the current one)'
    )


def name_runs(args: argparse.Namespace) -> dict[str, Path]:
    """Return the folders of `add_runs` by name.

    Raises:
        ValueError: the number of names is not that of the runs, or two runs have the same name.
    """
    names = args.names or [folder.resolve().name for folder in args.runs]
    if len(names) != len(args.runs):
        raise ValueError(f'expected a name for each of {len(args.runs)} runs, got {len(names)}')
    if len(set(names)) < len(names):
        raise ValueError(f'expected runs of different names, got {", ".join(names)}; --names gives them others')
    return dict(zip(names, args.runs, strict=True))


def format_table(*lines: Sequence[str]) -> str:
    """Format lines of cells as text: the first column left-aligned, the others right-aligned."""
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    return '\n'.join(
        f'{line[0]:{first}}' + ''.join(f'  {cell:>{width}}' for cell, width in zip(line[1:], others, strict=True))
        for line in lines
    )


def read_result(folder: Path, keys: Sequence[str], command: str) -> dict[str, Any]:
    """Read the result.json of a run.

    Args:
        keys: Required keys.
        command: Command that writes it, for the error message.

    Raises:
        ValueError: the file is missing or of another kind.
    """
    path = folder / 'result.json'
    if not path.is_file():
        raise ValueError(f'expected the folder of a complete run, got {folder} without result.json')
    result = read_json(path)
    missing = [key for key in keys if key not in result]
    if missing:
        raise ValueError(f'expected the result of a run of {command}, got {path} without {missing[0]}')
    return result


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file.

    Raises:
        ValueError: the file is damaged or has something else.
    """
    try:
        found = json.loads(path.read_text(encoding='utf-8'))
    except ValueError as error:
        raise ValueError(f'expected a JSON file, got {path}: {error}') from error
    if not isinstance(found, dict):
        raise ValueError(f'expected a JSON object in {path}, got a {type(found).__name__}')
    return found


def read_config(path: Path, command: str) -> dict[str, Any]:
    """Read the sections of an experiment.

    Args:
        command: Command that writes it, for the error message.

    Raises:
        ValueError: the file is not one of sections.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding='utf-8'))
    except (yaml.YAMLError, UnicodeDecodeError):
        config = None
    if not isinstance(config, dict) or not all(isinstance(section, dict) for section in config.values()):
        raise ValueError(f'expected the config of a run of {command}, got no sections in {path}')
    return config


def flatten_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a resolved experiment by `section.key`."""
    return {f'{section}.{key}': value for section, keys in config.items() for key, value in keys.items()}
