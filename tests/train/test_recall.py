"""The command train.recall: loss and accuracy of the answers, the goal that ends a run, and evaluation."""

import json
import re

import pytest
import torch
from small_runs import ROOT

from aft_vision.data import IGNORED, RecallDataset, RecallTask, sequence_eval_loader
from aft_vision.likelihood import sequence_loss
from aft_vision.models.checkpoint import read_checkpoint
from aft_vision.models.decoders import create_decoder
from train import recall
from train.recall import Recall

# One pair: the answer is the value in the sequence, which any mixer learns at once.
EASY = ['data.pairs=1', 'data.context=4', 'data.vocab_size=8', 'data.epoch_size=1024', 'data.valid_size=64']
EASY += ['data.test_size=96', 'model.dim=16', 'model.depth=1', 'optim.lr=1e-2']
CONFIG = ['--quiet', '--config', str(ROOT / 'configs' / 'small' / 'recall.yaml'), *EASY]
CONFIG += ['schedule.warmup_updates=10', 'schedule.max_updates=640']
ATTENTION = ['model.name=transformer_char', 'model.num_heads=1']


@pytest.mark.parametrize('mixer', [['model.mixer=full', 'model.window=null'], ATTENTION])
def test_a_run_ends_when_its_answers_are_right(mixer, tmp_path, capsys):
    state = recall.main([*CONFIG, *mixer, f'run.dir={tmp_path}'])
    progress = state.progress
    assert progress.updates < 640
    assert progress.updates % 16 == 0
    assert [row['eval_accuracy'] >= 99 for row in progress.history] == [False] * (len(progress.history) - 1) + [True]
    result = json.loads((tmp_path / 'result.json').read_text())
    assert (result['valid_accuracy'], result['updates']) == (progress.best, progress.updates)
    assert result['test_accuracy'] > 95
    # A guess among the four values has 2 bits.
    assert 0 < result['test_bits'] < 2
    printed = capsys.readouterr().out
    assert f'{progress.best:.2f} % right' in printed
    # The run is complete: nothing more is trained, and its best weights answer as they did.
    recall.main([*CONFIG, *mixer, f'run.dir={tmp_path}', 'run.resume=auto'])
    assert read_checkpoint(tmp_path / 'last.pth')['updates'] == progress.updates
    recall.main([*CONFIG, *mixer, f'run.dir={tmp_path}', '--eval', 'data.eval_split=test'])
    found = re.search(r'test: ([\d.]+) % right answers .* 96 sequences, 96 tokens', capsys.readouterr().out)
    assert float(found[1]) == pytest.approx(result['test_accuracy'], abs=1e-4)


def test_a_goal_that_is_not_met_leaves_the_run_its_updates(tmp_path):
    state = recall.main([*CONFIG, 'data.goal=null', 'schedule.max_updates=20', f'run.dir={tmp_path}'])
    assert state.progress.updates == 20


def test_a_run_selected_on_the_test_examples_has_their_bits_too(tmp_path):
    state = recall.main([*CONFIG, 'data.eval_split=test', 'schedule.max_updates=20', f'run.dir={tmp_path}'])
    result = json.loads((tmp_path / 'result.json').read_text())
    best = max(state.progress.history, key=lambda row: (row['eval_accuracy'], -row['eval_loss']))
    assert result['test_accuracy'] == best['eval_accuracy'] == state.progress.best
    assert result['test_bits'] == pytest.approx(best['eval_bits'], rel=1e-6)
    assert (result['measure'], result['bits_unit']) == ('% right answers', 'bits/answer')


@pytest.mark.parametrize(('goal', 'met'), [(None, False), (99.0, False), (98.5, True), (98.0, True)])
def test_a_goal_is_met_by_its_value(goal, met):
    objective = Recall('sequences', 'bits/answer', 4, goal)
    assert objective.is_met(98.5) is met
    assert objective.is_met(objective.worst) is False


def test_only_answers_have_a_loss():
    task = RecallTask(pairs=2, context=16, vocab_size=8)
    tokens, targets = next(iter(sequence_eval_loader(RecallDataset(task, 'test', 5), 5)))
    torch.manual_seed(0)
    model = create_decoder('aft_simple_char', context=16, vocab_size=8, depth=1, dim=8, dropout=0.0).double()
    logits = model(tokens)
    logits.retain_grad()
    sequence_loss(logits, targets).backward()
    counted = targets != IGNORED
    assert logits.grad[~counted].abs().max() == 0
    assert (logits.grad[counted].abs().sum(-1) > 0).all()
    expected = -logits.log_softmax(-1)[counted].gather(1, targets[counted][:, None]).mean()
    torch.testing.assert_close(sequence_loss(logits, targets), expected)
