"""Every equation of the papers has one function, a slow twin, a test that uses the twin, and a line in the index."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

from aft_vision import ops
from aft_vision.ops import reference
from aft_vision.ops.declaration import OPERATIONS

ROOT = Path(__file__).parents[1]
OPS = ROOT / 'aft_vision' / 'ops'
EQUATION = re.compile(r'AFT Eq\. (\d+)')
DOTTED_NAME = re.compile(r'`((?:\w+\.)+\w+)`')

EQUATIONS = (2, 4, 5, 6, 7, 8, 9, 10)


@cache
def functions_of(path: Path) -> dict[str, set[int]]:
    """The public functions of a file, each with the equations that its first docstring line names."""
    tree = ast.parse(path.read_text(encoding='utf-8'))
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith('_')]
    first_lines = {f.name: (ast.get_docstring(f) or '').partition('\n')[0] for f in functions}
    return {name: {int(number) for number in EQUATION.findall(line)} for name, line in first_lines.items()}


@cache
def functions_by_equation() -> dict[int, set[str]]:
    """Names of the public functions of aft_vision.ops, the reference apart, by the equation that they carry."""
    files = [path for path in OPS.rglob('*.py') if path.name != 'reference.py']
    carried = [(name, number) for path in files for name, numbers in functions_of(path).items() for number in numbers]
    return {equation: {name for name, number in carried if number == equation} for equation in EQUATIONS}


@cache
def reference_names_used(path: Path) -> set[str]:
    """Names that a test file takes from the reference: reference.NAME, an import, or getattr(reference, ...)."""
    text = path.read_text(encoding='utf-8')
    if 'reference' not in text:
        return set()
    tree, used = ast.parse(text), set[str]()
    by_name = False
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id='reference')) | ast.Attribute(value=ast.Attribute(attr='reference')):
                used.add(node.attr)
            case ast.ImportFrom(module='aft_vision.ops.reference'):
                used.update(alias.name for alias in node.names)
            case ast.Call(func=ast.Name(id='getattr'), args=[ast.Name(id='reference') | ast.Attribute(), *_]):
                by_name = by_name or 'reference' in ast.unparse(node.args[0])
    if by_name:
        used |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        used |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    return used


@cache
def names_called_in_reference() -> set[str]:
    tree = ast.parse((OPS / 'reference.py').read_text(encoding='utf-8'))
    return {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


@cache
def index_of_equations() -> dict[int, set[str]]:
    """The table of docs/reference/numerics.md: the first cell of a row names equations, the others their functions."""
    index: dict[int, set[str]] = {}
    for line in (ROOT / 'docs' / 'reference' / 'numerics.md').read_text(encoding='utf-8').splitlines():
        if not line.lstrip().startswith('|'):
            continue
        first, *others = line.strip().strip('|').split('|')
        for equation in EQUATION.findall(first):
            index.setdefault(int(equation), set()).update(DOTTED_NAME.findall('|'.join(others)))
    return index


def resolve(dotted: str) -> object:
    """The object that a dotted name below aft_vision stands for; a module on the way is imported."""
    found: object = importlib.import_module('aft_vision')
    path = 'aft_vision'
    for part in dotted.removeprefix('aft_vision.').split('.'):
        path = f'{path}.{part}'
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
    return found


@pytest.mark.parametrize('equation', EQUATIONS)
def test_a_function_of_the_equation_has_a_twin_that_carries_it_too(equation):
    twins = {name for name, numbers in functions_of(OPS / 'reference.py').items() if equation in numbers}
    assert functions_by_equation()[equation] & twins, f'AFT Eq. {equation} begins no two docstrings of one name'


@pytest.mark.parametrize('name', OPERATIONS)
def test_an_operation_and_its_reference_have_one_name(name):
    assert callable(getattr(ops, name))
    assert callable(getattr(reference, name))


@pytest.mark.parametrize('name', sorted(functions_of(OPS / 'reference.py')))
def test_a_reference_function_is_used_by_a_test(name):
    files = [path for path in (ROOT / 'tests').rglob('*.py') if path != Path(__file__)]
    used = set().union(*(reference_names_used(path) for path in files))
    is_helper = not hasattr(ops, name) and name in names_called_in_reference()
    assert name in used or is_helper, f'no test uses reference.{name}'


@pytest.mark.parametrize('equation', EQUATIONS)
def test_the_index_of_equations_has_the_functions_that_carry_the_equation(equation):
    listed = {name.rpartition('.')[2] for name in index_of_equations().get(equation, ())}
    in_ops = {name for name in listed if hasattr(ops, name)}
    assert in_ops == {name for name in functions_by_equation()[equation] if hasattr(ops, name)}


def test_every_name_in_the_index_of_equations_exists():
    for names in index_of_equations().values():
        for name in names:
            resolve(name)
