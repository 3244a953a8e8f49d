import json
import random
import shlex
import shutil
import signal
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from helpers import interrupt_text_at
from safetensors.torch import load_file
from text_files import write_jmars
from text_runs import arguments as smoke_arguments
from text_runs import assert_goes_on_to_the_same_weights
from transformers import AutoModelForSequenceClassification, AutoTokenizer, EvalPrediction, pipeline, set_seed
from transformers.modeling_outputs import BaseModelOutput

from aft_vision.fastformer import FastformerConfig, encoder
from aft_vision.fastformer.data import READERS
from train.config import save_config
from train.fastformer import __main__ as fastformer
from train.fastformer.classification import ClassificationData, ClassificationRun, classification_metrics
from train.fastformer.schema import text_model_config
from train.fastformer.tasks import TASKS, load_text_config
from train.fastformer.trainer import BucketSampler, EpochMeter, TextTrainer, last_checkpoint
from train.run import find_run_dir

SMOKE = Path(__file__).parents[2] / 'configs' / 'smoke' / 'fastformer.yaml'
BASELINES = ('transformer', 'longformer', 'bigbird', 'linformer', 'linear_transformer', 'poolingformer')


@pytest.fixture(scope='module')
def pairs(tmp_path_factory) -> Path:
    """Texts of which one class has two words together, wherever they are, and the other but one of them."""
    draw = random.Random(0)
    lines = []
    for number in range(200):
        words = draw.choices([f'w{index}' for index in range(20)], k=draw.randint(4, 12))
        first, second = draw.sample(range(len(words)), 2)
        words[first] = draw.choice(['red', 'blue'])
        if number % 2:
            words[first], words[second] = 'red', 'blue'
        lines.append(json.dumps({'text': ' '.join(words), 'label': ('one', 'both')[number % 2]}) + '\n')
    path = tmp_path_factory.mktemp('texts') / 'pairs.jsonl'
    path.write_text(''.join(lines))
    return path


arguments = partial(smoke_arguments, 'fastformer')


def text_run(pairs: Path, folder: Path, *overrides: str) -> ClassificationRun:
    return ClassificationRun.read(load_text_config(SMOKE, [f'data.path={pairs}', *overrides]), folder)


