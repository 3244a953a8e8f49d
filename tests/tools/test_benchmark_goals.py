"""The table of goals: its verdicts, its exit code, and what each figure compares."""

import contextlib
import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType

from aft_vision.timing import Timing
from tools import machine
from tools.benchmark import compare, decode, figures, goals, gpu, ops
from tools.benchmark.__main__ import main
from tools.benchmark.figures import Figure
from tools.benchmark.goals import Goal, make_goals, measure_goals
from tools.benchmark.ops import Operation

CPU = torch.device('cpu')
FULL = Operation('aft_full', (1, 5, 64), 1, (5, 5))
LOCAL = Operation('aft_local_causal', (1, 40, 64), 1, (40, 4))
CONV = Operation('aft_conv', (1, 36, 64), 1, (8, 3, 3), (6, 6), 8)
both_directions = pytest.mark.parametrize('training', [False, True], ids=['forward', 'training'])


def local(tokens: int) -> Operation:
    return LOCAL._replace(shape=(1, tokens, 64), bias=(tokens, 4))


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
    assert Goal(1, 'speed', floor, goal, Figure, at_most).verdict(Figure(value)) == verdict


def test_a_figure_without_what_it_needs_is_open_and_fails_nothing(table, monkeypatch, capsys):
    monkeypatch.setattr(goals, 'has_bfloat16', lambda: False)
    monkeypatch.setattr('torch.cuda.is_available', lambda: False)
    for needs in ('bfloat16', 'cuda', 'a_package_that_is_absent'):
        table.append(Goal(17, f'on {needs}', 1.0, 2.0, lambda rounds: Figure(0.1), needs=needs))
    assert {row['verdict'] for row in main(['goals', '--allow-load'])['rows']} == {'open'}
    assert sum(line.endswith('open') for line in capsys.readouterr().out.splitlines()) == 3
    monkeypatch.setattr(goals, 'has_bfloat16', lambda: True)
    with pytest.raises(SystemExit):
        main(['goals', '--allow-load'])


@pytest.mark.parametrize(
    ('flags', 'found'),
    [('flags : sse avx512f', False), ('flags\t: avx512_bf16', True), ('flags : amx_bf16', True), ('', False)],
)
def test_the_instructions_of_bfloat16_are_those_of_the_processor(monkeypatch, tmp_path, flags, found):
    (tmp_path / 'cpuinfo').write_text(f'processor : 0\n{flags}\n')
    monkeypatch.setattr(machine, 'Path', lambda path: tmp_path / 'cpuinfo')
    assert machine.has_bfloat16() == found


def test_the_header_names_every_device_and_two_threads(table, monkeypatch):
    table += [
        Goal(1, 'here', 1.0, 2.0, lambda rounds: Figure(torch.get_num_threads())),
        Goal(17, 'on a GPU', 1.0, 2.0, lambda rounds: Figure(1.5), needs='cuda'),
        Goal(18, 'absent', 1.0, 2.0, lambda rounds: Figure(1.5), needs='a_package_that_is_absent'),
    ]
    monkeypatch.setattr('tools.benchmark.__main__.count_cores', lambda: 16)
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    monkeypatch.setattr('torch.cuda.get_device_name', lambda place: 'a graphics processor')
    monkeypatch.setattr('torch.backends.cudnn.version', lambda: 90000)
    threads = torch.get_num_threads()
    result = main(['goals', '--allow-load'])
    assert result['rows'][0]['measured'] == 2
    first, second = result['machine'].splitlines()
    assert ' 2 threads; float32, or bfloat16 where the row says so; torch' in first
    assert second.startswith('a graphics processor;')
    # Of the chosen rows only, and those that are measured.
    for rows, words in (('1', [first]), ('17', [second]), ('18', [first])):
        assert main(['goals', '--rows', rows, '--allow-load'])['machine'].splitlines() == words
    monkeypatch.setattr('tools.benchmark.__main__.count_cores', lambda: 1)
    assert main(['goals', '--rows', '1', '--allow-load'])['rows'][0]['measured'] == 1
    assert main(['goals', '--rows', '1', '--threads', '3', '--allow-load'])['rows'][0]['measured'] == 3
    assert torch.get_num_threads() == threads


