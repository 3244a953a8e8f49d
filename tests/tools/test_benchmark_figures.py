"""How the figures of the goals are made: what is compared to what, what is left out, and the times of a GPU."""

import contextlib
import math
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType

from aft_vision.timing import Timing
from tools import machine
from tools.benchmark import figures, goals, kernel_time, operations, roofline, sections
from tools.benchmark.operations import Operation

CPU = torch.device('cpu')
FULL = Operation('aft_full', (1, 5, 64), 1, (5, 5))
LOCAL = Operation('aft_local_causal', (1, 40, 64), 1, (40, 4))
CONV = Operation('aft_conv', (1, 36, 64), 1, (8, 3, 3), (6, 6), 8)


@pytest.fixture
def timed(monkeypatch):
    """What each call that is timed gives; the second of two is twice as fast as the first."""
    taken = []

    def record(calls, device, rounds, **kwargs):
        taken.append([call() for call in calls])
        return [Timing(1.0, 1.0, (1.0, 1.0)), Timing(0.5, 2.0, (1.5, 2.5))]

    monkeypatch.setattr(figures, 'time_interleaved', record)
    return taken


@pytest.mark.parametrize('training', [False, True], ids=['forward', 'training'])
def test_speed_is_that_of_attention_over_that_of_the_operation(timed, training: bool):
    figure = figures.speed(FULL, training=training)(3)
    assert figure == goals.Figure(2.0, (1.5, 2.5), 2.0)
    attention, own, paper = (call() for call in FULL.calls(training=training))
    for found, expected in zip(timed, [(attention, own), (paper, own)], strict=True):
        torch.testing.assert_close(found, list(expected))


@pytest.mark.parametrize('training', [False, True], ids=['forward', 'training'])
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
    if not training:
        torch.testing.assert_close(timed[0][0], timed[1][0])


@pytest.mark.parametrize('training', [False, True], ids=['forward', 'training'])
def test_a_model_is_compared_with_the_one_of_timm(monkeypatch, timed, training: bool):
    # Told apart by their classes.
    classes, written_out = {'theirs': 1, 'ours': 2}, []
    monkeypatch.setattr(
        figures.timm,
        'create_model',
        lambda name: nn.Sequential(nn.AvgPool2d(112), nn.Flatten(), nn.Linear(12, classes[name])),
    )
    monkeypatch.setattr(figures, 'materialise_attention', written_out.append)
    assert figures.model_speed('ours', 'theirs', 2, training=training)(1).value == 2.0
    found = [[(x[0] if training else x.T).shape[0] for x in pair] for pair in timed]
    assert found == [[1, 2], [1, 2]]
    assert [model[2].out_features for model in written_out] == [1]


def test_growth_is_the_time_of_twice_the_tokens_over_that_of_the_tokens(timed):
    longer = lambda tokens: LOCAL._replace(shape=(1, tokens, 64), bias=(tokens, 4))  # noqa: E731
    assert figures.growth(longer, 8)(1).value == 2.0
    assert [tuple(result.shape) for result in timed[0]] == [(1, 16, 64), (1, 8, 64)]


@pytest.mark.parametrize(('training', 'ratio'), [(False, 3.0), (True, 5.0)], ids=['forward', 'training'])
def test_the_one_offset_operation_is_compared_with_the_convolution(monkeypatch, training: bool, ratio: float):
    rows = [
        {'direction': direction, 'form': form, 'ratio': value, 'ratio_quartiles': (value, value)}
        for direction, form, value in (
            ('forward', 'convolution', 1.0),
            ('forward', 'one-hot', 3.0),
            ('training', 'convolution', 1.0),
            ('training', 'one-hot', 5.0),
        )
    ]
    monkeypatch.setattr(figures, 'measure_onehot', lambda *args: rows)
    assert figures.onehot_speed(training)(1) == goals.Figure(ratio, (ratio, ratio))


@pytest.mark.parametrize('training', [False, True], ids=['forward', 'training'])
def test_materialised_attention_that_does_not_fit_is_not_even_tried(monkeypatch, timed, training: bool):
    # Three matrices of (5, 5) in float32, and in training twice as much.
    needed = 300 * (1 + training)
    monkeypatch.setattr(figures, 'free_memory', lambda device: needed)
    assert figures.speed(FULL, training=training)(1).paper == 2.0

    def fail(forward):
        raise AssertionError('materialised attention was made')

    monkeypatch.setattr(operations, 'materialised', fail)
    monkeypatch.setattr(figures, 'free_memory', lambda device: needed - 1)
    assert figures.speed(FULL, training=training)(1).paper is None


