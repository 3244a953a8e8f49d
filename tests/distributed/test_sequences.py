"""Several processes train and evaluate a model of characters as one does."""

import json

import numpy as np
import pytest
import torch
from helpers import losses
from small_runs import ROOT, run

from train import char

pytestmark = pytest.mark.slow


def test_two_processes_train_and_evaluate_as_one(tmp_path):
    random = bytes(np.random.default_rng(0).integers(256, size=290, dtype=np.uint8))
    (tmp_path / 'text').write_bytes((b'abcdefghij' * 100)[:710] + random)
    # Two epochs of three updates.
    plain = ['--quiet', '--config', f'{ROOT}/configs/smoke/char.yaml', f'data.file={tmp_path}/text', 'data.context=32']
    plain += ['data.eval_stride=20', 'data.batch_size=8', 'model.dropout=0.2', 'ema.decay=0.9', 'run.cpu_threads=1']
    plain += ['schedule.max_updates=null', 'schedule.epochs=2', 'run.tensorboard=false', 'run.throughput_batches=2']
    # As many parts, each with dropout of its own.
    char.main([*plain, 'optim.accumulate=2', f'run.dir={tmp_path / "one"}'])
    assert run([*plain, f'run.dir={tmp_path / "two"}'], 2, trainer='train.char') == [0, 0]
    for row, expected in zip(losses(tmp_path / 'two'), losses(tmp_path / 'one'), strict=True):
        for column in ('train_loss', 'train_lr', 'eval_loss', 'eval_bits', 'eval_ema_bits'):
            assert float(row[column]) == pytest.approx(float(expected[column]), rel=1e-5), column
    found, wanted = (torch.load(tmp_path / n / 'last.pth', weights_only=True) for n in ('two', 'one'))
    assert found['world_size'] == 2
    for name, expected in wanted['state_dict'].items():
        if not name.endswith('attn.qkv.bias'):
            # The gradient of the bias of the keys is rounding noise.
            bound = 1e-3 * expected.abs().max().item()
            torch.testing.assert_close(found['state_dict'][name], expected, rtol=1e-3, atol=bound)
    results = [json.loads((tmp_path / n / 'result.json').read_text()) for n in ('two', 'one')]
    assert results[0]['test_bits'] == pytest.approx(results[1]['test_bits'], rel=1e-5)
