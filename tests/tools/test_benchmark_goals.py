"""The table of goals: its verdicts, its exit code, and what each measurement compares."""

import dataclasses
import io
import json
import sys
from contextlib import nullcontext, redirect_stdout
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from helpers import require_ffcv
from torch.autograd import DeviceType

from aft_vision.ops.common import choice
from tools import machine
from tools.benchmark import compare, decode, goals, measurements, ops
from tools.benchmark.__main__ import main
from tools.benchmark.compare import Candidate, Prepared
from tools.benchmark.goals import Goal, make_goals, measure_goals
from tools.benchmark.measurements import Measurement
from tools.benchmark.models import classifier
from tools.benchmark.ops import Operation
from train import throughput
from train.config import load_config

CPU = torch.device('cpu')
FULL = Operation('aft_full', (1, 5, 64), 1, (5, 5))
LOCAL = Operation('aft_local_causal', (1, 40, 64), 1, (40, 4))
CONV = Operation('aft_conv', (1, 36, 64), 1, (8, 3, 3))
both_directions = pytest.mark.parametrize('training', [False, True], ids=['forward', 'training'])


def local(tokens: int) -> Candidate:
    operation = LOCAL._replace(shape=(1, tokens, 64), bias=(tokens, 4))
    return Candidate(f'T={tokens}', partial(operation.own, torch.float32, CPU))


@pytest.fixture
def table(monkeypatch):
    """A table of goals that a test fills."""
    found: list[Goal] = []
    monkeypatch.setattr(goals, 'make_goals', lambda: found)
    return found


@pytest.mark.parametrize(
    ('value', 'at_most', 'verdict'),
    [(1.5, False, 'goal'), (1.2, False, 'floor'), (0.9, False, 'below'), (0.9, True, 'goal'), (1.6, True, 'below')],
)
def test_a_figure_reaches_its_goal_or_its_floor_or_neither(value: float, at_most: bool, verdict: str):
    floor, goal = (1.5, 1.0) if at_most else (1.0, 1.5)
    assert Goal(1, 'speed', floor, goal, Measurement, at_most).verdict(value) == verdict
    # Without a floor nothing can fall below it.
    assert Goal(1, 'speed', None, None, Measurement, at_most).verdict(value) == 'reported'
    only_goal = 'goal' if verdict == 'goal' else 'reported'
    assert Goal(1, 'speed', None, goal, Measurement, at_most).verdict(value) == only_goal


def test_a_figure_without_what_it_needs_is_open_and_fails_nothing(table, monkeypatch, capsys):
    monkeypatch.setattr(goals, 'has_bfloat16', lambda device: False)
    monkeypatch.setattr('torch.cuda.is_available', lambda: False)
    for needs in ('bfloat16', 'cuda', 'a_package_that_is_absent'):
        table.append(Goal(17, f'on {needs}', 1.0, 2.0, lambda rounds: Measurement(0.1), needs=needs))
    assert {row['verdict'] for row in main(['goals', '--allow-load'])['rows']} == {'open'}
    assert sum(line.endswith('open') for line in capsys.readouterr().out.splitlines()) == 3
    monkeypatch.setattr(goals, 'has_bfloat16', lambda device: True)
    with pytest.raises(SystemExit):
        main(['goals', '--allow-load'])


@pytest.mark.parametrize(
    ('flags', 'capability', 'has_bfloat16', 'words'),
    [
        ('flags : sse avx2 avx512f', 'AVX512', False, 'some processor, AVX-512'),
        ('flags\t: avx2 avx512f avx512_bf16', 'AVX512', True, 'some processor, AVX-512 with bfloat16'),
        ('flags\t: avx2 avx512f avx512_bf16', 'AVX2', False, 'some processor, AVX2'),
        ('flags : avx2', 'AVX2', False, 'some processor, AVX2'),
        ('flags : avx2 avx512f', 'DEFAULT', False, 'some processor, no vector instructions known'),
    ],
)
def test_a_verdict_names_the_processor_and_its_instructions(
    monkeypatch, tmp_path, flags, capability, has_bfloat16, words
):
    monkeypatch.setattr('torch.backends.cpu.get_cpu_capability', lambda: capability)
    (tmp_path / 'cpuinfo').write_text(f'model name : some processor\n{flags}\n')
    monkeypatch.setattr(choice, 'Path', lambda path: tmp_path / 'cpuinfo')
    assert choice.has_bfloat16(CPU) == has_bfloat16
    (row,) = measure_goals([Goal(1, 'any', 1.0, 2.0, lambda rounds: Measurement(1.5))], rounds=1)
    assert (row['verdict'], row['processor']) == ('floor', words)