def test_the_free_memory_of_a_gpu_counts_what_torch_keeps(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, 'empty_cache', lambda: asked.append('empty'))
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device: asked.append(device) or (7, 9))
    device = torch.device('cuda', 0)
    assert machine.free_memory(device) == 7
    assert asked == ['empty', device]
    assert sections.most_bytes(Namespace(most_gib=None), device) == 3.5
    assert sections.most_bytes(Namespace(most_gib=2.0), device) == 2**31
    assert machine.free_memory(CPU) == pytest.approx(machine.available_memory(), rel=0.2)


def test_a_figure_of_a_gpu_has_absolute_times_and_one_of_a_cpu_has_none(monkeypatch, timed):
    kernels = {'cpu': None, 'cuda': [[0.25, 0.75, 0.5], [0.125, 0.125, 1.0]]}
    monkeypatch.setattr(figures, 'time_kernels', lambda calls, device, rounds: kernels[device.type])
    on_cpu, on_gpu = (figures._faster(list, tuple, 9, device=torch.device(name)) for name in kernels)
    assert (on_cpu.milliseconds, on_cpu.kernel_milliseconds) == (None, None)
    assert on_gpu.milliseconds == (1000.0, 500.0)
    assert on_gpu.kernel_milliseconds == (500.0, 125.0)
    (row,) = goals.measure_goals([goals.Goal(17, 'on a GPU', 1.0, 4.0, lambda rounds: on_gpu)], 1)
    assert (row['milliseconds'], row['kernel_milliseconds']) == ((1000.0, 500.0), (500.0, 125.0))
    assert goals.format_goal(row).endswith('floor, ms 1000.0000 / 500.0000, kernels 500.0000 / 125.0000')


def test_the_kernels_of_a_call_are_summed_and_nothing_else(monkeypatch):
    def event(microseconds, device_type=DeviceType.CUDA, is_user_annotation=False):
        span = SimpleNamespace(elapsed_us=lambda: microseconds)
        return SimpleNamespace(time_range=span, device_type=device_type, is_user_annotation=is_user_annotation)

    log, seen = [], [event(3e6), event(2e6), event(7e6, DeviceType.CPU), event(9e6, is_user_annotation=True)]
    monkeypatch.setattr(kernel_time, 'synchronize', lambda device: log.append('wait'))
    monkeypatch.setattr(
        kernel_time, 'profile', lambda **kwargs: contextlib.nullcontext(SimpleNamespace(events=lambda: seen))
    )
    monkeypatch.setattr(kernel_time, 'CALLS', 2)
    calls = [lambda: log.append('a'), lambda: log.append('b')]
    assert kernel_time.time_kernels(calls, torch.device('cuda'), 2) == [[2.5, 2.5], [2.5, 2.5]]
    # The device has done its work before the profiler stops.
    assert ' '.join(log) == ' '.join(['wait a a wait wait b b wait'] * 2)
    seen.clear()
    assert kernel_time.time_kernels(calls, torch.device('cuda'), 1) is None
    assert kernel_time.time_kernels(calls, CPU, 1) is None


@pytest.mark.parametrize('kernels', [[[0.5, 0.25]], None], ids=['kernels', 'call'])
def test_the_share_of_the_roofline_is_that_of_the_kernels(monkeypatch, kernels):
    # A second of products, half a second of memory.
    rates = roofline.count_flops(FULL), 2 * roofline.count_bytes(FULL, torch.float32)
    monkeypatch.setattr(roofline, 'device_rates', lambda *args: rates)
    monkeypatch.setattr(roofline, 'time_rounds', lambda *args, **kwargs: [[4.0, 8.0]])
    monkeypatch.setattr(roofline, 'time_kernels', lambda *args: kernels)
    figure = roofline.roofline_share(FULL, torch.float32, CPU)(2)
    assert figure.milliseconds == (1000.0, 6000.0)
    if kernels is None:
        assert (figure.value, figure.kernel_milliseconds) == (pytest.approx(3 / 16), None)
    else:
        assert (figure.value, figure.quartiles) == (3.0, (2.5, 3.5))
        assert figure.kernel_milliseconds == (1000.0, 375.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('operation', [FULL, LOCAL, CONV], ids=lambda operation: operation.name)
def test_figures_are_measured_on_a_cuda_device(operation: Operation):
    device = torch.device('cuda')
    share = roofline.roofline_share(operation, torch.bfloat16, device, side=256, size=2**22)(2)
    speeds = [figures.speed(operation, torch.bfloat16, training, device)(2) for training in (False, True)]
    for figure in (share, *speeds):
        assert figure.value > 0
        assert figure.quartiles is not None
        assert min(figure.milliseconds) > 0
        assert min(figure.kernel_milliseconds) > 0
    assert all(math.isfinite(figure.paper) for figure in speeds)
    # A call takes at least what its kernels take.
    assert share.milliseconds[1] > 0.5 * share.kernel_milliseconds[1]
