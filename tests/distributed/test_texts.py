"""Several processes train a text model as one does."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import run
from text_files import write_mind, write_mind_behaviors

from train.fastformer import __main__ as fastformer

ROOT = Path(__file__).parents[2]
PLAIN = ['--quiet', '--config', str(ROOT / 'configs' / 'smoke' / 'fastformer.yaml'), 'run.seeds=[3]', 'run.keep=2']
# Each process draws its own dropout. And where there are several, Trainer fills the last batches of an evaluation with
# texts that it had, which changes the loss of the evaluation, but no other metric.
PLAIN += ['model.hidden_dropout_prob=0', 'run.cpu_threads=1', 'data.eval_batch_size=18']
UPDATES, MIDDLE = 18, 25


@pytest.fixture(scope='module')
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments of a run with 288 texts of many lengths to train with, in batches of 16."""
    draw, lines = random.Random(0), []
    for number in range(360):
        words = [f'w{draw.randint(0, 20)}' for _ in range(draw.randint(1, 30))]
        lines.append(json.dumps({'text': ' '.join([*words, f'c{number % 2}']), 'label': number % 2}) + '\n')
    path = tmp_path_factory.mktemp('texts') / 'texts.jsonl'
    path.write_text(''.join(lines))
    return [*PLAIN, f'data.path={path}']


