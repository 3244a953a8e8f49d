"""Several processes train a model of images as one does."""

import csv
import shutil
from pathlib import Path

import pytest
import timm
import torch
from helpers import link_photographs, make_beton, require_ffcv
from small_runs import PART, Interruption, run, run_restarted

from aft_vision.data import Shard, Source
from aft_vision.data.datasets import open_train_split
from aft_vision.data.sampling import EpochSampler
from train import imagenet

ROOT = Path(__file__).parents[2]
# Two epochs of three updates at 32 px, each image changed otherwise every time, and no sum over parts of a batch.
PLAIN = [
    *('--quiet', '--config', str(ROOT / 'configs' / 'smoke' / 'deit_recipe.yaml'), 'data.batch_size=20'),
    *('data.eval_batch_size=6', 'model.depth=1', 'run.amp=none', 'run.tensorboard=false'),
    *('augment.random_erasing=0', 'augment.mixup=0', 'augment.cutmix=0', 'model.drop_path_rate=0', 'optim.lr=5e-3'),
    *('schedule.step=update', 'schedule.warmup_epochs=0'),
]
# The rows of the 8 keys, between 32 queries and 32 values.
KEYS = slice(32, 40)
MIXED = ['augment.random_erasing=0.25', 'augment.mixup=0.8', 'augment.cutmix=1', 'model.drop_path_rate=0.2']


def train(plain: list[str], run_dir: Path, *arguments: str, processes: int = 1, log: Path | None = None) -> None:
    arguments = (*plain, *arguments, 'run.cpu_threads=1', f'run.dir={run_dir}')
    assert run([*arguments], processes, log=log) == [0] * processes


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
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 to train with and 20 to evaluate."""
    return link_photographs(tmp_path_factory.mktemp('photographs'), 6, 2)


@pytest.fixture(scope='module')
def plain(photographs: Path) -> list[str]:
    return [*PLAIN, f'data.dir={photographs}']


@pytest.fixture(scope='module')
def one(plain: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, with all of its checkpoints."""
    run_dir = tmp_path_factory.mktemp('one')
    train(plain, run_dir, 'optim.accumulate=1', 'run.save_minutes=1e-9', 'run.keep=6')
    return run_dir


