"""The switches of `run` that change how a text model is computed: number format, checkpointing, compilation."""

import functools
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from aft_vision.fastformer.additive import FastformerAttention
from train.fastformer import __main__ as fastformer
from train.fastformer import run
from train.fastformer.trainer import training_arguments

SMOKE = Path(__file__).parents[2] / 'configs' / 'smoke' / 'fastformer.yaml'
SHORT = ('run.seeds=[0]', 'schedule.max_updates=3', 'model.hidden_dropout_prob=0.2', 'model.num_hidden_layers=2')


@pytest.fixture(scope='module')
def texts(tmp_path_factory) -> Path:
    draw = random.Random(0)
    # All of one length, which are compiled once.
    rows = [{'text': ' '.join(draw.choices('abcdefgh', k=5)), 'label': 'xy'[row % 2]} for row in range(100)]
    path = tmp_path_factory.mktemp('texts') / 'texts.jsonl'
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


def train(texts: Path, folder: Path, *overrides: str) -> tuple[dict, dict[str, Tensor]]:
    """The result of the one seed, and the weights that are saved."""
    paths = [f'data.path={texts}', f'run.dir={folder}']
    summary = fastformer.main(['--quiet', '--config', str(SMOKE), *paths, *SHORT, *overrides])
    return summary['runs'][0], load_file(folder / 'seed_0' / 'best' / 'model.safetensors')


@pytest.fixture(scope='module')
def plain(texts, tmp_path_factory) -> tuple[dict, dict[str, Tensor]]:
    return train(texts, tmp_path_factory.mktemp('plain'))


@pytest.fixture
def calls(monkeypatch) -> list[tuple[bool, torch.dtype]]:
    """Record of each call of an attention: in training or not, and the dtype of its queries."""
    found, forward = [], FastformerAttention.forward

    def noted(self: FastformerAttention, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        found.append((self.training, self.query(x).dtype))
        return forward(self, x, mask)

    monkeypatch.setattr(FastformerAttention, 'forward', noted)
    return found


def assert_same_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_bfloat16_is_the_format_of_training_and_of_measuring(texts, plain, tmp_path, calls):
    result, weights = train(texts, tmp_path, 'run.amp=bfloat16')
    assert {dtype for _, dtype in calls} == {torch.bfloat16}
    assert {is_training for is_training, _ in calls} == {True, False}
    # The weights stay in float32, and are about those of float32.
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert result['epochs'][0]['loss'] == pytest.approx(plain[0]['epochs'][0]['loss'], abs=0.02)
    assert any(not torch.equal(weights[name], weight) for name, weight in plain[1].items())


def test_checkpointing_computes_layers_twice_and_changes_nothing(texts, plain, tmp_path, calls):
    result, weights = train(texts, tmp_path, 'run.grad_checkpointing=true')
    # Two layers in each of three updates, forward and again in the backward pass.
    assert sum(is_training for is_training, _ in calls) == 2 * 2 * 3
    assert result['epochs'] == plain[0]['epochs']
    assert_same_weights(weights, plain[1])


def test_a_compiled_run_gives_the_same_model(texts, plain, tmp_path, monkeypatch):
    # What transformers sets for accelerate, and what is restored here afterwards.
    for name in ('ACCELERATE_DYNAMO_BACKEND', 'ACCELERATE_DYNAMO_MODE'):
        monkeypatch.setenv(name, 'no')
    # Traced, and then computed without a compiler, which takes the longest.
    monkeypatch.setattr(run, 'training_arguments', functools.partial(training_arguments, torch_compile_backend='eager'))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    result, weights = train(texts, tmp_path, 'run.compile=true')
    assert torch._dynamo.utils.counters['frames']['ok'] > 0
    assert result['epochs'] == plain[0]['epochs']
    assert_same_weights(weights, plain[1])
    AutoModelForSequenceClassification.from_pretrained(tmp_path / 'seed_0' / 'best')
