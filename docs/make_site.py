"""Build the site of README.md and docs/ into build/site: python docs/make_site.py

The pages are copied to build/pages. The pages with config keys, commands and the Python API are generated from code.
Links to other files of the checkout become plain text, because the site has only pages. Zensical builds the site with
zensical.toml; a broken link or anchor is an error. Needs the extra `docs`.
"""

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / 'build' / 'pages'
BLOCK = re.compile(r'(^```.*?^```)', re.DOTALL | re.MULTILINE)
LINK = re.compile(r'(!?)\[([^\]]*)\]\(([^)\s]+)\)')
# An entry of the arguments in a docstring.
ENTRY = re.compile(r'^    (\*{0,2}\w[^:\n]*): ', re.MULTILINE)
# Modules of types, which are removed from signatures.
MODULE = re.compile(r'\b(?:(?:torch\.)?nn\.modules\.\w+|torch|pathlib|collections\.abc|typing)\.')
PACKAGES = ('ops', 'layers', 'models', 'data', 'visualize', 'export', 'fastformer', 'fastformer.data')
MODULES = (
    *('models.deit_transfer', 'models.harden', 'models.pyramid'),
    *('evaluate', 'likelihood', 'regularizers', 'resolution', 'sizes'),
)


def site_paths() -> dict[Path, str]:
    """Return the path on the site of each file of the checkout."""
    paths = {ROOT / name: new for name, new in (('README.md', 'index.md'), ('CHANGELOG.md', 'changelog.md'))}
    paths[ROOT / 'CONTRIBUTING.md'] = 'contributing.md'
    for path in sorted((ROOT / 'docs').rglob('*')):
        if path.suffix in ('.md', '.png', '.json', '.ipynb', '.css'):
            paths[path] = path.relative_to(ROOT / 'docs').as_posix().replace('README.md', 'index.md')
    return paths


def rewrite_links(text: str, path: Path, paths: dict[Path, str]) -> str:
    """Return the text of a page with its links rewritten for the site; links to other files become text."""

    def rewrite(link: re.Match[str]) -> str:
        file, _, heading = link[3].partition('#')
        if '://' in file or not file:
            return link[0]
        target = paths.get((path.parent / file).resolve())
        if target is None:
            return f'{link[1]}{link[2]}'
        target = os.path.relpath(target, Path(paths[path]).parent)
        return f'{link[1]}[{link[2]}]({target}{"#" if heading else ""}{heading})'

    parts = BLOCK.split(text)
    parts[::2] = [LINK.sub(rewrite, part) for part in parts[::2]]
    return ''.join(parts)


def commands_page() -> str:
    """Return the --help of every command as a page."""
    found = [*ROOT.glob('t*/*.py'), *ROOT.glob('t*/*/__main__.py')]
    files = sorted(path for path in found if 'run_command(main)' in path.read_text() and path.parent.name != 'tests')
    names = ['.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__main__') for path in files]
    console = run_module('aft_vision_cli', '--help').strip()
    head = f'# Commands\n\n```text\n{console}\n```\n\nThe `--help` of every command, by the name of its module.'
    return outputs_page(head, names, '--help')


def keys_page() -> str:
    """Return the --keys of every trainer as a page."""
    names = [f'train.{name}' for name in ('imagenet', 'convert', 'pixel', 'char', 'recall', 'fastformer')]
    about = 'Set a key in a YAML file of configs/ or on the command line as `section.key=value`.'
    return outputs_page(f'# Keys of an experiment\n\n{about} This is what `--keys` prints.', names, '--keys')


def outputs_page(head: str, names: Sequence[str], option: str) -> str:
    """Return a page with what modules print with an option."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        printed = list(pool.map(lambda name: run_module(name, option), names))
    sections = [f'## {name}\n\n```text\n{text.strip()}\n```' for name, text in zip(names, printed, strict=True)]
    return '\n\n'.join([head, *sections]) + '\n'


def run_module(*words: str) -> str:
    """Return the output of `python -m WORDS`."""
    environment = {**os.environ, 'COLUMNS': '100'}
    command = [sys.executable, '-m', *words]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


def api_page() -> str:
    """Return a page with the signatures and docstrings of the public API."""
    sections = [
        '# Python API',
        'Signatures and docstrings, module by module. The models are `timm.create_model` names.',
    ]
    for name in (*PACKAGES, *MODULES):
        module = importlib.import_module(f'aft_vision.{name}')
        sections += [f'## aft_vision.{name}', inspect.getdoc(module) or '']
        for public, value in public_names(module):
            sections += [f'### {public}', f'```python\n{signature(public, value)}\n```', format_docstring(value)]
    return '\n\n'.join(section for section in sections if section) + '\n'


def public_names(module: ModuleType) -> list[tuple[str, Callable[..., object]]]:
    """List the documented functions and classes of a module, or those that a package exports."""
    is_package = hasattr(module, '__path__')
    values = [(n, v) for n, v in vars(module).items() if inspect.isfunction(v) or inspect.isclass(v)]
    ours = [(n, v) for n, v in values if v.__module__.startswith(module.__name__ if is_package else 'aft_vision')]
    return [(n, v) for n, v in ours if not n.startswith('_') and (is_package or v.__module__ == module.__name__)]


def signature(name: str, value: Callable[..., object]) -> str:
    """Return a signature, with one argument per line if it is long."""
    if inspect.isclass(value) and issubclass(value, Exception):
        return f'class {name}'
    found = inspect.signature(value)
    line = tidy_types(f'{name}{found}')
    if len(line) <= 100:
        return line
    arguments = [tidy_types(str(each)) for each in found.parameters.values()]
    return f'{name}(\n' + ''.join(f'    {each},\n' for each in arguments) + ')'


def tidy_types(text: str) -> str:
    """Return a signature with short names of types and functions, and without addresses."""
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r'\1', text)
    return MODULE.sub('', re.sub(r'<function .*? at 0x\w+>', '...', text))


def format_docstring(value: object) -> str:
    """Return a docstring as Markdown, with its sections as lists."""
    text = inspect.getdoc(value) or ''
    head, *sections = re.split(r'^(Args|Attributes|Returns|Raises|Yields):\n', text, flags=re.MULTILINE)
    parts = [head]
    for title, content in zip(sections[::2], sections[1::2], strict=True):
        entries = ENTRY.sub(lambda entry: f'* `{entry[1]}`: ', content)
        parts.append(
            f'**{title}**\n\n{inspect.cleandoc(entries)}' if title == 'Returns' else f'**{title}**\n\n{entries}'
        )
    return '\n\n'.join(part.strip('\n') for part in parts)


# Generated pages by their names on the site.
GENERATED = {
    'reference/api.md': api_page,
    'reference/commands.md': commands_page,
    'reference/config_keys.md': keys_page,
}


def write_pages() -> None:
    """Write all pages of the site as Markdown."""
    shutil.rmtree(PAGES, ignore_errors=True)
    paths = site_paths()
    for path, name in paths.items():
        new = PAGES / name
        new.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == '.md':
            new.write_text(rewrite_links(path.read_text(), path, paths))
        else:
            shutil.copyfile(path, new)
    for name, make_page in GENERATED.items():
        (PAGES / name).write_text(make_page())


if __name__ == '__main__':
    write_pages()
    sys.exit(subprocess.run([sys.executable, '-m', 'zensical', 'build', '--clean', '--strict'], cwd=ROOT).returncode)