def test_the_header_names_every_device_and_two_threads(table, monkeypatch):
    table += [
        Goal(1, 'here', 1.0, 2.0, lambda rounds: Measurement(torch.get_num_threads())),
        Goal(17, 'on a GPU', 1.0, 2.0, lambda rounds: Measurement(1.5), needs='cuda'),
        Goal(18, 'absent', 1.0, 2.0, lambda rounds: Measurement(1.5), needs='a_package_that_is_absent'),
    ]
    monkeypatch.setattr('tools.benchmark.__main__.count_cores', lambda: 16)
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    monkeypatch.setattr('torch.cuda.get_device_name', lambda place: 'a graphics processor')
    monkeypatch.setattr('torch.backends.cudnn.version', lambda: 90000)
    threads = torch.get_num_threads()
    result = main(['goals', '--allow-load'])
    assert [row.get('measured') for row in result['rows']] == [2, 1.5, None]
    assert result['rows'][1]['processor'] == 'a graphics processor'
    first, second = result['machine'].splitlines()
    assert ' 2 threads; float32, or bfloat16 where the row says so; torch' in first
    assert second.startswith('a graphics processor;')
    assert main(['goals', '--rows', '17', '--allow-load'])['machine'] == second
    assert main(['goals', '--rows', '1', '--threads', '3', '--allow-load'])['rows'][0]['measured'] == 3
    assert torch.get_num_threads() == threads


def test_a_figure_below_its_floor_or_that_fails_makes_the_command_fail(table, tmp_path, capsys):
    def fail(rounds: int) -> Measurement:
        # Each is there as it comes.
        assert '1.10' in capsys.readouterr().err
        raise RuntimeError('no kernel\nfor this')

    table += [
        Goal(1, 'good', 1.0, 2.0, lambda rounds: Measurement(1.1)),
        Goal(2, 'broken', 1.0, 2.0, fail),
        Goal(3, 'bad', 1.0, 2.0, lambda rounds: Measurement(0.5)),
    ]
    assert main(['goals', '--rows', '1', '--allow-load'])['rows'][0]['verdict'] == 'floor'
    for chosen in ([], ['--rows', '1', '3']):
        with pytest.raises(SystemExit) as exit_info:
            main(['goals', *chosen, '--allow-load', '--json', str(tmp_path / f'{len(chosen)}.json')])
        assert exit_info.value.code == 1
    rows = json.loads((tmp_path / '0.json').read_text())['rows']
    found = [(row['row'], row.get('measured'), row['verdict'], row.get('error')) for row in rows]
    broken = (2, None, 'failed', 'RuntimeError: no kernel')
    assert found == [(1, 1.1, 'floor', None), broken, (3, 0.5, 'below', None)]
    assert 'RuntimeError: no kernel' in capsys.readouterr().out
    with pytest.raises(ValueError, match=r'rows of the goals, 1 to 3, got \[0, 99\]'):
        main(['goals', '--rows', '1', '99', '0', '--allow-load'])


def test_the_table_has_every_row_and_a_goal_is_at_least_as_hard_as_its_floor():
    found = make_goals()
    assert {goal.row for goal in found} == set(range(1, 32))
    for goal in found:
        if goal.floor is not None:
            assert goal.goal is not None
            assert (goal.goal <= goal.floor) if goal.at_most else (goal.goal >= goal.floor)
    assert {goal.row for goal in found if goal.floor is None} == {24, 28, 30}
    assert {goal.needs for goal in found} == {'cpu', 'bfloat16', 'tiles', 'cuda', 'onnxruntime', 'openvino', 'ffcv'}
    on_cpu = [goal for goal in found if goal.needs != 'cuda']
    assert all(('bfloat16' in goal.what) == (goal.needs in ('bfloat16', 'tiles')) for goal in on_cpu)
    # What takes long, or packages, is measured only where it is asked for.
    assert {goal.row for goal in goals.choose(None)} == set(range(1, 22))
    assert {goal.row for goal in goals.choose([22, 26])} == {22, 26}


