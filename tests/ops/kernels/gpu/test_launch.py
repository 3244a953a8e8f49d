"""Where the Triton kernels run, what runs where they do not, and their values at real sizes on a GPU."""

import warnings

import pytest
import timm
import torch
from helpers import assert_close, assert_passes_opcheck, make_qkv, randn
from torch import Tensor

import aft_vision
from aft_vision import ops
from aft_vision.ops import dispatch
from aft_vision.ops.kernels.gpu import launch


def single(T: int = 5, D: int = 3, device: str = 'cpu') -> list[Tensor]:
    return [x.float().to(device) for x in make_qkv(B=1, T=T, D=D)]


def events(function) -> set[str]:
    """The kernels that a call ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return {event.name for event in profile.events() if event.name.startswith('aft_vision::')}


def test_cpu_tensors_need_the_interpreter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    assert not launch.can_run(single())
    assert 'aft_vision::simple_forward' not in events(lambda: ops.aft_simple(*single()))
    pytest.importorskip('triton')
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    assert launch.can_run(single())


def test_without_triton_another_form_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    monkeypatch.setattr(launch, '_has_triton', lambda: False)
    assert not launch.can_run(single())
    assert torch.equal(ops.aft_simple(*single()), ops.aft_simple(*single(), backend='eager'))


@pytest.mark.usefixtures('triton_device')
def test_inputs_of_two_devices_or_of_another_type_are_not_covered():
    q, k, v = single()
    assert launch.can_run([None, k, v.half(), torch.ones(1, 5, dtype=torch.bool), (2, 2), True])
    assert not launch.can_run([q, k.to('meta'), v])
    assert not launch.can_run([q.to('meta'), k.to('meta'), v.to('meta')])
    assert not launch.can_run([q, k.double(), v])
    assert not launch.can_run([q[:0], k[:0], v[:0]])


def test_float64_takes_eager_and_says_so_once_if_triton_was_asked_for(triton_device: str):
    dispatch._warn_once.cache_clear()
    inputs = [x.to(triton_device) for x in make_qkv(B=1, T=5, D=3)]
    with pytest.warns(
        UserWarning, match="aft_simple has no 'triton' form for these inputs on this machine; using eager"
    ):
        y = ops.aft_simple(*inputs, backend='triton')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert torch.equal(ops.aft_simple(*inputs, backend='triton'), y)
        assert torch.equal(ops.aft_simple(*inputs), y)


def test_it_passes_torch_opcheck(triton_device: str):
    inputs = dict(zip('qkv', make_qkv(B=1, T=3, D=2), strict=True))
    assert_passes_opcheck('aft_simple', inputs, backend='triton', device=triton_device)


def test_a_registered_model_runs_it_forward_and_backward(triton_device: str):
    assert aft_vision.__version__
    model = timm.create_model('aft_full_tiny', img_size=32, depth=1, embed_dim=24, num_classes=2).to(triton_device)
    x = torch.randn(1, 3, 32, 32, device=triton_device)
    assert {'aft_vision::full_forward', 'aft_vision::full_backward'} <= events(lambda: model(x).sum().backward())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize(
    ('dtype', 'bound', 'gradient_bound'), [(torch.float32, 1e-5, 1e-4), (torch.bfloat16, 2e-2, 2e-2)]
)
@pytest.mark.parametrize(
    ('op', 'shape', 'others'),
    [
        ('aft_full', (8, 197, 384), (randn(197, 197, seed=8),)),
        ('aft_simple', (8, 197, 384), ()),
        ('aft_simple_causal', (2, 3072, 256), ()),
    ],
)
def test_it_equals_float64_at_real_sizes(
    op: str, shape: tuple[int, ...], others: tuple[Tensor, ...], dtype: torch.dtype, bound: float, gradient_bound: float
):
    B, T, D = shape
    low = [x.to('cuda', dtype).requires_grad_() for x in (*make_qkv(B=B, T=T, D=D), *others)]
    # On a CPU, where eager is exact for any key.
    high = [x.detach().cpu().double().requires_grad_() for x in low]
    y, expected = getattr(ops, op)(*low, backend='triton'), getattr(ops, op)(*high, backend='eager')
    assert_close(y.cpu(), expected, bound)
    weight = randn(*shape, seed=9).to(dtype)
    found = torch.autograd.grad(y, low, weight.cuda())
    for got, want in zip(found, torch.autograd.grad(expected, high, weight.double()), strict=True):
        assert_close(got.cpu(), want, gradient_bound)
