"""Several processes train as one does."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import make_beton, require_ffcv
from small_runs import run

ROOT = Path(__file__).parents[1]
CLOTHING = ROOT / 'tests' / 'assets' / 'clothing'
TORCHRUN = ['torch.distributed.run', '--standalone', '--nproc-per-node']
# Two epochs of three updates at 32 px, each image changed otherwise every time, and no sum over parts of a batch.
PLAIN = [
    *('--quiet', '--config', str(ROOT / 'configs' / 'smoke' / 'deit_recipe.yaml'), f'data.dir={CLOTHING}'),
    *('data.batch_size=200', 'data.eval_batch_size=50', 'model.depth=1', 'run.amp=none', 'run.tensorboard=false'),
    *('augment.random_erasing=0', 'augment.mixup=0', 'augment.cutmix=0', 'model.drop_path_rate=0', 'optim.lr=5e-3'),
    *('schedule.step=update', 'schedule.warmup_epochs=0'),
]
# The rows of the 8 keys, between 32 queries and 32 values.
KEYS = slice(32, 40)
MIXED = ['augment.random_erasing=0.25', 'augment.mixup=0.8', 'augment.cutmix=1', 'model.drop_path_rate=0.2']


def train(run_dir: Path, *arguments: str, processes: int = 1) -> None:
    assert run([*PLAIN, *arguments, 'run.cpu_threads=1', f'run.dir={run_dir}'], processes) == [0] * processes


def torchrun(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Train in two processes by the command line."""
    command = [sys.executable, '-m', *TORCHRUN, '2', '-m', 'train.imagenet', *PLAIN, *arguments, f'run.dir={run_dir}']
    return subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True, text=True)


def environment() -> dict[str, str]:
    return {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}


def load(run_dir: Path) -> dict[str, object]:
    return torch.load(run_dir / 'last.pth', weights_only=True)


def assert_same_training(run_dir: Path, other: Path) -> None:
    rows = []
    for folder in (run_dir, other):
        with (folder / 'summary.csv').open() as file:
            rows.append(list(csv.DictReader(file)))
    assert len(rows[0]) == len(rows[1]) == 2
    for row, expected in zip(*rows, strict=True):
        for column in ('train_loss', 'train_lr', 'eval_loss', 'eval_ema_loss'):
            assert float(row[column]) == pytest.approx(float(expected[column]), rel=1e-5), column
        assert row['eval_top1'] == expected['eval_top1']
    for kind in ('state_dict', 'ema_state_dict'):
        weights, wanted = load(run_dir)[kind], load(other)[kind]
        for name, expected in wanted.items():
            if name.endswith('attn.qkv.bias'):
                # That of the keys cancels, so its gradient is rounding noise, which Adam makes into steps of size lr.
                weights[name][KEYS] = expected[KEYS] = 0
            torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.fixture(scope='module')
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp('one')
    train(run_dir, 'optim.accumulate=1')
    return run_dir


@pytest.mark.slow
def test_two_processes_train_as_one(one, tmp_path):
    done = torchrun(tmp_path, 'optim.accumulate=1')
    assert_same_training(tmp_path, one)
    assert load(tmp_path)['world_size'] == 2
    # The first process alone writes and prints.
    assert done.stdout.count('epoch 1/2') == 1
    assert done.stdout.count('2 processes, the first on cpu') == 1


@pytest.mark.slow
def test_mixing_and_drop_path_depend_on_the_part_and_not_on_who_has_it(tmp_path):
    train(tmp_path / 'one', *MIXED, 'optim.accumulate=2')
    train(tmp_path / 'two', *MIXED, 'optim.accumulate=1', processes=2)
    assert_same_training(tmp_path / 'two', tmp_path / 'one')


@pytest.mark.slow
@pytest.mark.ffcv
def test_two_processes_train_as_one_from_ffcv_files_and_with_several_sizes(tmp_path):
    require_ffcv()
    folder = make_beton(tmp_path / 'images')
    sizes = 'data.train_sizes=[32,48]'
    train(tmp_path / 'one', 'optim.accumulate=1', f'data.dir={folder}', sizes)
    train(tmp_path / 'two', 'optim.accumulate=1', f'data.dir={folder}', sizes, 'data.num_workers=1', processes=2)
    assert_same_training(tmp_path / 'two', tmp_path / 'one')


@pytest.mark.slow
def test_two_processes_distil_as_one(tmp_path):
    # A narrower teacher, so that a projection of the features is trained with the student.
    train(tmp_path / 'teacher', 'model.embed_dim=16')
    distilled = [f'distill.teacher={tmp_path / "teacher" / "best.pth"}', 'distill.kind=feature', 'optim.accumulate=1']
    train(tmp_path / 'one', *distilled)
    train(tmp_path / 'two', *distilled, processes=2)
    assert_same_training(tmp_path / 'two', tmp_path / 'one')
    projections = [load(tmp_path / name)['task_state']['projection'] for name in ('two', 'one')]
    torch.testing.assert_close(*projections, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_with_two(one, tmp_path):
    train(tmp_path, 'optim.accumulate=1', 'schedule.epochs=2', 'run.save_minutes=1e-9', 'run.keep=6')
    for name in ('last.pth', 'last-1.pth', 'last-2.pth'):
        (tmp_path / name).unlink()
    done = torchrun(tmp_path, 'optim.accumulate=1', 'run.resume=auto')
    assert 'now with world_size = 2, was 1' in done.stdout
    assert_same_training(tmp_path, one)


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_process_was_killed(tmp_path):
    resumed = ['optim.accumulate=1', 'run.save_minutes=1e-9', 'run.resume=auto']
    train(tmp_path / 'whole', *resumed, processes=2)
    # One restart is needed; gloo refuses the first connection after one now and then, and torchrun then tries again.
    command = [sys.executable, '-m', *TORCHRUN, '2', '--max-restarts', '4', '-m', 'train.imagenet', *PLAIN, *resumed]
    run_dir = tmp_path / 'killed'
    process = subprocess.Popen([*command, f'run.dir={run_dir}'], cwd=ROOT, env=environment())
    while not (run_dir / 'last.pth').exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(rank_1_of(process.pid), signal.SIGKILL)
    assert process.wait(timeout=300) == 0
    for kind in ('state_dict', 'ema_state_dict'):
        torch.testing.assert_close(load(run_dir)[kind], load(tmp_path / 'whole')[kind], rtol=0, atol=0)


def rank_1_of(launcher: int) -> int:
    """The process that torchrun started with rank 1."""
    for path in Path('/proc').glob('[0-9]*'):
        try:
            parent = int((path / 'stat').read_text().rsplit(')', 1)[1].split()[1])
            if parent == launcher and b'\0RANK=1\0' in b'\0' + (path / 'environ').read_bytes():
                return int(path.name)
        except (OSError, IndexError):
            continue
    raise AssertionError('torchrun has no process of rank 1')


def test_a_batch_that_the_processes_cannot_share_is_rejected(monkeypatch, tmp_path):
    with pytest.raises(subprocess.CalledProcessError) as failed:
        torchrun(tmp_path, 'data.batch_size=201', 'optim.accumulate=1')
    assert 'multiple of optim.accumulate (1) times the number of processes (2), got 201' in failed.value.stderr
