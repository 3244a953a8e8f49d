"""One file from several modules: definitions, and all that they import from their package."""

import ast
import builtins
import importlib.util
import symtable
import sys
from collections.abc import Mapping
from pathlib import Path

# Of the source that is written.
LINE_LENGTH = 120


def inline(*roots: str, replace: Mapping[str, str] | None = None) -> str:
    """Return the source of definitions with everything that they need from their own package.

    Definitions follow what they use, otherwise in the order of the roots and of their modules. Only functions, classes
    and constants can be imported, each by its own name.

    Args:
        roots: 'package.module' for all definitions of a module, or 'package.module:name' for one.
        replace: Other source text of definitions, by name; what only the replaced text used is left out.

    Returns:
        Imports of other packages, then definitions; without the docstrings of modules.

    Raises:
        ValueError: a name that is used has an import of another kind, or none and no definition at the top of its
            module; or two modules define the same name.
    """
    inliner = _Inliner(roots[0].partition('.')[0], replace or {})
    for root in roots:
        module, _, name = root.partition(':')
        for definition in [name] if name else inliner.read(module).definitions:
            inliner.add(module, definition)
    # One blank line before a constant, two before a function or class.
    gap = '\n\n\n' if inliner.texts[0].startswith(('def ', 'class ', '@')) else '\n\n'
    return inliner.imports() + gap + '\n\n\n'.join(inliner.texts) + '\n'


class _Source:
    """The definitions of a module, and the names that it imports."""

    def __init__(self, module: str) -> None:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ValueError(f'expected a module with a file, got {module}')
        text = Path(spec.origin).read_text(encoding='utf-8')
        parents = [*(module if spec.submodule_search_locations else module.rpartition('.')[0]).split('.')]
        self.lines = text.splitlines()
        self.definitions: dict[str, ast.stmt] = {}
        self.imported: dict[str, tuple[str, str | None]] = {}
        # `import a.b` binds a, and may do so beside `import a`.
        self.dotted: dict[str, str] = {}
        for node in ast.parse(text).body:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    self.definitions[name] = node
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    self.definitions[name] = node
                case ast.ImportFrom(level=level):
                    base = parents[: len(parents) - level + 1] if level else []
                    source = '.'.join([*base, *filter(None, [node.module])])
                    for alias in node.names:
                        self.imported[alias.asname or alias.name] = source, alias.name
                case ast.Import():
                    for alias in node.names:
                        parent, _, last = alias.name.rpartition('.')
                        if parent and not alias.asname:
                            self.dotted[alias.name.partition('.')[0]] = alias.name
                        else:
                            # `import a.b as c` is `from a import b as c`.
                            found = (parent, last) if parent else (alias.name, None)
                            self.imported[alias.asname or alias.name] = found

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
        needed = _global_names(symtable.symtable(text, module, 'exec'))
        for other in dict.fromkeys(used):
            if other in source.dotted and other in needed:
                dotted = source.dotted[other]
                raise ValueError(
                    f'expected `import {dotted} as ...`, got `import {dotted}` in {module}, used by {name}'
                )
            if other in source.definitions:
                self.add(module, other)
            elif other in source.imported:
                self.follow(other, *source.imported[other])
            elif other in needed and not hasattr(builtins, other):
                raise ValueError(
                    f'expected an import or a definition of {other}, used by {name}, at the top of {module}, not in a '
                    'statement such as `if`, `try` or an assignment of several names; got none'
                )
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
        plain: dict[str, list[str]] = {}
        lines: list[tuple[bool, bool, str, str]] = []
        for name, (module, original) in self.external.items():
            foreign = module.partition('.')[0] not in sys.stdlib_module_names
            if original is None:
                lines.append((foreign, False, module, f'import {module}' + (f' as {name}' if name != module else '')))
            elif name != original:
                # After those of the same module by their own names.
                lines.append((foreign, True, f'{module} {name}', f'from {module} import {original} as {name}'))
            else:
                plain.setdefault(module, []).append(name)
        for module, names in plain.items():
            foreign = module.partition('.')[0] not in sys.stdlib_module_names
            names.sort(key=_isort_key)
            line = f'from {module} import {", ".join(names)}'
            if len(line) > LINE_LENGTH:
                line = f'from {module} import (\n' + ''.join(f'    {name},\n' for name in names) + ')'
            lines.append((foreign, True, module, line))
        groups = ['\n'.join(line for *key, line in sorted(lines) if key[0] == foreign) for foreign in (False, True)]
        return '\n\n'.join(filter(None, groups))


def _global_names(table: symtable.SymbolTable) -> set[str]:
    # Names that a text uses and does not bind itself.
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    return names.union(*(_global_names(child) for child in table.get_children()))


def _isort_key(name: str) -> tuple[int, str]:
    # Constants, then classes, then functions.
    return 0 if name.isupper() else 1 if name[0].isupper() else 2, name.lower()
