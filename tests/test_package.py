"""Released files: the wheel and the sdist, and agreement of those that describe a release."""

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from shutil import copy, copytree, ignore_patterns
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
import timm
import yaml
from safetensors.torch import save_file
from try_wheel import COUNT, first_examples

import aft_vision

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
PLACEHOLDER = 'aft_vision/weights/aft_conv_nano.imagenette.safetensors'
BUILD = "from setuptools import build_meta; build_meta.build_sdist('dist'); build_meta.build_wheel('dist')"


@pytest.fixture(scope='module')
def built(tmp_path_factory) -> SimpleNamespace:
    """The paths in the wheel and in the sdist of a copy of the checkout with weights."""
    tree = tmp_path_factory.mktemp('package') / 'checkout'
    for folder in ('aft_vision', 'aft_vision_cli', 'train', 'tools', 'configs', 'tests'):
        copytree(ROOT / folder, tree / folder, ignore=ignore_patterns('__pycache__', 'assets'))
    for name in ('pyproject.toml', 'setup.py', 'MANIFEST.in', 'README.md', 'CHANGELOG.md', 'LICENSE'):
        copy(ROOT / name, tree)
    place = tree / PLACEHOLDER
    if not place.exists():
        save_file({key: x.half() for key, x in timm.create_model('aft_conv_nano').state_dict().items()}, place)
    subprocess.run([sys.executable, '-c', BUILD], cwd=tree, check=True, capture_output=True)
    (wheel,), (sdist,) = tree.glob('dist/*.whl'), tree.glob('dist/*.tar.gz')
    with ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
        archive.extractall(tree / 'installed')
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition('/')[2] for name in archive.getnames()}
    return SimpleNamespace(wheel=in_wheel, sdist=in_sdist, installed=tree / 'installed')


def files_of(*folders: str) -> set[str]:
    found = (path for folder in folders for path in (ROOT / folder).rglob('*') if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in found if '__pycache__' not in path.parts}


def files_of_the_package() -> set[str]:
    return files_of('aft_vision') | {PLACEHOLDER}


def files_of_the_commands() -> set[str]:
    return files_of('train', 'tools', 'configs')


def test_the_wheel_has_every_file_of_the_package_and_of_the_commands_and_no_other(built):
    information = f'aft_vision-{aft_vision.__version__}.dist-info/'
    commands = files_of('aft_vision_cli') | {f'aft_vision_cli/{name}' for name in files_of_the_commands()}
    assert {name for name in built.wheel if not name.startswith(information)} == files_of_the_package() | commands
    assert information + 'licenses/LICENSE' in built.wheel
    # What the names above stand for.
    assert built.wheel >= {'aft_vision/py.typed', 'aft_vision_cli/configs/finetune.yaml', 'aft_vision_cli/train/run.py'}
    assert {Path(name).suffix for name in built.wheel} >= {'.py', '.cpp', '.h', '.yaml'}


@pytest.mark.parametrize('arguments', [['--help'], ['predict', '--help'], ['train-text', '--help'], ['train']])
def test_the_console_command_of_the_wheel_runs_its_own_commands(built, arguments, tmp_path):
    module, _, function = PROJECT['scripts']['aft-vision'].partition(':')
    code = f'import sys; sys.path[0] = {str(built.installed)!r}; from {module} import {function}; {function}()'
    done = subprocess.run([sys.executable, '-c', code, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert f'aft-vision {arguments[0]}'.removesuffix(' --help') in done.stdout or '--config finetune;' in done.stderr
    assert 'Traceback' not in done.stderr


def test_the_sdist_has_what_the_wheel_is_built_from_and_no_part_of_the_tests(built):
    assert built.sdist >= files_of_the_package() | files_of('aft_vision_cli') | files_of_the_commands() | {
        'pyproject.toml',
        'setup.py',
        'README.md',
        'CHANGELOG.md',
        'LICENSE',
    }
    assert not [name for name in built.sdist if name.partition('/')[0] == 'tests']


def test_changelog_and_citation_have_the_version():
    assert PROJECT['dynamic'] == ['version']
    newest = re.search(r'^## (\S+) - (Unreleased|\d{4}-\d\d-\d\d)$', (ROOT / 'CHANGELOG.md').read_text(), re.MULTILINE)
    assert newest[1] == aft_vision.__version__
    citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
    assert citation['version'] == aft_vision.__version__
    assert citation['license'] == PROJECT['license']
    assert citation['authors'] == PROJECT['authors']


def test_the_pythons_that_the_package_declares_are_those_that_are_tested():
    workflow = yaml.safe_load((ROOT / '.github' / 'workflows' / 'check.yml').read_text())
    tested = workflow['jobs']['check']['strategy']['matrix']['python']
    prefix = 'Programming Language :: Python :: 3.'
    assert [f'3.{x.removeprefix(prefix)}' for x in PROJECT['classifiers'] if x.startswith(prefix)] == tested
    assert PROJECT['requires-python'] == f'>={tested[0]}'


def test_the_oldest_torch_and_timm_that_the_package_takes_are_those_that_are_tested():
    tested = dict(
        re.findall(r'(\w+)==([\d.]+)', re.search(r'^OLDEST := (.*)', (ROOT / 'Makefile').read_text(), re.M)[1])
    )
    floors = dict(re.findall(r'(\w+)>=([\d.]+)', ' '.join(PROJECT['dependencies'])))
    assert floors == {name: tested[name] for name in ('torch', 'timm')}
    workflow = yaml.safe_load((ROOT / '.github' / 'workflows' / 'check.yml').read_text())
    assert [step['run'] for step in workflow['jobs']['oldest']['steps'] if 'run' in step] == [
        'make oldest PYTHON=python PYTEST_ARGS=-q'
    ]


def test_only_what_publishes_may_ask_for_a_token_and_it_waits_for_the_checks():
    workflow = yaml.safe_load((ROOT / '.github' / 'workflows' / 'check.yml').read_text())
    asks = {name for name, job in workflow['jobs'].items() if 'id-token' in job.get('permissions', {})}
    assert asks == {'publish'}
    assert workflow['permissions'] == {'contents': 'read'}
    assert workflow['jobs']['publish']['needs'] == ['check', 'oldest']


def test_the_files_and_commands_that_contributing_names_exist():
    text = (ROOT / 'CONTRIBUTING.md').read_text()
    prose = re.sub(r'^```.*?^```', '', text, flags=re.DOTALL | re.MULTILINE)
    named = [x for x in re.findall(r'`([\w./]+)`', prose) if 'NAME' not in x and re.search(r'/|\.(py|md|toml)$', x)]
    named += [link for link in re.findall(r'\]\(([^)]+)\)', prose) if '://' not in link]
    # A name without its folder stands for a file below a folder that the text speaks of.
    folders = [ROOT / name for name in ('aft_vision', 'train', 'tools')]
    lost = [x for x in named if not (ROOT / x).exists() and not any(any(y.rglob(x.strip('/'))) for y in folders)]
    assert len(named) > 20
    assert lost == []
    targets = re.search(r'^\.PHONY: (.*)', (ROOT / 'Makefile').read_text(), re.MULTILINE)[1].split()
    assert set(re.findall(r'^make (\S+)', text, re.MULTILINE)) <= set(targets)


def test_the_readme_begins_with_examples_that_need_no_checkout():
    examples = first_examples((ROOT / 'README.md').read_text())
    assert len(examples) == COUNT
    assert "timm.create_model('aft_" in examples[0]
    with pytest.raises(ValueError, match=f'expected {COUNT} examples in Python without files, got 0'):
        first_examples("```python\nmodel = load_model('runs/demo')\n```\n")
