"""A run that is interrupted and resumed ends with the same bits as one that is not."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from helpers import CLOTHING, digest, interrupt_at, link_photographs, losses, make_folder, stop_in
from small_runs import RECIPE, SMALL, assert_same_results
from stream_files import numbered, write_shards

from train import engine
from train.distributed import World
from train.imagenet import main


@pytest.fixture(scope='module')
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 to train with and 20 to evaluate."""
    return link_photographs(tmp_path_factory.mktemp('photographs'), 6, 2)


@pytest.fixture(scope='module')
def small(photographs: Path) -> list[str]:
    """The arguments of two epochs of three updates."""
    return [*RECIPE, *SMALL, f'data.dir={photographs}', 'data.batch_size=20']


@pytest.fixture(scope='module')
def whole(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Them without an interruption."""
    run_dir = tmp_path_factory.mktemp('whole')
    main([*small, f'run.dir={run_dir}'])
    return run_dir


@pytest.mark.parametrize('update', [3, 6])
def test_a_run_stopped_by_a_signal_ends_as_if_it_had_not_been(small, update, whole, tmp_path, monkeypatch):
    # What limits the run is measured anew each time, wherever in the epoch it goes on.
    arguments = [*small, 'run.resume=auto', 'run.throughput_batches=1', f'run.dir={tmp_path}']
    assert stop_in(monkeypatch, update, main, arguments) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert torch.load(tmp_path / 'last.pth', weights_only=True)['updates'] == update
    state = main(arguments)
    assert state.progress.updates == 6
    assert_same_results(tmp_path, whole)


@pytest.mark.parametrize('epoch', [1, 2])
def test_a_signal_during_an_evaluation_stops_the_run_after_it(small, epoch, whole, tmp_path, monkeypatch):
    arguments = [*small, 'run.resume=auto', f'run.dir={tmp_path}']
    original, calls = engine.evaluate_all, []

    def evaluate_all(*args, **kwargs):
        calls.append(args)
        if len(calls) == epoch:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(engine, 'evaluate_all', evaluate_all)
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert torch.load(tmp_path / 'last.pth', weights_only=True)['updates'] == 3 * epoch
    main(arguments)
    assert_same_results(tmp_path, whole)


def test_ctrl_c_saves_and_prints_how_to_go_on(small, whole, tmp_path, monkeypatch, capsys):
    code = stop_in(monkeypatch, 2, main, [*small, f'run.dir={tmp_path}'], number=signal.SIGINT)
    assert code == 128 + signal.SIGINT
    arguments = capsys.readouterr().out.rpartition(' --config ')[2].split()
    assert main(['--config', *arguments]).progress.updates == 6
    assert_same_results(tmp_path, whole)


def test_two_interruptions_in_one_epoch_and_other_workers_change_nothing(small, whole, tmp_path, monkeypatch):
    arguments = [*small, 'run.resume=auto', f'run.dir={tmp_path}']
    for update, workers in ((1, 1), (2, 2)):
        stop_in(monkeypatch, update, main, [*arguments, f'data.num_workers={workers}'])
    main(arguments)
    assert_same_results(tmp_path, whole)


def test_several_sizes_and_a_falling_temperature_go_on_as_if_not_interrupted(small, tmp_path, monkeypatch):
    more = ['data.train_sizes=[32,48]', 'data.train_size_schedule=progressive', 'data.batch_size=12']
    more += ['model.gumbel=true', 'regularize.kernel_entropy=0.1', 'regularize.tau_end=0.1']
    main([*small, *more, f'run.dir={tmp_path / "whole"}'])
    arguments = [*small, *more, 'run.resume=auto', f'run.dir={tmp_path / "stopped"}']
    for update in (2, 4):
        stop_in(monkeypatch, update, main, arguments)
    main([*arguments, 'data.num_workers=1'])
    assert_same_results(tmp_path / 'stopped', tmp_path / 'whole')


def test_images_of_native_shapes_go_on_as_if_not_interrupted(small, tmp_path, monkeypatch):
    more = ['data.max_tokens=480', 'run.eval_every=2']
    main([*small, *more, f'run.dir={tmp_path / "whole"}'])
    arguments = [*small, *more, 'run.resume=auto', f'run.dir={tmp_path / "stopped"}']
    for update, workers in ((2, 0), (4, 1)):
        loading = [f'data.num_workers={workers}', 'run.throughput_batches=1']
        stop_in(monkeypatch, update, main, [*arguments, *loading])
    main(arguments)
    assert_same_results(tmp_path / 'stopped', tmp_path / 'whole')


def test_the_newest_checkpoint_that_is_whole_is_used(small, whole, tmp_path, monkeypatch, caplog):
    arguments = [*small, 'run.resume=auto', f'run.dir={tmp_path}']
    for update in (2, 4):
        stop_in(monkeypatch, update, main, arguments)
    content = (tmp_path / 'last.pth').read_bytes()
    (tmp_path / 'last.pth').write_bytes(content[: len(content) // 2])
    main(arguments)
    assert 'last.pth, which is damaged' in caplog.text
    assert digest(tmp_path / 'last.pth') == digest(whole / 'last.pth')


def test_damaged_checkpoints_alone_are_an_error(small, tmp_path):
    (tmp_path / 'last.pth').write_bytes(b'half')
    with pytest.raises(ValueError, match=r'expected a whole checkpoint in .*, got damaged ones: .*last\.pth'):
        main([*small, 'run.resume=auto', f'run.dir={tmp_path}'])
    assert (tmp_path / 'last.pth').read_bytes() == b'half'


def test_a_finished_run_stays_finished_with_the_config_of_its_training(small, whole, capsys):
    before, config = digest(whole / 'last.pth'), (whole / 'config.yaml').read_text()
    state = main([*small, 'run.resume=auto', f'run.dir={whole}', 'run.seed=5', 'run.amp=bfloat16'])
    assert state.progress.updates == 6
    assert len(state.progress.history) == len(losses(whole)) == 2
    assert digest(whole / 'last.pth') == before
    assert (whole / 'config.yaml').read_text() == config
    shown = capsys.readouterr().out
    assert f'resumed from {whole / "last.pth"}: complete, update 6' in shown
    assert 'now with run.seed = 5, was 0' in shown
    assert "now with run.amp = 'bfloat16', was 'none'" in shown


def test_a_run_may_go_on_from_another_folder_for_more_epochs(small, whole, tmp_path, capsys):
    longer = ['schedule.epochs=3', f'run.resume={whole / "last.pth"}', f'run.dir={tmp_path}']
    state = main([*small, *longer, 'optim.accumulate=1'])
    assert state.progress.updates == 9
    assert [row['epoch'] for row in state.progress.history] == [0, 1, 2]
    assert (tmp_path / 'export' / 'model.safetensors').is_file()
    shown = capsys.readouterr().out
    assert f'resumed from {whole / "last.pth"}: epoch 3, update 6' in shown
    assert 'now with schedule.epochs = 3, was 2' in shown
    assert 'now with optim.accumulate = 1, was 2' in shown
    assert 'run.seed' not in shown
    assert 'data.dir' not in shown


def test_a_run_does_not_go_on_in_the_folder_of_another(small, whole, tmp_path):
    for name in ('last.pth', 'best.pth', 'summary.csv'):
        shutil.copy(whole / name, tmp_path / name)
    (tmp_path / 'best.pth').write_bytes(b'the best of another run')
    arguments = [*small, 'schedule.epochs=3', f'run.resume={whole}', f'run.dir={tmp_path}']
    with pytest.raises(FileExistsError, match=rf'got {tmp_path}, which holds a run, not that of run.resume={whole}'):
        main(arguments)
    assert (tmp_path / 'best.pth').read_bytes() == b'the best of another run'
    main([*arguments, 'run.overwrite=true'])
    assert torch.load(tmp_path / 'best.pth', weights_only=True)['epoch'] == 3
    # A checkpoint of the folder itself is no other run.
    main([*small, 'schedule.epochs=4', f'run.resume={tmp_path / "last.pth"}', f'run.dir={tmp_path}'])


@pytest.mark.parametrize(
    ('other', 'where', 'message'),
    [
        ('', '', r'is not complete, got run\.resume=.*, which is, after update 6'),
        ('optim.name=sgd', '', r'a run with optim\.name = sgd, as this one has, got .*last\.pth with adamw'),
        ('optim.weight_decay=0', '', r'last\.pth: .* groups; optim\.layer_decay, and whether optim\.weight_d'),
        ('optim.layer_decay=0.5', '', r'the parameter groups of this run, got .*last\.pth: .* must be as they were'),
        ('data.batch_size=16', 'last.pth', r'a run with batch_size = 16, .* got .* with 20'),
        # The folder of a run stands for its newest checkpoint.
        *(
            ('model.depth=2', where, r'last\.pth: .*Missing key.*blocks\.1\..*; model\.depth = 2, was 1$')
            for where in ('last.pth', '')
        ),
        ('', 'best.pth', r'with the state of the optimizer, as last\.pth has, got .*best\.pth'),
    ],
)
def test_another_run_is_not_gone_on_with(small, whole, tmp_path, other, where, message):
    with pytest.raises(ValueError, match=message):
        main([*small, *other.split(), f'run.resume={whole / where}', f'run.dir={tmp_path / "run"}'])
    assert not (tmp_path / 'run').exists()


def test_other_data_are_not_gone_on_with(small, whole, tmp_path):
    names = [path.name for path in (CLOTHING / 'train').iterdir()]
    folder = make_folder(tmp_path / 'images', {'train': names, 'val': names}, 4)
    other = [f'data.dir={folder}', f'run.resume={whole / "last.pth"}', f'run.dir={tmp_path / "run"}']
    with pytest.raises(ValueError, match=r'a run with updates_per_epoch = 2, .* got .* with 3; the data set and'):
        main([*small, *other])


@pytest.mark.parametrize('part', ['class_names', 'epoch', 'scaler', 'world_size'])
def test_a_checkpoint_without_a_part_of_the_state_is_not_gone_on_with(small, whole, tmp_path, part):
    content = torch.load(whole / 'last.pth', weights_only=True)
    del content[part]
    torch.save(content, tmp_path / 'part.pth')
    with pytest.raises(
        ValueError, match=rf"whole state of a run, .*, got .*part\.pth without '{part}'; run\.init_from"
    ):
        main([*small, f'run.resume={tmp_path / "part.pth"}', f'run.dir={tmp_path / "run"}'])


def test_a_data_set_that_changed_is_an_error_within_an_epoch_and_a_line_after_it(small, tmp_path, monkeypatch, capsys):
    found = '60 training samples in files of other names'
    arguments = [*small, 'run.resume=auto', 'schedule.epochs=1', f'run.dir={tmp_path / "run"}']
    photographs = link_photographs(tmp_path / 'images', 6, 2)
    stop_in(monkeypatch, 2, main, [*arguments, f'data.dir={photographs}'])
    # Elsewhere it is the same data set.
    moved = photographs.rename(tmp_path / 'moved')
    first = sorted((moved / 'train').rglob('*.*'))[0]
    away = first.rename(first.with_stem('other'))
    with pytest.raises(ValueError, match=f'within an epoch, after 2 of 3 updates, got {found}: the rest'):
        main([*arguments, f'data.dir={moved}'])
    away.rename(first)
    main([*arguments, f'data.dir={moved}'])
    first.rename(away)
    capsys.readouterr()
    main([*arguments, 'schedule.epochs=2', f'data.dir={moved}'])
    assert f'now with {found}' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('lengths', 'name', 'found'),
    [((8, 7), '{}', '15 training samples, was 16'), ((8, 8), 'b{}', '16 training samples in files of other names')],
)
def test_shards_that_changed_are_an_error_within_an_epoch(small, tmp_path, monkeypatch, lengths, name, found):
    stream = ['data.name=wds/', 'data.num_classes=2', 'data.batch_size=5', 'augment.repeats=1', 'augment.mix_prob=0']
    arguments = [*small, *stream, 'optim.accumulate=1', 'run.resume=auto', f'run.dir={tmp_path / "run"}']
    write_shards(tmp_path / 'first', [numbered(0, 8), numbered(8, 8)])
    stop_in(monkeypatch, 2, main, [*arguments, f'data.dir={tmp_path / "first"}'])
    write_shards(tmp_path / 'other', [numbered(0, lengths[0]), numbered(8, lengths[1])], name=name)
    with pytest.raises(ValueError, match=f'within an epoch, after 2 of 3 updates, got {found}: the rest'):
        main([*arguments, f'data.dir={tmp_path / "other"}'])


def test_other_classes_are_not_gone_on_with(small, whole, tmp_path):
    content = torch.load(whole / 'last.pth', weights_only=True)
    names = content['class_names']
    torch.save({**content, 'class_names': [*names[1:], names[0]]}, tmp_path / 'permuted.pth')
    with pytest.raises(
        ValueError, match=r'the 10 classes dress, hat, .*permuted\.pth with the 10 classes hat, longsleeve'
    ):
        main([*small, f'run.resume={tmp_path / "permuted.pth"}', f'run.dir={tmp_path / "run"}'])


def test_a_run_may_go_on_with_another_precision_and_without_the_average(small, whole, tmp_path):
    for name in ('last.pth', 'best.pth', 'summary.csv'):
        shutil.copy(whole / name, tmp_path / name)
    other = ['run.amp=float16', 'ema.decay=null', 'ema.warmup=false', 'schedule.epochs=3', 'optim.weight_decay=0.3']
    state = main([*small, *other, 'run.resume=auto', f'run.dir={tmp_path}'])
    assert (state.progress.updates, state.scaler.get_scale() > 1) == (9, True)
    assert max(group['weight_decay'] for group in state.optimizer.param_groups) == 0.3
    rows = losses(tmp_path)
    assert rows[:2] == losses(whole)
    assert [row['eval_ema_top1'] == 'nan' for row in rows] == [False, False, True]


def test_after_a_signal_no_process_ends_before_the_state_is_saved(small, tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(World, 'wait', lambda _: saved.append((tmp_path / 'last.pth').exists()))
    interrupt_at(monkeypatch, 2)
    with pytest.raises(SystemExit):
        main([*small, f'run.dir={tmp_path}'])
    # The last that all processes wait for.
    assert saved[-1]


def test_a_folder_without_a_checkpoint_is_not_gone_on_with(small, tmp_path):
    with pytest.raises(ValueError, match=rf'expected a run with a checkpoint in {tmp_path}, got none'):
        main([*small, f'run.resume={tmp_path}', f'run.dir={tmp_path / "run"}'])


def test_the_latest_checkpoints_are_kept_and_saved_by_the_clock(small, tmp_path):
    main([*small, 'run.save_minutes=1e-9', 'run.keep=3', f'run.dir={tmp_path}'])
    kept = ('last.pth', 'last-1.pth', 'last-2.pth')
    saved = [torch.load(tmp_path / name, weights_only=True) for name in kept]
    assert [(content['epoch'], content['updates']) for content in saved] == [(2, 6), (1, 5), (1, 4)]
    assert not (tmp_path / 'last-3.pth').exists()
