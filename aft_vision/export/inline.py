"""One file from a module: every definition that it imports from a package is copied into it."""

import ast
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path


def inline(module: str, replace: Mapping[str, str] | None = None) -> str:
    """Return the source of a module with everything that it needs from its own package.

    Definitions follow what they use, in the order of the module. Only functions, classes and constants can be
    imported, each by its own name.

    Args:
        module: dotted name, such as 'aft_vision.export.modeling_aft_vision'.
        replace: other source text of constants and functions, by name; what only the replaced text used is left out.

    Returns:
        Imports of other packages, then definitions; without the docstring of the module.

    Raises:
        ValueError: an import has another form, or two modules define the same name.
    """
    inliner = _Inliner(module.partition('.')[0], replace or {})
    for name in inliner.read(module).definitions:
        inliner.add(module, name)
    return inliner.imports() + '\n\n' + '\n\n\n'.join(inliner.texts) + '\n'


class _Source:
    """The definitions of a module, and the names that it imports."""

    def __init__(self, module: str) -> None:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ValueError(f'expected a module with a file, got {module}')
        text = Path(spec.origin).read_text(encoding='utf-8')
        self.lines = text.splitlines()
        self.definitions: dict[str, ast.stmt] = {}
        self.imported: dict[str, tuple[str, str | None]] = {}
        for node in ast.parse(text).body:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    self.definitions[name] = node
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    self.definitions[name] = node
                case ast.ImportFrom(module=str(source), level=0):
                    for alias in node.names:
                        self.imported[alias.asname or alias.name] = source, alias.name
                case ast.Import():
                    for alias in node.names:
                        self.imported[alias.asname or alias.name] = alias.name, None

    def text(self, name: str) -> str:
        """Return the source of a definition, with its decorators and the comment above it."""
        node = self.definitions[name]
        first = min([node.lineno, *(x.lineno for x in getattr(node, 'decorator_list', []))]) - 1
        while first and self.lines[first - 1].startswith('#'):
            first -= 1
        return '\n'.join(self.lines[first : node.end_lineno])


class _Inliner:
    """Collects definitions and the imports of other packages that they need."""

    def __init__(self, package: str, replace: Mapping[str, str]) -> None:
        self.package, self.replace = package, replace
        self.sources: dict[str, _Source] = {}
        self.origins: dict[str, str] = {}
        self.texts: list[str] = []
        self.external: dict[str, tuple[str, str | None]] = {}

    def read(self, module: str) -> _Source:
        if module not in self.sources:
            self.sources[module] = _Source(module)
        return self.sources[module]

    def add(self, module: str, name: str) -> None:
        """Add a definition after those that it uses."""
        if name in self.origins:
            if self.origins[name] != module:
                raise ValueError(f'expected one definition of {name}, got those of {self.origins[name]} and {module}')
            return
        self.origins[name] = module
        source = self.read(module)
        text = self.replace.get(name) or source.text(name)
        used = [node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
        for other in dict.fromkeys(used):
            if other in source.definitions:
                self.add(module, other)
            elif other in source.imported:
                self.follow(other, *source.imported[other])
        self.texts.append(text)

    def follow(self, name: str, module: str, original: str | None) -> None:
        """Add an imported name: its definition, or the import if it is of another package."""
        if module.partition('.')[0] != self.package:
            if self.external.setdefault(name, (module, original)) != (module, original):
                raise ValueError(f'expected one import as {name}, got {self.external[name]} and {(module, original)}')
            return
        if original != name:
            raise ValueError(f'expected `from {module} import ...` by its own name, got {original or module} as {name}')
        source = self.read(module)
        if name in source.definitions:
            self.add(module, name)
        elif name in source.imported:
            self.follow(name, *source.imported[name])
        else:
            raise ValueError(f'expected a function, class or constant, got {module}.{name}')

    def imports(self) -> str:
        """Return the import statements, those of the standard library first."""
        groups: tuple[list[str], list[str]] = [], []
        modules: dict[str, list[str]] = {}
        for name, (module, original) in self.external.items():
            group = groups[module.partition('.')[0] not in sys.stdlib_module_names]
            if original is None:
                group.append(f'import {module}' + (f' as {name}' if name != module else ''))
            else:
                modules.setdefault(module, []).append(original + (f' as {name}' if name != original else ''))
        for group in groups:
            group.sort()
        for module in sorted(modules):
            group = groups[module.partition('.')[0] not in sys.stdlib_module_names]
            group.append(f'from {module} import {", ".join(sorted(modules[module], key=_isort_key))}')
        return '\n\n'.join('\n'.join(group) for group in groups if group)


def _isort_key(name: str) -> tuple[int, str]:
    # Constants, then classes, then functions.
    return 0 if name.isupper() else 1 if name[0].isupper() else 2, name.lower()