@pytest.fixture(scope='module')
def two(plain: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes; what they print is in two.log beside it."""
    run_dir = tmp_path_factory.mktemp('runs') / 'two'
    train(plain, run_dir, 'optim.accumulate=1', processes=2, log=run_dir.with_suffix('.log'))
    return run_dir


@pytest.mark.slow
def test_two_processes_train_as_one(one, two):
    assert_same_training(two, one)
    assert load(two)['world_size'] == 2
    counts = [torch.load(folder / 'best.pth', weights_only=True)['by_class'] for folder in (two, one)]
    assert counts[0].tolist() == counts[1].tolist()
    assert counts[0][:, 0].sum() == 20
    # The first process alone writes and prints.
    shown = two.with_suffix('.log').read_text()
    assert shown.count('epoch 1/2') == 1
    assert shown.count('2 processes, the first on cpu') == 1
    assert shown.count('worst classes: ') == 1


@pytest.mark.slow
def test_mixing_and_drop_path_depend_on_the_part_and_not_on_who_has_it(plain, tmp_path):
    train(plain, tmp_path / 'one', *MIXED, 'optim.accumulate=2')
    train(plain, tmp_path / 'two', *MIXED, 'optim.accumulate=1', processes=2)
    assert_same_training(tmp_path / 'two', tmp_path / 'one')


@pytest.mark.slow
def test_two_processes_train_as_one_at_native_shapes(plain, tmp_path):
    native = [*MIXED, 'data.max_tokens=480']
    train(plain, tmp_path / 'one', *native, 'optim.accumulate=2')
    train(plain, tmp_path / 'two', *native, 'optim.accumulate=1', processes=2)
    assert_same_training(tmp_path / 'two', tmp_path / 'one')


@pytest.mark.slow
@pytest.mark.ffcv
def test_two_processes_train_as_one_from_ffcv_files_and_with_several_sizes(plain, photographs, tmp_path):
    require_ffcv()
    folder = make_beton(tmp_path / 'images', photographs)
    sizes = 'data.train_sizes=[32,48]'
    # In this process, which has imported FFCV: that takes seconds.
    more = ['optim.accumulate=1', f'data.dir={folder}', sizes, 'run.cpu_threads=1', f'run.dir={tmp_path / "one"}']
    imagenet.main([*plain, *more])
    train(plain, tmp_path / 'two', 'optim.accumulate=1', f'data.dir={folder}', sizes, 'data.num_workers=1', processes=2)
    assert_same_training(tmp_path / 'two', tmp_path / 'one')


@pytest.mark.slow
def test_two_processes_distil_and_regularize_as_one(plain, one, tmp_path):
    distilled = [f'distill.teacher={write_teacher(tmp_path, one)}', 'distill.kind=feature', 'optim.accumulate=1']
    # Little enough that twice the gradient of the entropy would be another training.
    distilled += ['regularize.kernel_entropy=0.05']
    train(plain, tmp_path / 'one', *distilled)
    train(plain, tmp_path / 'two', *distilled, processes=2)
    assert_same_training(tmp_path / 'two', tmp_path / 'one')
    projections = [load(tmp_path / name)['task_state']['projection'] for name in ('two', 'one')]
    torch.testing.assert_close(*projections, rtol=1e-4, atol=1e-4)


def write_teacher(folder: Path, run_dir: Path) -> Path:
    """A checkpoint of a narrower model than that of a run: a projection of the features is trained with the student."""
    content = torch.load(run_dir / 'best.pth', weights_only=True)
    kwargs = {**content['model_kwargs'], 'embed_dim': 16}
    torch.manual_seed(0)
    weights = timm.create_model(content['model_name'], **kwargs).state_dict()
    torch.save({**content, 'model_kwargs': kwargs, 'state_dict': weights}, folder / 'teacher.pth')
    return folder / 'teacher.pth'


@pytest.mark.slow
def test_a_run_with_a_limit_of_time_goes_on_for_more_epochs(plain, tmp_path):
    limited = [*plain, 'optim.accumulate=1', 'run.max_seconds=1000']
    train(limited, tmp_path / 'run', 'schedule.epochs=1', processes=2)
    train(limited, tmp_path / 'run', 'run.resume=auto', processes=2)
    assert load(tmp_path / 'run')['epoch'] == 2


@pytest.mark.slow
def test_processes_evaluate_batch_norms_with_the_statistics_that_are_saved(plain, tmp_path, capsys):
    model = [*(x for x in plain if not x.startswith('model.')), 'model.name=resnet10t', 'data.img_size=[64,64]']
    train(model, tmp_path / 'two', 'optim.accumulate=1', processes=2)
    with (tmp_path / 'two' / 'summary.csv').open() as file:
        (*_, last) = csv.DictReader(file)
    imagenet.main([*model, '--eval', f'run.init_from={tmp_path / "two" / "last.pth"}', 'run.cpu_threads=1'])
    assert f'loss {float(last["eval_loss"]):.4f}' in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_with_two(plain, one, tmp_path):
    run_dir, log = shutil.copytree(one, tmp_path / 'run'), tmp_path / 'log'
    for name in ('last.pth', 'last-1.pth', 'last-2.pth'):
        (run_dir / name).unlink()
    train(plain, run_dir, 'optim.accumulate=1', 'run.resume=auto', processes=2, log=log)
    assert 'now with world_size = 2, was 1' in log.read_text()
    assert_same_training(run_dir, one)


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_process_was_killed(plain, two, tmp_path):
    resumed = ['optim.accumulate=1', 'run.save_minutes=1e-9', 'run.resume=auto', 'run.cpu_threads=1']
    # In the second update, when there is a checkpoint of the first.
    run_dir, log = tmp_path / 'run', tmp_path / 'log'
    assert run_restarted([*plain, *resumed, f'run.dir={run_dir}'], Interruption(PART, 2, rank=1), log) == 0
    assert log.read_text().count('resumed from') == 1
    for kind in ('state_dict', 'ema_state_dict'):
        torch.testing.assert_close(load(run_dir)[kind], load(two)[kind], rtol=0, atol=0)


@pytest.mark.slow
def test_the_updates_before_an_image_that_another_process_than_the_first_cannot_read_are_saved(plain, tmp_path):
    folder = link_photographs(tmp_path / 'photographs', 6, 2)
    dataset = open_train_split(Source(dir=str(folder))).dataset
    # Of the third update, which is read before the second one is made.
    image = Path(dataset.name_of(EpochSampler(60, 20, 0, shard=Shard(1, 2)).draws(2)[0].image))
    image.unlink()
    image.write_bytes(b'damaged')
    run_dir, log = tmp_path / 'run', tmp_path / 'log'
    more = ['optim.accumulate=1', 'augment.repeats=1', f'data.dir={folder}', 'run.cpu_threads=1', f'run.dir={run_dir}']
    assert run([*plain, *more], 2, log=log) == [1, 1]
    assert load(run_dir)['updates'] == 1
    assert f'can be decoded, got {image}' in log.read_text()
    assert 'another process cannot read its training data' in log.read_text()


def test_a_batch_that_the_processes_cannot_share_is_rejected(plain, tmp_path):
    arguments = [*plain, 'data.batch_size=21', 'optim.accumulate=1', f'run.dir={tmp_path / "run"}']
    assert run(arguments, 2, log=tmp_path / 'log') == [1, 1]
    message = 'multiple of optim.accumulate (1) times the number of processes (2), got 21'
    assert (tmp_path / 'log').read_text().count(message) == 2
    assert not (tmp_path / 'run').exists()