def test_decoding_is_measured_once_for_all_its_figures(monkeypatch):
    calls: list[int] = []

    def measure(rounds: int):
        calls.append(rounds)
        return [
            {
                **{'name': name, 'batch_size': batch, 'ratio': batch + place, 'ratio_quartiles': (batch, batch + 9)},
                **{'flatness': 1 + place / 10, 'flatness_quartiles': (1.0, 2.0)},
            }
            for batch in (1, 16)
            for place, name in enumerate(decode.MODELS)
        ]

    monkeypatch.setattr(measurements, 'decode', cache(measure))
    rows = measure_goals([goal for goal in make_goals() if goal.row in (10, 11)], rounds=15)
    assert calls == [5]
    assert [row['verdict'] for row in rows[:3]] == ['floor', 'goal', 'goal']
    assert [row['measured'] for row in rows] == [2, 17, 18, 1.1, 1.2, 1.1, 1.2]
    assert [row['ratio_quartiles'] for row in rows[:4]] == [(1, 10), (16, 25), (16, 25), (1.0, 2.0)]


@pytest.fixture
def timed(monkeypatch):
    """Return what each call that is timed gives; the second of two is twice as fast as the first."""
    taken = []

    def record(calls, device, rounds, **kwargs):
        taken.append([call() for call in calls])
        return [[4.0, 2.0], [2.0, 1.0]][: len(calls)]

    monkeypatch.setattr(compare, 'time_rounds', record)
    return taken


def test_a_speed_is_the_time_of_the_first_candidate_over_that_of_the_last(timed):
    names = ('attention', 'between', 'ours')
    made = [Candidate(name, lambda training, name=name: Prepared(lambda: name)) for name in names]
    assert measurements.speed(lambda: made, rounds=3) == Measurement(2.0, (2.0, 2.0))
    assert timed == [['attention', 'ours']]

    def fail(training):
        raise RuntimeError('no kernel')

    with pytest.raises(RuntimeError, match='ours: RuntimeError: no kernel'):
        measurements.speed(lambda: [made[0], Candidate('ours', fail)], rounds=3)