@pytest.fixture(scope='module')
def trained(pairs, tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp('run')
    return folder, fastformer.main(arguments(pairs, folder, 'schedule.max_updates=15', 'run.keep=2'))


def test_a_run_leaves_a_summary_of_its_seeds(trained):
    folder, summary = trained
    written = json.loads((folder / 'result.json').read_text())
    assert written == {**summary, 'model': written['model']}
    assert written['seeds'] == [0, 1]
    for seed, result in enumerate(written['runs']):
        assert result == json.loads((folder / f'seed_{seed}' / 'result.json').read_text())
        assert result['texts'] == {'train': 160, 'validation': 20, 'test': 20}
        assert result['updates'] == 15
        assert [epoch['epoch'] for epoch in result['epochs']] == [1.0, 1.5]
        assert result['seconds_per_epoch'] > 0
        assert result['memory_mb'] > 10
        best = max(result['epochs'], key=lambda epoch: (epoch['accuracy'], -epoch['loss']))
        assert (result['best_epoch'], result['validation_macro_f']) == (best['epoch'], best['macro_f'])
    accuracies = [result['test_accuracy'] for result in written['runs']]
    assert written['test_accuracy']['mean'] == pytest.approx(sum(accuracies) / 2)
    assert written['test_accuracy']['std'] == pytest.approx(abs(accuracies[0] - accuracies[1]) / 2**0.5)


def test_the_best_model_is_one_of_transformers_and_tests_as_it_did(trained, pairs, capsys):
    folder, summary = trained
    fastformer.main(['--eval', *arguments(pairs, folder)])
    printed = capsys.readouterr().out.splitlines()
    for seed, result in enumerate(summary['runs']):
        assert f'seed_{seed}/best, test: accuracy {100 * result["test_accuracy"]:.2f} %' in printed[seed]
    classify = pipeline('text-classification', str(folder / 'seed_0' / 'best'))
    assert classify('w1 red w2 blue')[0]['label'] in ('one', 'both')


def test_the_resolved_experiment_repeats_the_run(trained, tmp_path):
    folder, summary = trained
    again = fastformer.main(
        ['--quiet', '--config', str(folder / 'config.yaml'), f'run.dir={tmp_path}', 'run.seeds=[1]']
    )
    assert again['runs'][0]['epochs'] == summary['runs'][1]['epochs']


def test_the_resolved_experiment_has_the_folder_that_it_is_in():
    config = load_text_config(SMOKE, [])
    assert find_run_dir(config.run.dir, SMOKE, Path('runs')) == Path('runs/fastformer')
    assert find_run_dir(config.run.dir, Path('runs/imdb/config.yaml'), Path('runs')) == Path('runs/imdb')
    stated = load_text_config(SMOKE, ['run.dir=elsewhere'])
    assert find_run_dir(stated.run.dir, Path('runs/imdb/config.yaml'), Path('runs')) == Path('elsewhere')


def test_an_interrupted_run_goes_on_to_the_same_weights(trained, pairs, tmp_path, monkeypatch):
    more = ['schedule.max_updates=15', 'run.keep=2', 'run.save_updates=4', 'run.seeds=[1]']
    assert_goes_on_to_the_same_weights(monkeypatch, 14, arguments(pairs, tmp_path, *more), tmp_path, trained[0])


def test_a_run_that_was_moved_after_its_last_update_tests_its_best_epoch(pairs, tmp_path):
    here, there = tmp_path / 'here', tmp_path / 'there'
    (tmp_path / 'glove.txt').write_text(f'red {" ".join(["0.5"] * 16)}\n')
    more = ['schedule.max_updates=15', 'run.keep=9', 'run.seeds=[1]', f'data.glove={tmp_path / "glove.txt"}']
    glove = fastformer.main(arguments(pairs, here, *more))['runs'][0]['glove']
    here.rename(there)
    folder = there / 'seed_1'
    first, *_, last = sorted(folder.glob('checkpoint-*'), key=lambda path: int(path.name.partition('-')[2]))
    # The first epoch shall be the best one.
    state = json.loads((last / 'trainer_state.json').read_text())
    state['best_global_step'] = int(first.name.partition('-')[2])
    state['best_model_checkpoint'] = str(here / 'seed_1' / first.name)
    (last / 'trainer_state.json').write_text(json.dumps(state))
    for path in (there / 'result.json', folder / 'result.json'):
        path.unlink()
    shutil.rmtree(folder / 'best')
    fastformer.main([*arguments(pairs, there, *more), 'run.resume=auto'])
    expected, found = (load_file(path / 'model.safetensors') for path in (first, folder / 'best'))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    # Not an update more, although 15 updates end within an epoch.
    assert sorted(path.name for path in folder.glob('checkpoint-*')) == sorted([first.name, last.name])
    result = json.loads((folder / 'result.json').read_text())
    assert (result['updates'], result['glove']) == (15, glove)


def test_an_evaluation_that_was_cut_short_is_done_again(trained, pairs, tmp_path, monkeypatch):
    def killed(self, args, state, control, **kwargs):
        if state.global_step == 15:
            raise RuntimeError('killed')

    cut = arguments(pairs, tmp_path, 'schedule.max_updates=15', 'run.save_updates=5', 'run.keep=2', 'run.seeds=[1]')
    with monkeypatch.context() as patched:
        patched.setattr(EpochMeter, 'on_evaluate', killed)
        with pytest.raises(RuntimeError, match='killed'):
            fastformer.main(cut)
    assert fastformer.main([*cut, 'run.resume=auto'])['runs'][0]['epochs'] == trained[1]['runs'][1]['epochs']


@pytest.mark.parametrize('epoch', [1, 2])
def test_an_epoch_whose_evaluation_fails_is_not_lost(pairs, tmp_path, monkeypatch, epoch):
    more = ['schedule.epochs=2', 'run.keep=2', 'run.seeds=[1]', 'model.hidden_dropout_prob=0.3']
    (whole,) = fastformer.main(arguments(pairs, tmp_path / 'whole', *more))['runs']
    ended = arguments(pairs, tmp_path / 'ended', *more)
    original = TextTrainer.evaluate

    def evaluate(self, *args, **kwargs):
        if self.state.global_step == 10 * epoch:
            raise torch.OutOfMemoryError
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(TextTrainer, 'evaluate', evaluate)
        with pytest.raises(torch.OutOfMemoryError):
            fastformer.main(ended)
    saved = tmp_path / 'ended' / 'seed_1' / f'checkpoint-{10 * epoch}' / 'model.safetensors'
    written = saved.stat().st_mtime_ns
    (resumed,) = fastformer.main([*ended, 'run.resume=auto'])['runs']
    # It is evaluated, and not trained again.
    assert saved.stat().st_mtime_ns == written
    assert (resumed['epochs'], resumed['best_epoch']) == (whole['epochs'], whole['best_epoch'])
    for name in ('checkpoint-20', 'best'):
        files = [tmp_path / folder / 'seed_1' / name / 'model.safetensors' for folder in ('whole', 'ended')]
        expected, found = map(load_file, files)
        assert all(torch.equal(found[key], weight) for key, weight in expected.items())


def test_of_epochs_with_equal_results_the_one_with_the_lower_loss_is_tested(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr('train.fastformer.classification.accuracy_score', lambda *args, **kwargs: 0.5)
    monkeypatch.setattr('train.fastformer.classification.f1_score', lambda *args, **kwargs: 0.5)
    (run,) = fastformer.main(arguments(pairs, tmp_path, 'schedule.epochs=3', 'run.keep=9', 'run.seeds=[1]'))['runs']
    least = min(run['epochs'], key=lambda epoch: epoch['loss'])
    assert run['best_epoch'] == least['epoch'] > run['epochs'][0]['epoch']
    folder = tmp_path / 'seed_1'
    saved = sorted(folder.glob('checkpoint-*'), key=lambda path: int(path.name.partition('-')[2]))
    expected = load_file(saved[run['epochs'].index(least)] / 'model.safetensors')
    found = load_file(folder / 'best' / 'model.safetensors')
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_ctrl_c_saves_and_prints_the_command_that_goes_on(trained, pairs, tmp_path, monkeypatch, capsys):
    stop, before = 7, signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt_text_at(patch, stop, signal.SIGINT)
        with pytest.raises(SystemExit) as stopped:
            fastformer.main(
                arguments(pairs, tmp_path / 'a run', 'schedule.max_updates=15', 'run.keep=2', 'run.seeds=[1]')
            )
    assert stopped.value.code == 128 + signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before
    assert (tmp_path / 'a run' / 'seed_1' / f'checkpoint-{stop}' / 'trainer_state.json').is_file()
    said = capsys.readouterr().out
    assert f'stopped after update {stop}, which is saved' in said
    again = fastformer.main(['--quiet', *shlex.split('--config ' + said.rpartition(' --config ')[2])])
    assert again['runs'][0]['epochs'] == trained[1]['runs'][1]['epochs']


@pytest.mark.parametrize('update', [10, 15])
def test_a_signal_in_an_evaluation_stops_after_it(update, trained, pairs, tmp_path, monkeypatch):
    original = TextTrainer.evaluate

    def evaluate(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        if self.state.global_step == update:
            signal.raise_signal(signal.SIGTERM)
        return found

    seeds = [0] if update == 10 else [0, 1]
    more = ['schedule.max_updates=15', 'run.keep=2', 'run.save_updates=5', f'run.seeds={seeds}']
    common = arguments(pairs, tmp_path, *more)
    with monkeypatch.context() as patch:
        patch.setattr(TextTrainer, 'evaluate', evaluate)
        with pytest.raises(SystemExit) as stopped:
            fastformer.main(common)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert (tmp_path / 'seed_0' / f'checkpoint-{update}' / 'trainer_state.json').is_file()
    # The last update of a seed ends it; the next one does not begin.
    assert (tmp_path / 'seed_0' / 'result.json').exists() == (update == 15)
    assert not (tmp_path / 'seed_1').exists()
    again = fastformer.main([*common, 'run.resume=auto'])
    assert [run['epochs'] for run in again['runs']] == [trained[1]['runs'][seed]['epochs'] for seed in seeds]


@pytest.mark.parametrize('more', [[], ['--eval']], ids=['train', 'eval'])
def test_one_process_for_several_gpus_is_refused_before_the_folder_is_made(pairs, tmp_path, monkeypatch, more):
    monkeypatch.setattr('transformers.TrainingArguments.n_gpu', 2)
    with pytest.raises(ValueError, match='expected a process for each GPU, got one for 2: start with torchrun'):
        fastformer.main([*more, *arguments(pairs, tmp_path / 'run')])
    assert not (tmp_path / 'run').exists()


def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over(tmp_path):
    assert last_checkpoint(tmp_path / 'none') is None
    files = {4: ('model.safetensors', 'trainer_state.json'), 20: ('model.safetensors',), 24: ('trainer_state.json',)}
    for step, names in files.items():
        (tmp_path / f'checkpoint-{step}').mkdir()
        for name in names:
            (tmp_path / f'checkpoint-{step}' / name).touch()
    assert last_checkpoint(tmp_path) == str(tmp_path / 'checkpoint-4')
    (tmp_path / 'checkpoint-20' / 'trainer_state.json').touch()
    assert last_checkpoint(tmp_path) == str(tmp_path / 'checkpoint-20')


def test_a_folder_with_a_run_is_left_alone(trained, pairs):
    folder, _ = trained
    with pytest.raises(FileExistsError, match=r'run\.resume=auto to go on with it'):
        fastformer.main(arguments(pairs, folder))


def test_results_without_their_experiment_are_left_alone(pairs, tmp_path):
    kept = tmp_path / 'seed_0' / 'result.json'
    kept.parent.mkdir()
    kept.write_text('{}')
    with pytest.raises(FileExistsError, match='which holds a run'):
        fastformer.main(arguments(pairs, tmp_path))
    assert kept.exists()


def test_an_experiment_that_failed_before_its_first_seed_is_tried_again(pairs, tmp_path):
    glove = tmp_path / 'glove.txt'
    glove.write_text('w1 0.5\n')
    with pytest.raises(ValueError, match='glove'):
        fastformer.main(arguments(pairs, tmp_path / 'run', f'data.glove={glove}'))
    assert (tmp_path / 'run' / 'config.yaml').exists()
    fastformer.main(arguments(pairs, tmp_path / 'run', 'schedule.max_updates=2'))
    assert (tmp_path / 'run' / 'seed_0' / 'best').is_dir()


@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('model.interaction=add', r"model\.interaction = None as in .*, got 'add'"),
        ('run.amp=bfloat16', r"run\.amp = 'none' as in .*, got 'bfloat16'"),
        ('run.attention=eager', r"run\.attention = 'sdpa' as in .*, got 'eager'"),
        ('run.init_from={best}', r'run\.init_from = None as in .*, got .*best'),
        ('data.test_path={pairs}', r'data\.test_path = None as in .*, got .*pairs'),
        ('data.glove={pairs}', r'data\.glove = None as in .*, got .*pairs'),
        ('data.split_seed=1', r'data\.split_seed = 0 as in .*, got 1'),
    ],
)
def test_seeds_of_another_experiment_are_not_resumed(trained, pairs, override, message):
    folder, _ = trained
    before = (folder / 'config.yaml').read_text()
    override = override.format(best=folder / 'seed_0' / 'best', pairs=pairs)
    with pytest.raises(ValueError, match=f'expected {message}.*; set another run'):
        fastformer.main([*arguments(pairs, folder), 'schedule.max_updates=15', 'run.resume=auto', override])
    assert (folder / 'config.yaml').read_text() == before


def test_finished_seeds_are_taken_over_with_files_elsewhere_other_workers_and_other_seeds(trained, pairs, tmp_path):
    folder, summary = trained
    shutil.copytree(folder, tmp_path / 'run', ignore=shutil.ignore_patterns('checkpoint-*', 'best'))
    moved = shutil.copy(pairs, tmp_path / 'moved.jsonl')
    more = ['schedule.max_updates=15', 'run.resume=auto', 'run.keep=3', 'run.tensorboard=true']
    more += ['data.num_workers=1', 'data.eval_split=validation', 'data.eval_batch_size=8']
    common = [*arguments(Path(moved), tmp_path / 'run'), *more]
    assert fastformer.main([*common, 'run.seeds=[1]'])['runs'] == summary['runs'][1:]
    assert fastformer.main(common) == summary


@pytest.mark.parametrize(
    'change', ['data.split_seed=1', 'data.valid_share=0.2', 'data.max_texts=40', 'data.text_columns=[label,text]']
)
def test_a_model_is_not_evaluated_on_texts_that_it_may_have_been_trained_on(trained, pairs, change):
    key = change.partition('=')[0]
    with pytest.raises(ValueError, match=f'expected {key} = .* as in .*, or texts of training may be evaluated'):
        fastformer.main(['--eval', *arguments(pairs, trained[0]), change])


@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('run.init_from=run/seed_O/best', r'a saved model in run\.init_from, .*config\.json, got run/seed_O'),
        ('data.glove=glove.6b.txt', r'GloVe vectors in data\.glove, got glove\.6b\.txt, which is no file'),
    ],
)
def test_a_file_that_is_not_there_is_found_missing_before_earlier_runs_are_replaced(pairs, tmp_path, override, message):
    earlier = tmp_path / 'run' / 'seed_0' / 'result.json'
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    with pytest.raises(ValueError, match=f'expected {message}'):
        fastformer.main([*arguments(pairs, tmp_path / 'run'), override, 'run.overwrite=true'])
    assert earlier.exists()


