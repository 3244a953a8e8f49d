"""Where the Triton kernels run, what runs where they do not, and their values at real sizes on a GPU."""

import logging
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_close, kernels_run, make_inputs, make_qkv, operands, plain, randn
from torch import Tensor

from aft_vision import ops
from aft_vision.ops import operator
from aft_vision.ops.common import launch, ordinary
from aft_vision.ops.common.capture import is_capturing
from aft_vision.ops.declaration import OPERATIONS


def single(T: int = 5, D: int = 3, device: str = 'cpu') -> list[Tensor]:
    return [x.float().to(device) for x in make_qkv(B=1, T=T, D=D)]


def test_ordinary_tensors_of_another_device_need_no_dispatcher_either(monkeypatch: pytest.MonkeyPatch):
    x = torch.ones(2, device='meta')
    assert not ordinary.is_ordinary((x,))
    monkeypatch.setattr(ordinary, 'KINDS', ('cpu', 'meta'))
    monkeypatch.setattr(ordinary, '_PLAIN', {})
    assert ordinary.is_ordinary((x,))
    assert not ordinary.is_ordinary((torch._neg_view(x),))
    assert ordinary.is_ordinary((torch.ones(2),))


def test_cpu_tensors_need_the_interpreter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    assert not launch.can_run(single())
    assert 'aft_vision::simple_forward' not in kernels_run(lambda: ops.aft_simple(*single()))
    pytest.importorskip('triton', minversion='3.6')
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    assert launch.can_run(single())


def test_without_triton_another_form_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    monkeypatch.setattr(launch, '_has_triton', lambda: False)
    assert not launch.can_run(single())
    assert torch.equal(ops.aft_simple(*single()), ops.aft_simple(*single(), backend='eager'))


def test_inputs_of_two_devices_or_of_another_type_are_not_covered(triton_device: str):
    q, k, v = single(device=triton_device)
    mask = torch.ones(1, 5, dtype=torch.bool, device=triton_device)
    assert launch.can_run([None, k, v.half(), mask, (2, 2), True])
    assert not launch.can_run([q, k.to('meta'), v])
    assert not launch.can_run([q.to('meta'), k.to('meta'), v.to('meta')])
    assert not launch.can_run([q, k.double(), v])
    assert not launch.can_run([q[:0], k[:0], v[:0]])


def forget_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, '_failures', {})
    monkeypatch.setattr(launch, '_logged', set())
    monkeypatch.setattr(launch, 'triton_version', lambda: '3.6.0')


def break_triton(device: torch.device) -> None:
    raise RuntimeError('Failed to find C compiler.\nPlease specify it via CC.')


def test_a_device_that_triton_cannot_compile_for_is_tried_once_and_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    tried = []
    forget_failures(monkeypatch)
    monkeypatch.setattr(launch, '_try_kernel', lambda device: (tried.append(device), break_triton(device)))
    device, other = torch.device('cuda', 0), torch.device('cuda', 1)
    with caplog.at_level(logging.WARNING):
        found = [launch.failure(device) for _ in range(3)]
    assert found == ['Failed to find C compiler.'] * 3
    assert tried == [device]
    assert [record.getMessage() for record in caplog.records if record.name == launch.__name__] == [
        'Triton cannot compile for cuda:0, so AFT runs there in the slower torch forms: Failed to find C compiler.'
    ]
    monkeypatch.setattr(launch, '_try_kernel', tried.append)
    assert launch.failure(other) is None
    assert tried == [device, other]


def test_where_triton_cannot_compile_auto_takes_eager_and_triton_raises(
    triton_device: str, monkeypatch: pytest.MonkeyPatch
):
    inputs = single(device=triton_device)
    monkeypatch.setitem(launch._failures, inputs[0].device, 'ptxas is missing')
    assert torch.equal(ops.aft_simple(*inputs), ops.aft_simple(*inputs, backend='eager'))
    with pytest.raises(RuntimeError, match=r"backend='triton' needs Triton to compile for .*: ptxas is missing"):
        ops.aft_simple(*inputs, backend='triton')
    # No kernel takes these, wherever it could be compiled.
    operator._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="aft_simple has no 'triton' form for these inputs"):
        ops.aft_simple(*(x.double() for x in inputs), backend='triton')


def test_a_triton_that_is_too_old_is_not_tried_and_the_message_says_which_one_is_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    forget_failures(monkeypatch)
    monkeypatch.setattr(launch, '_try_kernel', lambda device: None)
    devices = [torch.device('cuda', index) for index in range(3)]
    found = []
    for device, number in zip(devices, ('3.6.0', '3.5.1', '3.10.0+git1'), strict=True):
        monkeypatch.setattr(launch, 'triton_version', lambda number=number: number)
        found.append(launch.failure(device))
    assert found == [None, 'expected Triton 3.6 or newer, got 3.5.1; a newer torch installs it', None]
    assert caplog.messages == [
        f'Triton cannot compile for cuda:1, so AFT runs there in the slower torch forms: {found[1]}'
    ]