@pytest.mark.parametrize('operation', [FULL, LOCAL, CONV], ids=lambda operation: operation.name)
@both_directions
def test_operations_are_compared_with_attention_of_the_same_result(operation: Operation, training: bool):
    fused, paper, own = (each.prepare(training).call(training)() for each in ops.candidates_of([operation]))
    if training:
        assert [x.shape for x in fused] == [torch.Size(operation.shape)] * 3
        # k of AFT-conv has its own width.
        assert [own[0].shape, own[2].shape] == [torch.Size(operation.shape)] * 2
    else:
        assert fused.shape == own.shape == operation.shape
        fused, paper = [fused], [paper]
    for one, other in zip(fused, paper, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_cost_of_a_call_is_that_of_the_operation_over_that_of_attention(timed):
    assert measurements.speed(lambda: measurements.call_candidates(CONV), rounds=3).measured == 2.0
    ((own, heads),) = timed
    attention, _, expected = (each.prepare(False).forward() for each in ops.candidates_of([CONV]))
    torch.testing.assert_close(own, expected)
    torch.testing.assert_close(heads.transpose(1, 2).flatten(2), attention)


@pytest.mark.parametrize(('row', 'shapes'), [(8, [(1, 6144, 256), (1, 3072, 256)]), (16, [(8, 196, 384)] * 2)])
def test_a_row_compares_what_it_says(timed, row, shapes):
    goal = next(goal for goal in make_goals() if goal.row == row)
    assert goal.measure(rounds=1).measured == 2.0
    assert [tuple(result.shape) for result in timed[0]] == shapes


def test_a_model_is_compared_with_its_peer_in_its_runtime_at_its_size(monkeypatch, timed):
    def candidate(name, shape, *where, threads=2):
        return Candidate(name, lambda training: Prepared(lambda: (name, shape, *map(str, where), threads)))

    monkeypatch.setattr(goals, 'classifier', candidate)
    monkeypatch.setattr(goals, 'runtime_candidate', candidate)
    pyramid, peer, found = 'aft_pyramid_nano', 'cpubone_b0_bfrobust', []
    for goal in (goal for goal in make_goals() if pyramid in goal.what and peer in goal.what):
        assert (goal.row, goal.verdict(goal.measure(rounds=1).measured)) == (24, 'reported')
    for size, (where, threads) in product((224, 512, 1024), (('cpu', 2), ('onnxruntime', 1))):
        found.append([(name, (1, 3, size, size), where, threads) for name in (peer, pyramid)])
    assert sorted(timed) == sorted(found)


def test_memory_is_measured():
    assert measurements.memory(partial(ops.candidates_of, [FULL]), rounds=1).measured > 0
    # q, k, v and y of both, and the denominators of AFT-full.
    assert 1.0 < measurements.saved_bytes(FULL, rounds=1).measured < 2.0
    # The scratch of one block is constant, so short sequences grow by less than their length.
    assert 0.5 < measurements.memory_exponent(local, (512, 2048), rounds=1).measured <= 1.05
    both = [classifier(name, (1, 3, 32, 32), CPU) for name in ('deit_tiny_patch16_224', 'aft_conv_tiny')]
    assert 0.5 < measurements.memory(lambda: both, 'training', rounds=1).measured < 3


def test_the_free_memory_of_a_gpu_counts_what_torch_keeps(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, 'empty_cache', lambda: asked.append('empty'))
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device: asked.append(device) or (7, 9))
    device = torch.device('cuda', 0)
    assert machine.free_memory(device) == 7
    assert asked == ['empty', device]
    assert compare.max_call_bytes(device) == 3.5


def small_photographs(monkeypatch) -> None:
    monkeypatch.setattr(measurements, 'PHOTOGRAPHS', 64)
    monkeypatch.setattr(measurements, 'PHOTOGRAPH_SIZE', (48, 36))


def test_our_loader_is_compared_with_that_of_timm(monkeypatch):
    small_photographs(monkeypatch)
    measurement = measurements.loader_cost('folder', rounds=1)
    assert 0.2 < measurement.measured < 5


@pytest.mark.ffcv
def test_our_loader_is_compared_with_that_of_ffcv(monkeypatch):
    require_ffcv()
    small_photographs(monkeypatch)
    threads = torch.get_num_threads()
    measurement = measurements.loader_cost('ffcv', rounds=3)
    assert 0.1 < measurement.measured < 10
    assert torch.get_num_threads() == threads


def test_our_update_is_compared_with_that_of_timms_task(monkeypatch):
    def run(command: list[str], **kwargs: object) -> SimpleNamespace:
        assert command[:3] == [sys.executable, '-m', 'train.throughput']
        # In this process, where everything is imported.
        with redirect_stdout(io.StringIO()) as printed:
            throughput.main(command[3:])
        return SimpleNamespace(stdout=printed.getvalue(), stderr='')

    # Not subprocess.run itself, by which the kernels are built.
    monkeypatch.setattr(measurements, 'subprocess', SimpleNamespace(run=run))
    monkeypatch.setattr(measurements, 'STEP', '--config configs/smoke/one_epoch.yaml data.batch_size=10')
    # Of nine rounds another process may slow four.
    measurement = measurements.step_cost(rounds=9)
    low, high = measurement.ratio_quartiles
    assert low <= measurement.measured <= high
    assert 0.1 < measurement.measured < 10
    failed = SimpleNamespace(stdout='', stderr='no such')
    monkeypatch.setattr(measurements, 'subprocess', SimpleNamespace(run=lambda *args, **kwargs: failed))
    with pytest.raises(RuntimeError, match=r'ratio of updates from train\.throughput, got no such'):
        measurements.step_cost(rounds=2)


