"""Enforces the direction of imports: ops -> layers -> models -> train | tools, and where a heavy library may be used.

A name is allowed if it equals one of a rule's prefixes or lies below it. "Lazily" means inside a function, or under
``if TYPE_CHECKING``. The standard library and FREE are allowed anywhere; a library that no rule names is allowed
lazily, so that ``import aft_vision`` needs nothing beyond its four dependencies.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ('aft_vision', 'train', 'tools', 'tests')
FREE = ('torch', 'torchvision', 'numpy', 'tqdm', 'safetensors', 'PIL', 'yaml', *sys.stdlib_module_names)
HEAVY = ('timm', 'transformers', 'ffcv', 'triton', 'matplotlib', 'omegaconf', 'einops')
TEXT = ('transformers', 'tokenizers', 'datasets', 'nltk', 'rouge_score', 'sklearn', 'pandas')
AFT_FOLDERS = ('aft_vision.ops', 'aft_vision.layers', 'aft_vision.models', 'aft_vision.data')


@dataclass(frozen=True)
class Rule:
    """The imports that a module and everything below it may have: anywhere in the file, or only lazily."""

    anywhere: tuple[str, ...]
    lazily: tuple[str, ...] = ()


# They need Triton, which a machine may lack: they are imported where their kernels run.
TRITON_MODULES = tuple(
    f'aft_vision.ops.{name}'
    for name in (
        *('full.triton', 'full.kernels', 'simple.triton', 'simple.kernels'),
        *('conv.triton', 'conv.kernels', 'conv.repair_kernels', 'conv.direct_kernels'),
        'conv.whole_kernels',
        'conv.line_kernels',
        'axial.triton',
        *('causal.local_triton', 'causal.local_kernels', 'causal.local_repair_kernels'),
        *('causal.local_backward_kernels', 'causal.simple_triton', 'causal.simple_kernels'),
        *('common.kernels', 'common.trial_kernel', 'common.tuner'),
    )
)
ABOVE_MODELS = Rule((*AFT_FOLDERS, 'timm', 'einops'), lazily=('matplotlib',))
RULES = {  # the longest matching prefix decides
    'aft_vision': Rule(('aft_vision.models',)),
    'aft_vision.__main__': Rule(('aft_vision.plugins',)),
    'aft_vision.errors': Rule(()),
    'aft_vision.ops': Rule(('aft_vision.ops', 'aft_vision.errors'), lazily=('triton',)),
    'aft_vision.ops.reference': Rule(('einops',)),
    **dict.fromkeys(TRITON_MODULES, Rule(('aft_vision.ops', 'aft_vision.errors', 'triton'))),
    'aft_vision.layers': Rule(('aft_vision.layers', 'aft_vision.ops', 'aft_vision.errors', 'timm.layers')),
    'aft_vision.models': Rule(
        (*(f'aft_vision.{name}' for name in ('models', 'layers', 'ops', 'errors', 'files', 'modes', 'sizes')), 'timm')
    ),
    'aft_vision.data': Rule(('aft_vision.data', 'aft_vision.files', 'timm.data', 'einops')),
    'aft_vision.data.ffcv': Rule(('aft_vision.data', 'aft_vision.files', 'timm.data', 'einops', 'ffcv', 'numba')),
    'aft_vision.fastformer': Rule(('aft_vision.fastformer', 'aft_vision.modes', 'einops', *TEXT)),
    'aft_vision.cores': Rule(()),
    'aft_vision.devices': Rule(('aft_vision.cores', 'aft_vision.errors')),
    'aft_vision.evaluate': Rule(
        (*ABOVE_MODELS.anywhere, *(f'aft_vision.{name}' for name in ('devices', 'files', 'modes', 'sizes', 'timing')))
    ),
    'aft_vision.files': Rule(()),
    'aft_vision.export': Rule(
        (*ABOVE_MODELS.anywhere, *(f'aft_vision.{name}' for name in ('errors', 'export', 'files', 'sizes', 'timing')))
    ),
    # Written into exported folders, where transformers is and timm may not be.
    'aft_vision.export.modeling_aft_vision': Rule(('transformers',)),
    'aft_vision.modes': Rule(()),
    'aft_vision.plugins': Rule(()),
    'aft_vision.regularizers': Rule((*ABOVE_MODELS.anywhere, 'aft_vision.timing')),
    'aft_vision.likelihood': Rule((*ABOVE_MODELS.anywhere, 'aft_vision.evaluate')),
    'aft_vision.resolution': Rule((*ABOVE_MODELS.anywhere, 'aft_vision.sizes', 'aft_vision.visualize')),
    'aft_vision.sizes': Rule(('timm', 'aft_vision.layers')),
    'aft_vision.timing': Rule(('aft_vision.devices',)),
    'aft_vision.visualize': Rule(
        (*ABOVE_MODELS.anywhere, *(f'aft_vision.{name}' for name in ('files', 'modes', 'sizes', 'visualize'))),
        lazily=('matplotlib',),
    ),
    'train': Rule(('train', 'aft_vision', 'timm', 'omegaconf')),
    'train.fastformer': Rule(('train', 'aft_vision', 'accelerate', *TEXT)),
    # Commands parse their arguments before any import that takes seconds, as aft_vision's.
    'train.command_line': Rule((), lazily=('aft_vision.plugins',)),
    'tools': Rule(('tools', 'train.command_line', 'aft_vision', 'timm', 'matplotlib')),
    # FFCV's own Loader is measured next to ours.
    'tools.benchmark.loader': Rule(('tools', 'aft_vision', 'timm'), lazily=('ffcv',)),
}
# Modules with few readers: the oracle of the tests, and the kernels in Triton.
READERS: dict[str, tuple[str, ...]] = {'aft_vision.ops.reference': ('tests',)}
LAZY_MODULES: dict[str, tuple[str, ...]] = dict.fromkeys(TRITON_MODULES, TRITON_MODULES)


@dataclass(frozen=True)
class Import:
    """One imported name, absolute and dotted, and where it stands."""

    target: str
    line: int
    lazy: bool


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + '.') for prefix in prefixes)


def is_lazy(node: ast.AST) -> bool:
    type_checking = isinstance(node, ast.If) and ast.unparse(node.test) in ('TYPE_CHECKING', 'typing.TYPE_CHECKING')
    return type_checking or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def imported_names(node: ast.AST, package: list[str]) -> list[str]:
    """The absolute names that a statement or a call like ``import_module('timm')`` imports."""
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom():
            base = package[: len(package) - node.level + 1] if node.level else []
            return ['.'.join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
        case ast.Call(args=[ast.Constant(value=str(name)), *_]):
            return [name] if ast.unparse(node.func).rpartition('.')[2] in ('import_module', '__import__') else []
    return []


def find_imports(node: ast.AST, package: list[str], lazy: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for name in imported_names(child, package):
            yield Import(name, getattr(child, 'lineno', 0), lazy)
        yield from find_imports(child, package, lazy or is_lazy(child))


def is_allowed(module: str, found: Import) -> bool:
    for target, readers in READERS.items():
        if within(found.target, (target,)) and not within(module, readers):
            return False
    for target, readers in LAZY_MODULES.items():
        if within(found.target, (target,)) and not within(module, readers) and not found.lazy:
            return False
    rule = RULES[max((prefix for prefix in RULES if within(module, (prefix,))), key=len)]
    if within(found.target, rule.anywhere):
        return True
    if found.lazy and within(found.target, rule.lazily):
        return True
    return within(found.target, FREE) or (found.lazy and not within(found.target, OURS + HEAVY))


@cache
def read_modules(root: Path) -> list[tuple[str, Path, list[Import]]]:
    """The name, the file and the imports of each module under root/{aft_vision,train,tools}."""
    found = []
    for path in sorted(path for folder in OURS[:3] for path in (root / folder).rglob('*.py')):
        parts = list(path.relative_to(root).with_suffix('').parts)
        package = parts[:-1]
        module = '.'.join(package if parts[-1] == '__init__' else parts)
        found.append((module, path, list(find_imports(ast.parse(path.read_text(encoding='utf-8')), package))))
    return found


def violations(root: Path) -> list[str]:
    """One line for each import that no rule allows."""
    found = []
    for module, path, items in read_modules(root):
        for item in items:
            if not is_allowed(module, item):
                place = 'inside a function' if item.lazy else 'at the top'
                found.append(f'{path.relative_to(root)}:{item.line}: {module} imports {item.target} {place}')
    return found


def cycles(root: Path) -> list[list[str]]:
    """The groups of modules that import each other, wherever in a file; a package does not stand for its modules."""
    modules = {module: [item.target for item in items] for module, _, items in read_modules(root)}
    edges = {
        module: {name if name in modules else name.rpartition('.')[0] for name in names} & modules.keys()
        for module, names in modules.items()
    }
    reached = {module: reachable(module, edges) for module in edges}
    groups = {frozenset({other for other in reached[module] if module in reached[other]}) for module in edges}
    return sorted(sorted(group) for group in groups if group)


def reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    found, ahead = set(), [*edges[start]]
    while ahead:
        module = ahead.pop()
        if module not in found:
            found.add(module)
            ahead += edges[module]
    return found


def test_every_import_follows_the_table():
    assert violations(ROOT) == []


def test_no_modules_import_each_other():
    assert cycles(ROOT) == []


def test_what_a_trainer_builds_does_not_know_its_experiment():
    parts = 'checkpoint diagnosis distill engine log objective regularize schedule signals state'.split()
    experiments = {'train.schema.Config', 'train.schema.Experiment'}
    knows = {module: bool({item.target for item in items} & experiments) for module, _, items in read_modules(ROOT)}
    assert knows['train.build']
    assert not any(knows[f'train.{name}'] for name in parts)


def test_every_part_of_the_tree_has_a_rule_of_its_own():
    modules = {f'aft_vision.{path.stem}' for path in (ROOT / 'aft_vision').iterdir() if path.suffix == '.py'}
    modules |= {f'aft_vision.{path.parent.name}' for path in (ROOT / 'aft_vision').glob('*/__init__.py')}
    assert modules - {'aft_vision.__init__'} <= set(RULES)


@pytest.mark.parametrize(
    ('file', 'source'),
    [
        ('aft_vision/ops/__init__.py', 'from ..models import aft_vit'),
        ('aft_vision/layers/block.py', 'def f():\n    from aft_vision.models import aft_vit'),
        ('aft_vision/data/photos.py', "import importlib\nimportlib.import_module('ffcv')"),
        ('tools/report.py', 'from train.engine import fit'),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, source):
    plant(tmp_path, file, source)
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize('back', ['from .a import f', 'def f():\n    from aft_vision.ops import a'])
def test_a_planted_cycle_is_found(tmp_path, back):
    plant(tmp_path, 'aft_vision/ops/a.py', 'if TYPE_CHECKING:\n    from aft_vision.ops.b import g')
    plant(tmp_path, 'aft_vision/ops/b.py', 'import aft_vision.ops.c')
    plant(tmp_path, 'aft_vision/ops/c.py', back)
    assert cycles(tmp_path) == [['aft_vision.ops.a', 'aft_vision.ops.b', 'aft_vision.ops.c']]


def plant(root: Path, file: str, source: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding='utf-8')