def capture(monkeypatch: pytest.MonkeyPatch, capturing: bool) -> None:
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: capturing)
    use_device(monkeypatch, 0)


def use_device(monkeypatch: pytest.MonkeyPatch, current: int) -> None:
    """Devices that are not here: the current one is `current` outside of guards."""
    devices = [current]

    @contextmanager
    def guard(device: torch.device | None):
        devices.append(devices[-1] if device is None else device.index)
        yield
        devices.pop()

    monkeypatch.setattr(torch.cuda, 'device', guard)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: devices[-1])


def test_a_capture_is_looked_for_on_the_device_of_the_inputs(monkeypatch: pytest.MonkeyPatch):
    capture(monkeypatch, True)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: torch.cuda.current_device() == 1)
    assert is_capturing(torch.device('cuda', 1))
    assert not is_capturing(torch.device('cuda', 0))
    assert not is_capturing()


def test_nothing_runs_for_trial_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch):
    compiled = []
    forget_failures(monkeypatch)
    monkeypatch.setattr(launch, '_try_kernel', break_triton)
    monkeypatch.setattr(launch, '_compile_kernel', compiled.append)
    capture(monkeypatch, True)
    assert launch.failure(torch.device('cuda', 0)) is None
    assert compiled == [torch.device('cuda', 0)]
    capture(monkeypatch, False)
    assert launch.failure(torch.device('cuda', 0)) == 'Failed to find C compiler.'
    assert len(compiled) == 1