def test_fine_tuning_is_compared_with_itself_in_float32(monkeypatch):
    commands = []

    def run(command: list[str], **kwargs: object) -> SimpleNamespace:
        commands.append(command)
        speed = 40 if 'run.amp=none' in command else 60
        return SimpleNamespace(stdout=f'epoch 1/2  7 images/s\nepoch 2/2  {speed} images/s', stderr='')

    small_photographs(monkeypatch)
    monkeypatch.setattr(measurements, 'subprocess', SimpleNamespace(run=run))
    assert measurements.finetuning_speed(rounds=2) == Measurement(1.5, (1.5, 1.5))
    own, plain = (load_config(words[4], words[5:]) for words in commands[:2])
    assert (own.run.amp, plain.run.amp, plain.optim.args) == ('auto', 'none', {'fused': False})
    unchanged = dict(amp=own.run.amp, dir=own.run.dir)
    assert dataclasses.replace(plain.run, **unchanged) == own.run
    assert dataclasses.replace(plain, run=own.run, optim=own.optim) == own
    failed = SimpleNamespace(stdout='', stderr='no such')
    monkeypatch.setattr(measurements, 'subprocess', SimpleNamespace(run=lambda *args, **kwargs: failed))
    with pytest.raises(RuntimeError, match=r'images/s from train\.imagenet, got no such'):
        measurements.finetuning_speed(rounds=1)


def test_the_kernels_of_a_call_are_summed_and_nothing_else(monkeypatch):
    def event(microseconds, device_type=DeviceType.CUDA, is_user_annotation=False):
        span = SimpleNamespace(elapsed_us=lambda: microseconds)
        return SimpleNamespace(time_range=span, device_type=device_type, is_user_annotation=is_user_annotation)

    log, seen = [], [event(3e6), event(2e6), event(7e6, DeviceType.CPU), event(9e6, is_user_annotation=True)]
    monkeypatch.setattr(measurements, 'synchronize', lambda device: log.append('wait'))
    monkeypatch.setattr(measurements, 'profile', lambda **kwargs: nullcontext(SimpleNamespace(events=lambda: seen)))
    monkeypatch.setattr(measurements, 'CALLS', 2)
    assert measurements.time_kernels(lambda: log.append('a'), torch.device('cuda'), 2) == [2.5, 2.5]
    # The device has done its work before the profiler stops.
    assert ' '.join(log) == 'a wait a a wait wait a a wait'
    seen.clear()
    with pytest.raises(RuntimeError, match='expected kernels on cuda, got none from the profiler'):
        measurements.time_kernels(lambda: None, torch.device('cuda'), 1)


def test_the_roofline_counts_what_must_be_done(monkeypatch):
    # Products of (5, 5) weights with e^k v and e^k, and q, k, v and the result: a second, and half a second.
    monkeypatch.setattr(measurements, 'device_rates', lambda *args: (2 * 5 * 5 * 2 * 64, 2 * 4 * 5 * 64 * 4))
    # The kernels take 2 and 4 seconds.
    monkeypatch.setattr(measurements, 'time_kernels', lambda *args: [2.0, 4.0])
    measurement = measurements.roofline_share(FULL, torch.float32, CPU, rounds=2)
    assert (measurement.measured, measurement.milliseconds_pair) == (0.375, (1000.0, 3000.0))


@pytest.mark.gpu
@pytest.mark.parametrize('operation', [FULL, LOCAL, CONV], ids=lambda operation: operation.name)
def test_figures_are_measured_on_a_cuda_device(operation: Operation):
    make = partial(ops.candidates_of, [operation], torch.bfloat16, measurements.CUDA)
    share = measurements.roofline_share(operation, torch.bfloat16, measurements.CUDA, rounds=2)
    speeds = [
        measurements.speed(make, direction, device=measurements.CUDA, rounds=2) for direction in compare.DIRECTIONS
    ]
    for measurement in (share, *speeds):
        assert measurement.measured > 0
        assert min(measurement.milliseconds_pair) > 0