def test_a_figure_below_its_floor_or_that_fails_makes_the_command_fail(table, tmp_path, capsys):
    def fail(rounds: int) -> Figure:
        # Each is there as it comes.
        assert '1.10' in capsys.readouterr().err
        raise RuntimeError('no kernel\nfor this')

    table += [
        Goal(1, 'good', 1.0, 2.0, lambda rounds: Figure(1.1, paper=3.25)),
        Goal(2, 'broken', 1.0, 2.0, fail),
        Goal(3, 'bad', 1.0, 2.0, lambda rounds: Figure(0.5)),
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
    shown = capsys.readouterr().out
    assert '3.25' in shown
    assert 'failed: RuntimeError: no kernel' in shown
    with pytest.raises(ValueError, match=r'rows of the goals, 1 to 3, got \[0, 99\]'):
        main(['goals', '--rows', '1', '99', '0', '--allow-load'])


def test_the_table_has_every_row_and_a_goal_is_at_least_as_hard_as_its_floor():
    found = make_goals()
    assert {goal.row for goal in found} == set(range(1, 24))
    for goal in found:
        assert (goal.goal <= goal.floor) if goal.at_most else (goal.goal >= goal.floor)
    assert {goal.needs for goal in found} == {'cpu', 'bfloat16', 'cuda', 'onnxruntime', 'openvino'}
    assert all(('bfloat16' in goal.what) == (goal.needs == 'bfloat16') for goal in found if goal.needs != 'cuda')
    # Other runtimes are measured only where they are asked for.
    assert {goal.row for goal in goals.choose(None)} == set(range(1, 22))
    assert {goal.row for goal in goals.choose([22, 23])} == {22, 23}


def test_a_slow_figure_takes_fewer_rounds():
    taken: list[int] = []
    goal = Goal(1, 'any', 1.0, 2.0, lambda rounds: taken.append(rounds) or Figure(1.0))
    measure_goals([goal, goal._replace(most_rounds=5)], rounds=15)
    measure_goals([goal._replace(most_rounds=5)], rounds=2)
    assert taken == [15, 5, 2]


@pytest.mark.parametrize('fails', [False, True])
def test_decoding_is_measured_once_for_all_its_figures(monkeypatch, fails: bool):
    calls: list[int] = []

    def measure(device, rounds: int, **kwargs):
        calls.append(rounds)
        if fails:
            raise RuntimeError('no memory')
        return [
            {
                **{'model': name, 'batch_size': batch, 'ratio': batch + place, 'ratio_quartiles': (batch, batch + 9)},
                **{'flatness': 1 + place / 10, 'flatness_quartiles': (1.0, 2.0)},
            }
            for batch in (1, 16)
            for place, name in enumerate(decode.MODELS)
        ]

    monkeypatch.setattr(figures, 'measure_decode', measure)
    rows = measure_goals([goal for goal in make_goals() if goal.row in (10, 11)], rounds=15)
    assert calls == [5]
    if fails:
        assert {row['verdict'] for row in rows} == {'failed'}
    else:
        assert [row['verdict'] for row in rows[:3]] == ['floor', 'goal', 'goal']
        assert [row['measured'] for row in rows] == [2, 17, 18, 1.1, 1.2, 1.1, 1.2]
        assert [row['ratio_quartiles'] for row in rows[:4]] == [(1, 10), (16, 25), (16, 25), (1.0, 2.0)]


@pytest.fixture
def timed(monkeypatch):
    """Return what each call that is timed gives; the second of two is twice as fast as the first."""
    taken = []

    def record(calls, device, rounds, **kwargs):
        taken.append([call() for call in calls])
        return [Timing(1.0, 1.0, (1.0, 1.0)), Timing(0.5, 2.0, (1.5, 2.5))]

    monkeypatch.setattr(figures, 'time_interleaved', record)
    return taken


@both_directions
def test_speed_is_that_of_attention_over_that_of_the_operation(timed, training: bool):
    assert figures.speed(FULL, training=training)(3) == Figure(2.0, (1.5, 2.5), 2.0)
    attention, own, paper = (call() for call in FULL.calls(training=training))
    for found, expected in zip(timed, [(attention, own), (paper, own)], strict=True):
        torch.testing.assert_close(found, list(expected))


def test_the_cost_of_a_call_is_that_of_the_operation_over_that_of_attention(timed):
    assert figures.call_cost(CONV)(3).value == 2.0
    ((own, heads),) = timed
    attention, expected, _ = (call() for call in CONV.calls())
    torch.testing.assert_close(own, expected)
    torch.testing.assert_close(heads.transpose(1, 2).flatten(2), attention)


@both_directions
def test_a_layer_is_compared_with_attention(monkeypatch, timed, training: bool):
    # Attention that gives back the tokens, so that its gradient of them is one.
    monkeypatch.setattr(figures, 'Attention', lambda *args, **kwargs: nn.Identity())
    assert figures.layer_speed(64, 64, 1, training)(1).value == 2.0
    assert len(timed) == 2
    for baseline, candidate in timed:
        if training:
            assert (baseline[0] == 1).all()
            assert (64, 11, 11) in [tuple(gradient.shape) for gradient in candidate]
        else:
            assert not torch.equal(baseline, candidate)


@both_directions
def test_a_model_is_compared_with_the_one_of_timm_at_its_size(monkeypatch, timed, training: bool):
    made = []

    def create(name, size, device, materialised, training):
        made.append((name, size, materialised, training))
        # Told apart by their classes.
        return nn.Sequential(nn.AvgPool2d(112), nn.Flatten(), nn.Linear(48, {'theirs': 1, 'ours': 2}[name]))

    monkeypatch.setattr(figures, 'create_classifier', create)
    assert figures.model_speed('ours', 'theirs', 2, training=training, size=448)(1).value == 2.0
    kinds = [('theirs', (448, 448), False), ('ours', (448, 448), False), ('theirs', (448, 448), True)]
    assert made == [(*kind, training) for kind in kinds]
    found = [[(x[0] if training else x.T).shape[0] for x in pair] for pair in timed]
    assert found == [[1, 2], [1, 2]]


def test_an_exported_model_has_one_thread_and_one_image(monkeypatch, timed):
    asked, threads = [], torch.get_num_threads()

    def candidate(name, shape, runtime, folder):
        asked.append((name, shape, runtime, torch.get_num_threads()))
        return compare.Candidate(name, lambda training: compare.Prepared(lambda: torch.ones(len(name))))

    monkeypatch.setattr(figures, 'runtime_candidate', candidate)
    assert figures.runtime_speed('ours', 'deit', 512, 'openvino')(1).value == 2.0
    assert asked == [(name, (1, 3, 512, 512), 'openvino', 1) for name in ('deit', 'ours')]
    assert torch.get_num_threads() == threads


def test_growth_is_the_time_of_twice_the_tokens_over_that_of_the_tokens(timed):
    assert figures.growth(local, 8)(1).value == 2.0
    assert [tuple(result.shape) for result in timed[0]] == [(1, 16, 64), (1, 8, 64)]


def test_the_one_offset_operation_is_compared_with_the_convolution(monkeypatch):
    def measure(candidates, device, rounds, directions):
        assert [each.name for each in candidates] == ['convolution, h=384', 'one-hot, h=384']
        return [{'ratio': 1.0}, {'ratio': {'forward': 3.0, 'training': 5.0}[directions[0]], 'ratio_quartiles': (1, 9)}]

    monkeypatch.setattr(figures, 'compare', measure)
    found = [figures.onehot_speed(direction)(1) for direction in compare.DIRECTIONS]
    assert found == [Figure(3.0, (1, 9)), Figure(5.0, (1, 9))]


@both_directions
def test_materialised_attention_that_does_not_fit_is_not_even_tried(monkeypatch, timed, training: bool):
    # Three matrices of (5, 5) in float32, and in training twice as much.
    needed = 300 * (1 + training)
    monkeypatch.setattr(figures, 'free_memory', lambda device: needed)
    assert figures.speed(FULL, training=training)(1).paper == 2.0

    def fail(forward):
        raise AssertionError('materialised attention was made')

    monkeypatch.setattr(ops, 'materialised', fail)
    monkeypatch.setattr(figures, 'free_memory', lambda device: needed - 1)
    assert figures.speed(FULL, training=training)(1).paper is None


@pytest.mark.parametrize('operation', [FULL, LOCAL], ids=lambda operation: operation.name)
@both_directions
def test_operations_are_compared_with_attention_of_the_same_result(operation: Operation, training: bool):
    attention, own, paper = (call() for call in operation.calls(training=training))
    if training:
        assert [x.shape for x in attention] == [x.shape for x in own[:3]] == [torch.Size(operation.shape)] * 3
    else:
        assert attention.shape == own.shape == operation.shape
    for fused, written_out in zip(attention, paper, strict=True):
        torch.testing.assert_close(fused, written_out, rtol=1e-4, atol=1e-5)


def test_memory_is_measured():
    assert figures.memory(FULL)(1).value > 0
    # q, k, v and y of both, and the denominators of AFT-full.
    assert 1.0 < figures.kept(FULL)(1).value < 2.0
    # Attention that forms its weights keeps them, and holds them in the forward.
    longer = FULL._replace(shape=(2, 128, 64), heads=4, bias=(128, 128))
    for figure in (figures.memory(longer)(1), figures.kept(longer)(1)):
        assert figure.paper < figure.value
    # The scratch of one block is constant, so short sequences grow by less than their length.
    assert 0.5 < figures.memory_exponent(local, (512, 2048))(1).value <= 1.05
    assert 0.5 < figures.model_memory('aft_conv_tiny', 'deit_tiny_patch16_224', 1)(1).value < 3


def test_the_free_memory_of_a_gpu_counts_what_torch_keeps(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, 'empty_cache', lambda: asked.append('empty'))
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device: asked.append(device) or (7, 9))
    device = torch.device('cuda', 0)
    assert machine.free_memory(device) == 7
    assert asked == ['empty', device]
    assert compare.most_bytes(None, device) == 3.5
    assert compare.most_bytes(2.0, device) == 2**31