def test_what_fails_in_a_capture_is_tried_again_after_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    tried, device = [], torch.device('cuda', 0)
    forget_failures(monkeypatch)
    monkeypatch.setattr(launch, '_compile_kernel', break_triton)
    monkeypatch.setattr(launch, '_try_kernel', tried.append)
    with caplog.at_level(logging.WARNING):
        capture(monkeypatch, True)
        assert launch.failure(device) == 'Failed to find C compiler.'
        capture(monkeypatch, False)
        assert [launch.failure(device) for _ in range(2)] == [None, None]
        # What is known is known in a capture too.
        capture(monkeypatch, True)
        assert launch.failure(device) is None
    assert tried == [device]
    assert len([record for record in caplog.records if record.name == launch.__name__]) == 1


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A tuner of two sizes, on devices that are not here, and what it timed and launched; the second is faster."""
    triton = pytest.importorskip('triton', minversion='3.6')
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    timed, launched = [], []

    def kernel(X, T, D, BLOCK):
        pass

    def time(call, quantiles):
        timed.append(1)
        return [-float(len(timed))] * 3

    found = launch.tuned(['D', 'T'], {}, ({'BLOCK': 16}, 4), ({'BLOCK': 32}, 4))(triton.JITFunction(kernel))
    assert found.cache_results or triton.knobs.runtime.interpret
    found.cache_results, found._do_bench = False, time
    found.fn = SimpleNamespace(run=lambda *args, BLOCK, **others: launched.append(BLOCK))
    capture(monkeypatch, False)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: ('H200', 'L4', 'H200')[device])
    return SimpleNamespace(run=found[(1,)], timed=timed, launched=launched, tuner=found)


@pytest.mark.parametrize('capturing', [True, False])
def test_configurations_are_timed_except_while_a_graph_is_captured(
    capturing: bool, tuner: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    capture(monkeypatch, capturing)
    tuner.run(None, 7, 3)
    tuner.run(None, 7, 3)
    assert (len(tuner.timed), tuner.launched) == ((0, [16, 16]) if capturing else (2, [32, 32]))


def test_configurations_are_timed_once_for_all_lengths_up_to_a_power_of_two(tuner: SimpleNamespace):
    found = []
    for T, D in [(65, 3), (100, 3), (128, 3), (129, 3), (100, 4)]:
        tuner.run(None, T, D)
        found.append(len(tuner.timed))
    assert found == [2, 2, 2, 4, 6]
    assert tuner.launched == [32] * 5


def test_a_choice_of_one_kind_of_device_is_not_used_on_another(tuner: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    found = []
    for device in (0, 1, 2, 0):
        use_device(monkeypatch, device)
        tuner.run(None, 7, 3)
        found.append(len(tuner.timed))
    assert found == [2, 4, 4, 4]


def test_the_fastest_of_several_ways_is_measured_once_for_a_kind_of_device(
    tuner: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    from aft_vision.ops.common import tuner as tuning

    timed, found = [], []
    ways = [lambda name=name: found.append(name) for name in ('first', 'second')]
    monkeypatch.setattr(tuning, '_ways', {})
    monkeypatch.setattr(tuning.triton.testing, 'do_bench', lambda way, **_: (timed.append(way), -len(timed))[1])
    for device in (0, 1, 2, 0):
        use_device(monkeypatch, device)
        tuning.run_fastest(('sizes', 7), *ways)
    assert (found, len(timed)) == (['second'] * 4, 4)
    # Nothing to choose from.
    tuning.run_fastest(('sizes', 8), ways[0])
    capture(monkeypatch, True)
    tuning.run_fastest(('sizes', 9), *ways)
    tuning.run_fastest(('sizes', 7), *ways)
    assert (found[4:], len(timed)) == (['first', 'first', 'second'], 4)
    capture(monkeypatch, False)

    def run_out(way: object, **_: object) -> None:
        raise torch.OutOfMemoryError('CUDA out of memory')

    monkeypatch.setattr(tuning.triton.testing, 'do_bench', run_out)
    tuning.run_fastest(('sizes', 9), *ways)
    assert found[7:] == ['first']


def test_what_is_kept_on_disk_is_of_one_kind_of_device_and_one_class_of_lengths(
    tuner: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    from triton.runtime import Autotuner

    found = []

    def check(self, tuning_key, configs, bench_fn):
        bench_fn()
        found.append(tuning_key)
        return False

    monkeypatch.setattr(Autotuner, 'check_disk_cache', check)
    tuner.tuner.cache_results = True
    for device, T in [(0, 65), (1, 100)]:
        use_device(monkeypatch, device)
        tuner.run(None, T, 3)
    assert found == [(128, 3, 'H200'), (128, 3, 'L4')]


def test_threads_get_their_own_results(triton_device: str):
    inputs = [[x.to(triton_device) + i for x in single(T=19)] for i in range(4)]
    expected = [ops.aft_simple(*x, backend='eager') for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: ops.aft_simple(*x, backend='triton'), inputs))
    for y, wanted in zip(found, expected, strict=True):
        assert_close(y.cpu(), wanted.cpu().double(), 1e-5)


@pytest.mark.parametrize(
    'shape', [(1 << 16, 1, 1), (2, 1 << 29, 3)], ids=['more sequences than a grid', 'longer than offsets']
)
def test_what_is_too_large_is_not_covered_and_said_once(shape: tuple[int, ...]):
    k = torch.empty(shape, device='meta')
    launch._warn_too_large.cache_clear()
    with pytest.warns(UserWarning, match='the Triton kernels take at most 65535 sequences'):
        assert not launch._fits([k, k, k, None])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert not launch._fits([None, k, k])
        few = k[:1, :8]
        assert launch._fits([few, few, few])
        assert not launch._fits([few, few, few, torch.empty(1 << 15, 1 << 16, device='meta')])


@pytest.mark.parametrize('name', [x.name for x in OPERATIONS.values() if x.form('triton')])
def test_the_backward_takes_outputs_and_denominators_with_any_strides(name: str, triton_device: str):
    inputs = operands(name, plain(make_inputs(name, (1, 5), 3, 3, B=1), device=triton_device))
    y, saved = getattr(torch.ops.aft_vision, name)(*inputs, True, 'triton')
    backward = getattr(torch.ops.aft_vision, f'{name}_backward')
    grad = randn(1, 5, 3, seed=9).float().to(triton_device)
    turned = [x.mT.contiguous().mT if x.ndim == 3 else x for x in (y, saved)]
    wanted = backward(grad, y, saved, *inputs, True, 'triton')
    found = backward(grad, *turned, *inputs, True, 'triton')
    assert all(torch.equal(x, expected) for x, expected in zip(found, wanted, strict=True))


@pytest.mark.gpu
def test_a_shape_first_met_in_a_capture_runs_untimed():
    inputs = [x.to('cuda', torch.bfloat16) for x in make_qkv(B=2, T=83, D=48)]
    with torch.no_grad():
        # Another key of the tuner, the same compiled kernel.
        ops.aft_simple(*(x[:, :81] for x in inputs), backend='triton')
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ops.aft_simple(*inputs, backend='triton')
    graph.replay()
    torch.cuda.synchronize()
    assert_close(y.cpu(), ops.aft_simple(*(x.cpu().double() for x in inputs), backend='eager'), 2e-2)


def test_weights_are_known_from_the_second_call_until_a_bias_is_trained():
    bias, made = torch.zeros(2, 2), []

    def make() -> torch.Tensor:
        made.append(bias.clone())
        return made[-1].exp()

    assert launch.known_weights(bias, (4,), make) is None
    for _ in range(2):
        torch.testing.assert_close(launch.known_weights(bias, (4,), make), bias.exp())
    assert len(made) == 1
    assert launch.known_weights(bias, (5,), make) is None  # for another size
    # Fused optimizers leave the version as it is, as a write to the data does.
    bias.requires_grad_()
    assert launch.known_weights(bias, (5,), make) is None
    bias.data.fill_(1.0)
    bias.requires_grad_(False)
    assert launch.known_weights(bias, (5,), make) is None
    torch.testing.assert_close(launch.known_weights(bias, (5,), make), bias.exp())