class NothingEncoder(torch.nn.Module):
    """No token learns of another."""

    def __init__(self, config: FastformerConfig) -> None:
        super().__init__()

    def forward(self, hidden_states, attention_mask=None, output_hidden_states=False, output_attentions=False):
        return BaseModelOutput(last_hidden_state=hidden_states)


@pytest.mark.parametrize('mixer', ['fastformer', 'nothing'])
def test_fastformer_learns_what_a_mean_of_the_tokens_cannot_tell(tmp_path, monkeypatch, mixer):
    # The class is whether one word agrees with another. The pooled vector is a sum over tokens with positive weights,
    # of which a linear layer gets at most three of the four combinations right.
    monkeypatch.setitem(encoder.ENCODERS, 'nothing', NothingEncoder)
    draw, lines = random.Random(0), []
    for number in range(500):
        words = draw.choices([f'w{index}' for index in range(10)], k=draw.randint(2, 6))
        for word in (('red', 'blue')[number % 2], ('up', 'down')[number // 2 % 2]):
            words.insert(draw.randint(0, len(words)), word)
        label = ('agree', 'differ')[(number + number // 2) % 2]
        lines.append(json.dumps({'text': ' '.join(words), 'label': label}) + '\n')
    path = tmp_path / 'agreements.jsonl'
    path.write_text(''.join(lines))
    more = ['run.seeds=[1]', 'schedule.epochs=8', 'optim.lr=1e-2', 'data.test_share=0.25', 'model.num_hidden_layers=1']
    more += ['model.hidden_size=32', 'model.num_attention_heads=4', 'model.hidden_dropout_prob=0']
    summary = fastformer.main(arguments(path, tmp_path / 'run', *more, f'model.encoder_mixer={mixer}'))
    accuracy = summary['test_accuracy']['mean']
    assert accuracy >= 0.95 if mixer == 'fastformer' else 0.5 < accuracy < 0.85


# The tests of the encoders have all of them.
def test_a_baseline_trains_by_one_switch(pairs, tmp_path):
    more = ['model.encoder_mixer=longformer', 'schedule.max_updates=2', 'run.seeds=[0]', 'data.max_texts=40']
    more += ['run.save_updates=1']
    fastformer.main(arguments(pairs, tmp_path, *more))
    trained = AutoModelForSequenceClassification.from_pretrained(tmp_path / 'seed_0' / 'best')
    assert trained.config.encoder_mixer == 'longformer'
    run = text_run(pairs, tmp_path, *more)
    set_seed(0)
    before = run.make_model(run.make_tokenizer(), seed=0).state_dict()
    moved = {name: not torch.equal(value, before[name]) for name, value in trained.state_dict().items()}
    # Biases of keys cancel in a softmax.
    assert [
        name for name, does in moved.items() if not does and not name.endswith(('key.bias', 'key_global.bias'))
    ] == []


def test_the_models_differ_in_their_encoder_alone(pairs, tmp_path):
    run = text_run(pairs, tmp_path)
    tokenizer = run.make_tokenizer()
    around = {}
    for mixer in ('fastformer', *BASELINES):
        model = text_run(pairs, tmp_path, f'model.encoder_mixer={mixer}').make_model(tokenizer, seed=0)
        around[mixer] = {name: p.shape for name, p in model.named_parameters() if '.encoder.' not in name}
    assert len({tuple(shapes.items()) for shapes in around.values()}) == 1


def test_a_run_says_how_many_words_glove_has(pairs, tmp_path, capsys):
    glove = tmp_path / 'glove.txt'
    glove.write_text(''.join(f'{word} {" ".join(["0.5"] * 16)}\n' for word in ('red', 'blue', 'unheard')))
    more = [f'data.glove={glove}', 'run.seeds=[0]', 'schedule.max_updates=1']
    summary = fastformer.main(arguments(pairs, tmp_path / 'run', *more))
    # 20 other words, and three special tokens beside padding.
    assert summary['runs'][0]['glove'] == {'found': 2, 'drawn': 23, 'padding': 1}
    # A single seed has no deviation.
    assert summary['test_accuracy']['std'] is None
    assert 'seed 0: GloVe has 2 of the 25 words of the vocabulary' in capsys.readouterr().out


def test_glove_without_a_word_of_the_texts_is_an_error(pairs, tmp_path):
    glove = tmp_path / 'glove.txt'
    glove.write_text(''.join(f'{word} {" ".join(["0.5"] * 16)}\n' for word in ('unheard', 'of')))
    run = text_run(pairs, tmp_path, f'data.glove={glove}')
    with pytest.raises(ValueError, match=r'expected words of the vocabulary in data\.glove, got none of 25 in .*glove'):
        run.make_model(run.make_tokenizer(), seed=0)


def test_training_goes_on_from_a_saved_model_with_its_vocabulary(trained, pairs, tmp_path):
    folder, _ = trained
    run = text_run(pairs, tmp_path, f'run.init_from={folder / "seed_0" / "best"}')
    tokenizer = run.make_tokenizer()
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(folder / 'seed_0' / 'best').get_vocab()
    expected = load_file(folder / 'seed_0' / 'best' / 'model.safetensors')
    assert tokenizer.model_max_length == run.config.data.max_length
    found = run.make_model(tokenizer, seed=0).state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('model.hidden_size=32', r'expected model\.hidden_size = 16 as in run\.init_from .*, got 32'),
        ('model.preset=imdb', r'expected model\.embedding_size = 16 as in run\.init_from .*, got 300'),
        ('data.glove=glove.txt', r"expected data\.glove=null, as run\.init_from .* has embeddings, got 'glove\.txt'"),
    ],
)
def test_what_an_experiment_states_of_a_saved_model_is_so(trained, pairs, tmp_path, override, message):
    run = text_run(pairs, tmp_path, f'run.init_from={trained[0] / "seed_0" / "best"}', override)
    with pytest.raises(ValueError, match=message):
        run.make_model(run.make_tokenizer(), seed=0)


def test_a_saved_model_has_the_attention_of_the_experiment(trained, pairs, tmp_path):
    run = text_run(pairs, tmp_path, 'run.attention=eager')
    assert run.load_model(trained[0] / 'seed_0' / 'best').config._attn_implementation == 'eager'


def test_a_model_of_other_classes_is_an_error(trained, tmp_path):
    folder, _ = trained
    other = tmp_path / 'other.jsonl'
    other.write_text(''.join(json.dumps({'text': f'w{i}', 'label': 'abc'[i % 3]}) + '\n' for i in range(60)))
    with pytest.raises(ValueError, match=r'expected a model of the classes a, b, c, got .* with both, one'):
        text_run(other, tmp_path).evaluate(folder / 'seed_0' / 'best', 'test')


def test_a_model_that_takes_shorter_texts_is_an_error(trained, pairs, tmp_path):
    with pytest.raises(ValueError, match=r'expected data\.max_length of at most 32, as .*best takes, got 33'):
        text_run(pairs, tmp_path, 'data.max_length=33').load_model(trained[0] / 'seed_0' / 'best')


def test_a_missing_model_to_evaluate_is_an_error(pairs, tmp_path):
    with pytest.raises(ValueError, match=r'expected a saved model in .*best, got none'):
        fastformer.main(['--eval', *arguments(pairs, tmp_path)])


def test_every_reader_is_a_kind_of_data():
    assert get_args(get_type_hints(ClassificationData)['kind']) == tuple(READERS)


def test_the_columns_of_jmars_and_reviews_without_a_rating_are_said_by_the_experiment(tmp_path):
    path = write_jmars(tmp_path / 'data.json', rows=120)
    reviews = [{'body': row['review'], 'head': 'Hm', 'stars': row['rating']} for row in json.loads(path.read_text())]
    reviews[7]['stars'] = None
    path.write_text(json.dumps(reviews))
    columns = ['data.kind=jmars', 'data.text_columns=[head,body]', 'data.label_column=stars']
    with pytest.raises(ValueError, match="column 'stars': expected a label, got None"):
        text_run(path, tmp_path, *columns)
    splits = text_run(path, tmp_path, *columns, 'data.drop_incomplete=true').splits
    assert sum(len(split) for split in splits.values()) == 119
    assert all(text.startswith('Hm ') for text in splits['train']['text'])


def test_test_texts_of_their_own_are_all_tested(pairs, tmp_path):
    data = text_run(pairs, tmp_path, f'data.test_path={pairs}', 'data.valid_share=0.25').splits
    assert {name: len(part) for name, part in data.items()} == {'train': 150, 'validation': 50, 'test': 200}


def test_test_texts_that_are_training_texts_too_are_counted(tmp_path, caplog):
    for name, numbers in (('train', range(20)), ('test', range(17, 24)), ('other', range(30, 40))):
        rows = [{'text': f'text  {number}', 'label': 'ab'[number % 2]} for number in numbers]
        (tmp_path / f'{name}.jsonl').write_text('\n'.join(map(json.dumps, rows)).replace('  ', ' ' * len(name)))
    path = tmp_path / 'train.jsonl'
    splits = text_run(path, tmp_path, f'data.test_path={tmp_path / "test.jsonl"}', 'data.valid_share=0.1').splits
    shared = sum(
        f'text {number}' in {' '.join(text.split()) for text in splits['train']['text']} for number in range(17, 20)
    )
    assert shared
    assert f'{shared} of the 7 test texts' in caplog.text
    caplog.clear()
    assert text_run(path, tmp_path, f'data.test_path={tmp_path / "other.jsonl"}', 'data.valid_share=0.1').splits
    assert not caplog.text


def test_test_texts_of_other_classes_are_an_error(pairs, tmp_path):
    other = tmp_path / 'other.jsonl'
    other.write_text('{"text": "a", "label": "one"}\n{"text": "b", "label": "two"}\n')
    with pytest.raises(ValueError, match=r"other\.jsonl, line 2, column 'label': expected one of both, one, got 'two'"):
        text_run(pairs, tmp_path, f'data.test_path={other}')


@pytest.mark.parametrize('kind', ['table', 'mind_topic'])
def test_test_texts_may_lack_classes(tmp_path, kind):
    for name, classes in (('train', 'abc'), ('test', 'cac')):
        lines = [
            '\t'.join([f'N{number}', classes[number % 3], 'x', f'title {classes[number % 3]} {number}', *'abcd'])
            for number in range(30)
        ]
        header = 'id\tlabel\tother\ttext\ta\tb\tc\td\n' if kind == 'table' else ''
        (tmp_path / f'{name}.tsv').write_text(header + '\n'.join(lines) + '\n')
    path = tmp_path / 'train.tsv'
    splits = text_run(path, tmp_path, f'data.test_path={tmp_path / "test.tsv"}', f'data.kind={kind}').splits
    assert splits['test'].features == splits['train'].features
    assert splits['test'].features['label'].names == ['a', 'b', 'c']
    assert splits['test']['label'][:] == [2, 0, 2] * 10
    assert [text.split()[1] for text in splits['test']['text']] == list('cac') * 10


def test_the_splits_are_the_same_for_all_seeds_and_change_with_their_own(pairs, tmp_path):
    first, same, other = (text_run(pairs, tmp_path, *more).splits['test']['text'] for more in OVERRIDES)
    assert first == same
    assert first != other


OVERRIDES = (['run.seeds=[0]'], ['run.seeds=[7]'], ['data.split_seed=1'])


def test_buckets_depend_on_the_seed_and_the_epoch_alone():
    lengths = [random.Random(i).randint(1, 50) for i in range(300)]
    sampler = BucketSampler(8, lengths, seed=0)
    first = list(sampler)
    torch.manual_seed(1)
    sampler.set_epoch(1)
    second = list(sampler)
    other = BucketSampler(8, lengths, seed=0)
    other.set_epoch(1)
    assert list(other) == second != first
    assert second != list(BucketSampler(8, lengths, seed=1))
    assert sorted(first) == sorted(second) == list(range(300))
    spread = [max(part) - min(part) for part in ([lengths[i] for i in first[j : j + 8]] for j in range(0, 296, 8))]
    assert sum(spread) / len(spread) < 6


WRONG = {
    'fastformer': [
        (
            'model.encoder_mixer=longfomer',
            r"'longfomer' is not an encoder; did you mean longformer\?; import the module",
        ),
        ('model.preset=imbd', r"model\.preset = 'imbd' is not a preset; did you mean imdb"),
        ('model.hiden_size=3', r"model\.hiden_size = 3: Key .* Did you mean .*'hidden_size'"),
        ('model.hidden_size=wide', r"model\.hidden_size = 'wide': "),
        ('model.hidden_size=17', r'model: hidden_size must be a multiple of num_attention_heads \(2\), got 17'),
        ('model.vocab_size=17', r'model\.vocab_size = 17 is not for an experiment: the training texts decide'),
        ('optim.name=adamw_torhc', r"optim\.name = 'adamw_torhc' is not an optimizer; did you mean adamw_torch"),
        ('run.seeds=[1,1]', r'run\.seeds to be one seed or several different ones, got \[1, 1\]'),
        ('data.valid_share=0.95', r'data\.test_share \+ data\.valid_share to be below 1'),
        ('task=[a]', r"task = '\[a\]' is not a task"),
        ('task=clasification', r"task = 'clasification' is not a task; did you mean classification\?$"),
        ('optim.accumulate=3', r'data\.batch_size to be a multiple of optim\.accumulate \(3\)'),
        ('data.bodies=docs.tsv', r"data\.bodies to be null except for mind_topic, got 'docs\.tsv'"),
        ('data.kind=mind', r"data\.kind = 'mind': .* expected one of .'amazon', 'jmars', 'mind_topic'"),
        ('data.text_columns=[]', r'data\.text_columns to be one column or several, got \[\]'),
        ('data.tokenizer=bpe data.glove=glove.txt', r'data\.glove to be null with data\.tokenizer=bpe'),
        ('data.kind=amazon data.text_columns=[title]', r'text_columns to be null except for table, hub, jmars, '),
        ('data.kind=hub data.test_path=b', r"data\.test_path to be null for a data set of the hub, got 'b'"),
    ],
    'conversion': [
        ('data.drop_missing=true', r'data\.drop_missing to be false except for mind, got True'),
        ('model.max_behaviors=9', r'model\.max_behaviors = 9 is not for an experiment: data\.max_behaviors says'),
    ],
    'recommendation': [
        ('model.max_behaviors=3', r"model\.max_behaviors = 3: Key 'max_behaviors' not in 'Model'"),
        ('data.kind=movielens data.valid_path=x', r'data\.valid_path to be null except for mind'),
        ('data.kind=mind data.shown=5', r'data\.shown to be 99 except for movielens, got 5'),
        ('data.glove=x model.text_model=y', r'expected data\.glove to be null with model\.text_model'),
    ],
    'summarization': [
        ('generate.num_beams=1 generate.length_penalty=0.8', r'length_penalty to be 1 where .*num_beams is 1, got 0'),
        ('generate.min_length=8', r'generate\.min_length to be below data\.max_summary_length \(8\), got 8'),
        ('model.max_target_positions=9', r'is not for an experiment: data\.max_summary_length says'),
        ('data.skip_lines=-1', r'data\.skip_lines to be at least 0, got -1'),
        ('data.split_column=split data.test_path=x', r'data\.split_column to be null .* where other splits have'),
        ('data.revision=x', r"data\.revision to be null for files, got 'x'"),
        ('data.kind=pubmed data.text_columns=[x]', r'data\.text_columns to be \[text\] except for table, hub'),
    ],
}


@pytest.mark.parametrize(
    ('name', 'overrides', 'message'), [(name, *wrong) for name, each in WRONG.items() for wrong in each]
)
def test_what_is_wrong_with_an_experiment_is_named(name, overrides, message):
    with pytest.raises(ValueError, match=message):
        load_text_config(SMOKE.with_name(f'{name}.yaml'), overrides.split())


def test_the_resolved_file_gives_the_same_experiment(tmp_path):
    config = load_text_config(SMOKE, ['model.preset=imdb', 'data.text_columns=[title,text]'])
    save_config(asdict(config), tmp_path / 'resolved.yaml')
    assert load_text_config(tmp_path / 'resolved.yaml', []) == config


def test_a_preset_of_the_command_line_replaces_what_a_file_states(tmp_path, capsys):
    file = tmp_path / 'file.yaml'
    file.write_text(f'base: {SMOKE}\nmodel: {{hidden_size: 24, num_attention_heads: 3}}\n')
    more = ['data.text_columns=[title,text]']
    config = text_model_config(load_text_config(file, ['model.preset=imdb', *more]).model, 100, vocab_size=7)
    preset = text_model_config({'preset': 'imdb'}, 100, vocab_size=7)
    assert (config.hidden_size, config.num_attention_heads) == (preset.hidden_size, preset.num_attention_heads)
    assert f'model.num_attention_heads of {file} left out: model.preset=imdb states them' in capsys.readouterr().err
    typed = load_text_config(file, ['model.preset=imdb', 'model.hidden_size=32', *more]).model
    assert text_model_config(typed, 100, vocab_size=7).hidden_size == 32


def test_a_key_of_the_model_section_overrides_its_preset():
    config = text_model_config({'preset': 'mind_topic', 'block_size': 4}, 100, vocab_size=7)
    assert isinstance(config, FastformerConfig)
    assert (config.block_size, config.attention_window, config.embedding_size) == (4, 16, 300)
    assert (config.max_position_embeddings, config.vocab_size) == (100, 7)


def test_macro_f_is_the_mean_over_the_classes_that_the_texts_have():
    def measured(labels: list[int], chosen: list[int]) -> dict[str, float]:
        return classification_metrics(EvalPrediction(torch.eye(4)[chosen].numpy(), np.array(labels)))

    # Class 0: F = 2 * 1 * 0.5 / 1.5; class 1: 1; class 3 is in no text, and class 2 neither.
    found = measured([0, 0, 1, 1], [0, 3, 1, 1])
    assert found == pytest.approx({'accuracy': 0.75, 'macro_f': (2 / 3 + 1) / 2})
    # A class of the texts that is never predicted counts.
    assert measured([0, 0, 2, 1], [0, 0, 0, 1])['macro_f'] == pytest.approx((0.8 + 0 + 1) / 3)


def copy_of_the_hub(folder: Path, monkeypatch, **rows: int) -> Path:
    """A folder as the hub has data sets, with so many rows of each part."""
    folder.mkdir()
    for part, count in rows.items():
        lines = [
            {'text': f'{part} {number}', 'label': 'abc'[number % 3], 'summary': f's {part} {number}'}
            for number in range(count)
        ]
        (folder / f'{part}.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    monkeypatch.setattr('datasets.config.HF_DATASETS_CACHE', folder.with_name('cache'))
    return folder


@pytest.mark.parametrize(
    ('rows', 'expected'),
    [
        (dict(train=40), {'train': 32, 'validation': 4, 'test': 4}),
        (dict(train=40, test=2), {'train': 36, 'validation': 4, 'test': 2}),
        (dict(train=40, validation=1, test=2), {'train': 40, 'validation': 1, 'test': 2}),
    ],
    ids=['train', 'test', 'all'],
)
def test_what_a_data_set_of_the_hub_lacks_is_drawn(tmp_path, monkeypatch, rows, expected):
    folder = copy_of_the_hub(tmp_path / 'copy', monkeypatch, **rows)
    for smoke in (SMOKE, SMOKE.with_name('summarization.yaml')):
        config = load_text_config(smoke, ['data.kind=hub', f'data.path={folder}'])
        parts = TASKS[config.task].read(config, tmp_path).splits
        assert {name: len(part) for name, part in parts.items()} == expected
        for part in rows.keys() - {'train'}:
            assert all(text.startswith(part) for text in parts[part]['text'])
        assert all(text.startswith('train') for text in parts['train']['text'])


def test_a_configuration_of_the_hub_is_named(tmp_path, monkeypatch):
    folder = copy_of_the_hub(tmp_path / 'copy', monkeypatch, a=30, b=40)
    names = ''.join(
        f'- config_name: {name}\n  data_files:\n  - {{split: train, path: {name}.jsonl}}\n' for name in 'ab'
    )
    (folder / 'README.md').write_text(f'---\nconfigs:\n{names}---\n')
    assert text_run(folder, tmp_path, 'data.kind=hub', 'data.hub_config=b').counts()['train'] == 32
    with pytest.raises(ValueError, match=r"Please pick one among the available configs: \['a', 'b'\]"):
        text_run(folder, tmp_path, 'data.kind=hub')
