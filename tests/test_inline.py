from pathlib import Path

import pytest

from aft_vision.inline import inline


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # A name for each test, because Python keeps the packages that it has found.
    folder = tmp_path / f'planted_{tmp_path.name}'
    folder.mkdir()
    (folder / '__init__.py').write_text('')
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_a_module_gets_what_it_imports_from_its_package_and_only_that(package):
    (package / 'base.py').write_text(
        'import math\n\n# Why.\nHALF = 0.5\nUNUSED = 1\n\n\ndef unused():\n    return math.pi\n\n\n'
        'def root(x):\n    return math.sqrt(x) * HALF\n'
    )
    (package / 'again.py').write_text('from .base import root\n')
    (package / 'top.py').write_text(
        f'from fractions import Fraction as F\n\nfrom {package.name}.again import root\n\n\n'
        'class Top:\n    def value(self):\n        return F(root(4.0))\n'
    )
    text = inline(f'{package.name}.top')
    assert package.name not in text
    assert 'unused' not in text.lower()
    assert '# Why.\nHALF = 0.5' in text
    found: dict = {}
    exec(text, found)
    assert found['Top']().value() == 1


def test_one_definition_comes_with_its_decorators_and_without_its_neighbours(package):
    (package / 'top.py').write_text(
        'from . import base\n\nTABLE = {}\n\n\ndef register(f):\n    TABLE[f.__name__] = f\n    return f\n\n\n'
        '@register\ndef a():\n    return 1\n\n\n@register\ndef b():\n    return base\n'
    )
    found: dict = {}
    exec(inline(f'{package.name}.top:a'), found)
    assert list(found['TABLE']) == ['a']
    assert found['a']() == 1


def test_replaced_text_decides_what_is_needed(package):
    (package / 'top.py').write_text('def a():\n    return 1\n\n\ndef b():\n    return 2\n\n\nTABLE = [a, b]\n')
    (package / 'root.py').write_text(f'from {package.name}.top import TABLE\n\n\ndef first():\n    return TABLE[0]()\n')
    found: dict = {}
    exec(inline(f'{package.name}.root', replace={'TABLE': 'TABLE = [b]'}), found)
    assert found['first']() == 2
    assert 'a' not in found


def test_names_of_a_definition_itself_and_builtins_need_no_import(package):
    (package / 'top.py').write_text(
        'import xml.dom\n\n\ndef total(xml, *others, **more):\n    import math\n\n'
        '    def inner(a):\n        return a\n\n'
        '    return sum(y for x in [xml, *others] if (y := inner(x))) + math.floor(more["z"]) + len(__name__) * 0\n'
    )
    found: dict = {'__name__': 'alone'}
    exec(inline(f'{package.name}.top'), found)
    assert found['total'](1, 2, z=3.5) == 6


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('from {package}.base import f as g\n\nx = g()', 'by its own name, got f as g'),
        ('import {package}.base as base\n\nx = base.f()', 'expected a function, class or constant, got .*base'),
        ('from {package} import base\n\nx = base.f()', 'expected a function, class or constant, got .*base'),
        (
            'import os.path\n\n\ndef x():\n    return os.path.sep',
            'expected `import os.path as ...`, got `import os.path`',
        ),
        ('import os\nimport os.path\n\nx = os.path.sep', 'expected `import os.path as ...`, got `import os.path`'),
        ('from math import *\n\nx = pi', 'an import or a definition of pi, used by x'),
        ('if True:\n    def a():\n        return 1\n\nx = a()', 'an import or a definition of a, used by x'),
        ('try:\n    import math\nexcept ImportError:\n    pass\n\nx = math.pi', 'a definition of math, used by x'),
        ('A, B = 1, 2\n\n\nclass x:\n    def f(self):\n        return A', 'an import or a definition of A, used by x'),
        (
            'from {package}.base import f\nfrom {package}.other import g\n\nx = f() + g()',
            r'one definition of _h, got those of .*base and .*other',
        ),
    ],
)
def test_what_cannot_be_copied_is_rejected(package, line, message):
    for name, function in (('base', 'f'), ('other', 'g')):
        (package / f'{name}.py').write_text(f'def _h():\n    return 1\n\n\ndef {function}():\n    return _h()\n')
    (package / 'top.py').write_text(line.format(package=package.name))
    with pytest.raises(ValueError, match=message):
        inline(f'{package.name}.top')
