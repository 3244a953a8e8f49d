from pathlib import Path

import pytest
import timm

from train.config import load_config
from train.imagenet import model_arguments

CONFIGS = sorted((Path(__file__).parents[1] / 'configs').rglob('*.yaml'))


def test_there_are_configs():
    assert CONFIGS


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_config_says_what_to_expect_on_which_hardware(path):
    header = [line for line in path.read_text().splitlines() if line.startswith('#')]
    assert path.read_text().startswith('# ')
    assert 'Expected:' in ' '.join(header)
    assert 'Hardware:' in ' '.join(header)


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_config_is_valid_and_its_model_can_be_built(path):
    name, kwargs = model_arguments(load_config(path), num_classes=10)
    model = timm.create_model(name, device='meta', **kwargs)
    assert all(parameter.is_meta for parameter in model.parameters())
