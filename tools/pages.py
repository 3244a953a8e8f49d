"""Shared parts of the tools that write a results page: the origin of what they keep, and the blocks of a page."""

import argparse
import re
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path

DOCS = Path('docs/results')
# Of the models of docs/results/imagenette.md, by the first part of the name of a row.
TITLES = {
    **{'conv': 'AFT-conv', 'full': 'AFT-full', 'simple': 'AFT-simple', 'axial': 'AFT-axial'},
    **{'hybrid': 'hybrid', 'deit': 'DeiT', 'pyramid': 'AFT-pyramid', 'cpubone': 'CPUBone-B0'},
}


def add_origin(parser: argparse.ArgumentParser, work: str) -> None:
    """Add the options for where something was measured, and the folder of the pages.

    Args:
        work: The measurement, for the help, such as `training`.
    """
    parser.add_argument('--commit', help=f'commit of the {work}')
    parser.add_argument('--processor', metavar='NAME', help=f'processor of the {work}')
    parser.add_argument('--docs', type=Path, default=DOCS, help=f'folder of the results pages (default: {DOCS})')


def require_origin(parser: argparse.ArgumentParser, args: argparse.Namespace, given: str, *others: str) -> None:
    """Exit with an error unless --commit, --processor and other options are there, which an argument needs.

    Args:
        given: Name of the argument, for the error.
        others: Names of the other options.
    """
    needed = (*others, 'commit', 'processor')
    missing = [f'--{name}' for name in needed if not getattr(args, name)]
    if missing:
        options = [f'--{name}' for name in needed]
        words = f'{", ".join(options[:-1])} and {options[-1]}'
        parser.error(f'{given} needs {words}, got none for {", ".join(missing)}')


def row_title(name: str, *unsaid: str) -> str:
    """Return the name of a row in the tables: `AFT-conv ln` for conv_ln; parts that are unsaid are left out."""
    kind, *rest = name.split('_')
    return ' '.join([TITLES.get(kind, kind), *(part for part in rest if part not in unsaid)])


def write_blocks(page: Path, **blocks: str) -> None:
    """Write the blocks of a page, by name.

    Raises:
        ValueError: the page lacks a marker; it is then as before.
    """
    # The package takes seconds to import, which --help does not need.
    from aft_vision.files import replacing

    text = page.read_text(encoding='utf-8')
    for name, block in blocks.items():
        text = replace_block(text, name, block)
    with replacing(page) as written:
        written.write_text(text, encoding='utf-8')


def replace_block(text: str, name: str, block: str) -> str:
    """Replace the lines between `<!-- NAME: ... -->` and `<!-- end -->`.

    Raises:
        ValueError: the text does not have these markers once.
    """
    pattern = re.compile(rf'(<!-- {name}: [^\n]* -->\n).*?(<!-- end -->)', re.DOTALL)
    found, count = pattern.subn(lambda match: f'{match[1]}\n{block}\n{match[2]}', text)
    if count != 1:
        raise ValueError(f'expected one block from <!-- {name}: ... --> to <!-- end -->, got {count}')
    return found


def spread(values: Sequence[float]) -> str:
    """Format mean and standard deviation."""
    deviation = f' +- {statistics.stdev(values):.2f}' if len(values) > 1 else ''
    return f'{statistics.fmean(values):.2f}{deviation}'


def wrap(text: str) -> str:
    """Break a paragraph into lines, without breaking a link."""
    return textwrap.fill(text, 128, break_long_words=False, break_on_hyphens=False)