def test_a_figure_of_a_gpu_has_absolute_times_and_one_of_a_cpu_has_none(monkeypatch, timed):
    kernels = {'cpu': None, 'cuda': [[0.25, 0.75, 0.5], [0.125, 0.125, 1.0]]}
    monkeypatch.setattr(gpu, 'time_kernels', lambda calls, device, rounds: kernels[device.type])
    on_cpu, on_gpu = (figures._faster(list, tuple, 9, device=torch.device(name)) for name in kernels)
    assert (on_cpu.milliseconds_pair, on_cpu.kernel_milliseconds_pair) == (None, None)
    assert on_gpu.milliseconds_pair == (1000.0, 500.0)
    assert on_gpu.kernel_milliseconds_pair == (500.0, 125.0)


def test_the_kernels_of_a_call_are_summed_and_nothing_else(monkeypatch):
    def event(microseconds, device_type=DeviceType.CUDA, is_user_annotation=False):
        span = SimpleNamespace(elapsed_us=lambda: microseconds)
        return SimpleNamespace(time_range=span, device_type=device_type, is_user_annotation=is_user_annotation)

    log, seen = [], [event(3e6), event(2e6), event(7e6, DeviceType.CPU), event(9e6, is_user_annotation=True)]
    monkeypatch.setattr(gpu, 'synchronize', lambda device: log.append('wait'))
    monkeypatch.setattr(gpu, 'profile', lambda **kwargs: contextlib.nullcontext(SimpleNamespace(events=lambda: seen)))
    monkeypatch.setattr(gpu, 'CALLS', 2)
    calls = [lambda: log.append('a'), lambda: log.append('b')]
    assert gpu.time_kernels(calls, torch.device('cuda'), 2) == [[2.5, 2.5], [2.5, 2.5]]
    # The device has done its work before the profiler stops.
    assert ' '.join(log) == ' '.join(['wait a a wait wait b b wait'] * 2)
    seen.clear()
    assert gpu.time_kernels(calls, torch.device('cuda'), 1) is None
    assert gpu.time_kernels(calls, CPU, 1) is None