@pytest.fixture(scope='module')
def one(plain: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp('one')
    fastformer.main([*plain, f'run.dir={folder}'])
    return folder


@pytest.fixture(scope='module')
def two(plain: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two processes; what they print is in two.log beside it."""
    more = ['run.keep=5', f'run.save_updates={MIDDLE}']
    return run_two([*plain, *more, f'run.dir={tmp_path_factory.mktemp("runs") / "two"}'])


def run_two(arguments: list[str]) -> Path:
    """Train with two processes, and give the folder, the last argument; what they print is beside it."""
    folder = Path(arguments[-1].removeprefix('run.dir='))
    assert run(arguments, 2, trainer='train.fastformer.__main__', log=folder.with_suffix('.log')) == [0, 0]
    return folder


def assert_same_training(folder: Path, expected: Path) -> None:
    result, wanted = (json.loads((path / 'seed_3' / 'result.json').read_text()) for path in (folder, expected))
    assert (result['texts'], result['updates']) == (wanted['texts'], wanted['updates'])
    assert result['updates'] == 2 * UPDATES
    assert [epoch['accuracy'] for epoch in result['epochs']] == [epoch['accuracy'] for epoch in wanted['epochs']]
    for epoch, other in zip(result['epochs'], wanted['epochs'], strict=True):
        assert epoch['loss'] == pytest.approx(other['loss'], rel=1e-4)
    assert (result['best_epoch'], result['test_accuracy']) == (wanted['best_epoch'], wanted['test_accuracy'])
    last = f'seed_3/checkpoint-{2 * UPDATES}/model.safetensors'
    weights, found = load_file(expected / last), load_file(folder / last)
    assert weights.keys() == found.keys()
    for name, weight in weights.items():
        bound = 1e-3 * weight.abs().max().item()
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=bound, msg=lambda text, n=name: f'{n}: {text}')


@pytest.mark.slow
def test_two_processes_train_as_one(one: Path, two: Path):
    assert_same_training(two, one)
    # The first process alone prints.
    assert two.with_suffix('.log').read_text().count('288 train, 36 validation, 36 test') == 1


def stopped_after(update: int, two: Path, folder: Path) -> Path:
    """A copy of the run of two processes as it was after an update."""
    shutil.copytree(two, folder)
    for path in ('result.json', 'seed_3/result.json'):
        (folder / path).unlink()
    shutil.rmtree(folder / 'seed_3' / 'best')
    for checkpoint in (folder / 'seed_3').glob('checkpoint-*'):
        if int(checkpoint.name.partition('-')[2]) > update:
            shutil.rmtree(checkpoint)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize('update', [UPDATES, MIDDLE])
def test_one_process_goes_on_with_a_run_of_two(update: int, plain: list[str], one: Path, two: Path, tmp_path: Path):
    folder = stopped_after(update, two, tmp_path / 'resumed')
    fastformer.main([*plain, f'run.dir={folder}', 'run.resume=auto'])
    assert_same_training(folder, one)


@pytest.mark.slow
@pytest.mark.parametrize('update', [MIDDLE, 2 * UPDATES])
def test_two_processes_go_on_in_an_epoch_or_after_the_last(update: int, plain: list[str], two: Path, tmp_path: Path):
    folder = stopped_after(update, two, tmp_path / 'resumed')
    assert_same_training(run_two([*plain, 'run.resume=auto', f'run.dir={folder}']), two)


def write_data(task: str, folder: Path) -> Path:
    """Examples of a task, whose numbers in the parts are not multiples of two."""
    if task == 'recommendation':
        write_mind(folder)
        return write_mind_behaviors(folder, rows=95)
    draw, lines = random.Random(0), []
    for _ in range(150):
        words = [f'w{draw.randint(0, 20)}' for _ in range(draw.randint(4, 20))]
        lines.append(json.dumps({'text': ' '.join(words), 'summary': ' '.join(words[:3])}) + '\n')
    path = folder / 'texts.jsonl'
    path.write_text(''.join(lines))
    return path


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:NLTK has no punkt_tab')
@pytest.mark.parametrize('task', ['recommendation', 'summarization'])
def test_two_processes_go_on_with_a_task_in_the_middle_of_an_epoch(task: str, tmp_path: Path):
    plain = ['--quiet', '--config', str(ROOT / 'configs' / 'smoke' / f'{task}.yaml'), 'run.seeds=[3]', 'run.keep=99']
    plain += ['run.cpu_threads=1', 'schedule.epochs=2', f'data.path={write_data(task, tmp_path)}']
    whole = run_two([*plain, 'run.save_updates=1', f'run.dir={tmp_path / "whole"}'])
    updates = json.loads((whole / 'seed_3' / 'result.json').read_text())['updates']
    assert updates >= 8
    folder = run_two([*plain, 'run.resume=auto', f'run.dir={stopped_after(3 * updates // 4, whole, tmp_path / "cut")}'])
    last = f'seed_3/checkpoint-{updates}/model.safetensors'
    expected, found = load_file(whole / last), load_file(folder / last)
    assert {name: (found[name] - weight).abs().max().item() for name, weight in expected.items()} == dict.fromkeys(
        found, 0.0
    )


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:NLTK has no punkt_tab')
@pytest.mark.parametrize('task', ['recommendation', 'summarization'])
def test_two_processes_test_every_example_of_a_task_once(task: str, tmp_path: Path):
    plain = ['--quiet', '--config', str(ROOT / 'configs' / 'smoke' / f'{task}.yaml'), 'run.seeds=[3]']
    plain += ['model.hidden_dropout_prob=0', 'run.cpu_threads=1', 'data.eval_batch_size=8', 'schedule.max_updates=6']
    plain += [f'data.path={write_data(task, tmp_path)}']
    # Where the loss chooses the epoch, the texts that fill the last batches may decide.
    plain += ['generate.validate=true'] if task == 'summarization' else []
    two = run_two([*plain, f'run.dir={tmp_path / "two"}'])
    fastformer.main([*plain, f'run.dir={tmp_path / "one"}'])
    found, wanted = (json.loads((run / 'seed_3' / 'result.json').read_text()) for run in (two, tmp_path / 'one'))
    tested = [name for name in wanted if name.startswith('test_') and isinstance(wanted[name], float)]
    assert tested
    assert {name: found[name] for name in tested} == pytest.approx({name: wanted[name] for name in tested}, abs=1e-3)
    assert found['updates'] == wanted['updates'] == 6
