"""Modules of others: --import, run.imports and entry points."""

import sys
from pathlib import Path

import pytest
import torch
from helpers import save_model

from aft_vision import plugins
from aft_vision.__main__ import main as run_script
from aft_vision.layers.base import MIXERS
from aft_vision.models.checkpoint import load_model
from tools.predict import main as predict
from train.config import load_config
from train.imagenet import main as train
from train.key_list import list_keys
from train.model_section import check_decoder, check_model, model_schema
from train.schema import Config

ROOT = Path(__file__).parents[1]
MIXER = """
import torch
from aft_vision.layers import AFTSimple, register_mixer
from beside import SCALE

@register_mixer
class Scaled(AFTSimple):
    name = 'scaled'

    def __init__(self, dim, reach: int = 1, **kwargs):
        super().__init__(dim, **kwargs)
        self.scale = torch.nn.Parameter(torch.full((reach,), SCALE))
"""
MODEL = 'model={name: aft_simple_nano, mixer: scaled, reach: 2, embed_dim: 16, depth: 1}'
REMEDY = 'import the module that registers it, in a command by --import MODULE_OR_FILE'


def forget() -> None:
    """Remove what the tests register and import."""
    MIXERS.pop('scaled', None)
    for name in ('scaled_mixer', 'beside', 'broken', 'installed'):
        sys.modules.pop(name, None)


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """The folder of a mixer, which is the current one, and where no other test sees what is imported."""
    (tmp_path / 'own').mkdir()
    (tmp_path / 'own' / 'scaled_mixer.py').write_text(MIXER)
    (tmp_path / 'own' / 'beside.py').write_text('SCALE = 0.5')
    monkeypatch.setattr(sys, 'path', [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield tmp_path / 'own'
    forget()
    plugins.import_entry_points.cache_clear()


def test_the_keys_of_an_imported_mixer_are_those_of_a_config(own):
    assert 'model.reach' not in {key.name for key in list_keys(Config, model_schema())}
    with pytest.raises(ValueError, match=rf"^command line: model\.reach = 2: .*'scaled' is not registered: {REMEDY}"):
        load_config('smoke/one_epoch', [MODEL])
    Path('own.yaml').write_text('base: smoke/one_epoch\nrun: {imports: [own/scaled_mixer.py]}\n')
    config = load_config('own.yaml', [MODEL, 'run.imports=[own/beside.py]'])
    assert config.run.imports == ['own/scaled_mixer.py', 'own/beside.py']
    assert config.model['reach'] == 2
    assert 'model.reach' in {key.name for key in list_keys(Config, model_schema())}


def test_names_that_no_module_has_registered_yet_are_errors_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=REMEDY):
        check_model({'name': 'a_net_of_mine'})
    with pytest.raises(ValueError, match=REMEDY):
        check_decoder({'name': 'aft_simple_char', 'mixer': 'mine', 'reach': 2})
    path = save_model(tmp_path / 'a.pth', 'a_net_of_mine', torch.nn.Linear(1, 1), {})
    with pytest.raises(ValueError, match=REMEDY):
        load_model(path)


@pytest.mark.parametrize(
    ('name', 'error', 'message'),
    [
        ('none.py', ValueError, r'got none\.py, which does not exist'),
        ('none_such', ValueError, 'got none_such, which is neither'),
        ('own.none_such', ValueError, r'got own\.none_such, which is neither'),
        ('own/broken.py', ImportError, r"own/broken\.py: No module named 'a_library_that_is_missing'"),
        ('own/random.py', ValueError, r'expected a file with a name of its own, got .*random\.py.*; rename it'),
        ('own/train.py', ValueError, r'expected a file with a name of its own, got .*train\.py.*; rename it'),
        ('own/my-mixer.py', ValueError, r'such as own_mixer\.py, got own/my-mixer\.py'),
    ],
)
def test_what_cannot_be_imported_is_an_error(own, name, error, message):
    (own / 'broken.py').write_text('import a_library_that_is_missing')
    for other in ('random', 'train', 'my-mixer'):
        (own / f'{other}.py').touch()
    with pytest.raises(error, match=message):
        plugins.import_plugins([name])


def test_a_module_is_found_in_the_current_folder_and_imported_once(own, monkeypatch):
    monkeypatch.chdir(own)
    plugins.import_plugins(['scaled_mixer', 'scaled_mixer.py', './scaled_mixer.py'])
    assert MIXERS['scaled'] is sys.modules['scaled_mixer'].Scaled


def declare(folder: Path, module: str) -> None:
    """Install a package that declares a module."""
    (folder / 'mine-1.0.dist-info').mkdir()
    (folder / 'mine-1.0.dist-info' / 'METADATA').write_text('Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n')
    (folder / 'mine-1.0.dist-info' / 'entry_points.txt').write_text(f'[aft_vision.plugins]\nmixers = {module}\n')


def test_a_command_imports_what_installed_packages_declare(own, monkeypatch, capsys):
    monkeypatch.syspath_prepend(own)
    declare(own, 'scaled_mixer')
    plugins.import_entry_points.cache_clear()
    train(['--keys'])
    assert 'model.reach=' in capsys.readouterr().out


def test_a_declared_module_that_cannot_be_imported_is_an_error_with_its_package(own, monkeypatch):
    monkeypatch.syspath_prepend(own)
    declare(own, 'a_module_that_is_missing')
    plugins.import_entry_points.cache_clear()
    with pytest.raises(ImportError, match='expected a_module_that_is_missing of the package mine, as aft_vision'):
        predict(['a.jpg', '--model', 'aft_conv_nano'])


def test_a_script_of_timm_runs_with_what_is_imported(own, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', [*sys.argv])
    Path('script.py').write_text(
        "import sys\nfrom aft_vision.layers.base import MIXERS\nprint('scaled' in MIXERS, sys.argv)"
    )
    run_script(['--import', 'own/scaled_mixer.py', 'script.py', '--import', 'x'])
    assert capsys.readouterr().out == "True ['script.py', '--import', 'x']\n"
    with pytest.raises(SystemExit):
        run_script(['--import', 'none.py', 'script.py'])
    assert capsys.readouterr().err.startswith('error: expected a module or a Python file to import, got none.py')
