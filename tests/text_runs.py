"""Small runs of the text trainers: their arguments, and one that is killed and goes on."""

import json
from pathlib import Path

import pytest
import torch
from helpers import interrupt_text_at
from safetensors.torch import load_file

from train.fastformer.__main__ import main

SMOKE = Path(__file__).parents[1] / 'configs' / 'smoke'


def arguments(name: str, data: Path, folder: Path, *overrides: str) -> list[str]:
    """The arguments of the smoke experiment of this name on these data."""
    return ['--quiet', '--config', str(SMOKE / f'{name}.yaml'), f'data.path={data}', f'run.dir={folder}', *overrides]


def assert_goes_on_to_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, update: int, arguments: list[str], folder: Path, whole: Path
) -> None:
    """Kill a run of one seed in that update, resume it, and compare it with a whole run."""
    with monkeypatch.context() as patch:
        interrupt_text_at(patch, update)
        with pytest.raises(KeyboardInterrupt):
            main(arguments)
    (resumed,) = main([*arguments, 'run.resume=auto'])['runs']
    seed = f'seed_{resumed["seed"]}'
    assert resumed['epochs'] == json.loads((whole / seed / 'result.json').read_text())['epochs']
    for name in (f'checkpoint-{resumed["updates"]}', 'best'):
        expected, found = (load_file(path / seed / name / 'model.safetensors') for path in (whole, folder))
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