def test_the_roofline_counts_what_must_be_done():
    # As in the arithmetic that the goals of a GPU were taken from: billions of operations, megabytes.
    counts = [
        (round(gpu.count_flops(each) / 1e9, 1), round(gpu.count_bytes(each, torch.bfloat16) / 1e6))
        for _, _, each in gpu.OPERATIONS
    ]
    assert counts == [(15.3, 155), (7.9, 117), (15.1, 154), (257.7, 1611)]


@pytest.mark.parametrize('kernels', [[[0.5, 0.25]], None], ids=['kernels', 'call'])
def test_the_share_of_the_roofline_is_that_of_the_kernels(monkeypatch, kernels):
    flops, bandwidth = gpu.device_rates(torch.float32, CPU, 1, side=64, size=2**20)
    assert min(flops, bandwidth) > 1e6
    # A second of products, half a second of memory.
    rates = gpu.count_flops(FULL), 2 * gpu.count_bytes(FULL, torch.float32)
    monkeypatch.setattr(gpu, 'device_rates', lambda *args: rates)
    monkeypatch.setattr(figures, 'time_rounds', lambda *args, **kwargs: [[4.0, 8.0]])
    monkeypatch.setattr(gpu, 'time_kernels', lambda *args: kernels)
    figure = figures.roofline_share(FULL, torch.float32, CPU)(2)
    assert figure.milliseconds_pair == (1000.0, 6000.0)
    if kernels is None:
        assert (figure.value, figure.kernel_milliseconds_pair) == (pytest.approx(3 / 16), None)
    else:
        assert (figure.value, figure.ratio_quartiles) == (3.0, (2.5, 3.5))
        assert figure.kernel_milliseconds_pair == (1000.0, 375.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('operation', [FULL, LOCAL, CONV], ids=lambda operation: operation.name)
def test_figures_are_measured_on_a_cuda_device(operation: Operation):
    device = torch.device('cuda')
    share = figures.roofline_share(operation, torch.bfloat16, device, side=256, size=2**22)(2)
    speeds = [figures.speed(operation, torch.bfloat16, training, device)(2) for training in (False, True)]
    for figure in (share, *speeds):
        assert figure.value > 0
        assert min(*figure.milliseconds_pair, *figure.kernel_milliseconds_pair) > 0
    assert all(math.isfinite(figure.paper) for figure in speeds)
    # A call takes at least what its kernels take.
    assert share.milliseconds_pair[1] > 0.5 * share.kernel_milliseconds_pair[1]
