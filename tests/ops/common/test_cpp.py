"""The compiled kernels as a library, and tensors as they are given to them."""

import ctypes
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import assert_close, kernels_run, make_inputs, make_qkv, randn, single
from torch import Tensor

from aft_vision import ops
from aft_vision.ops.common import build, cpp

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures('compiled')]


@pytest.fixture(autouse=True)
def single_precision_afterwards() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def step(q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
    with torch.no_grad():
        state, rows = ops.aft_local_state(2, 70, 5, torch.float32), []
        for t in range(12):
            row = ops.factorized_band_row(u, u, state.position, 5)
            y, state = ops.aft_local_step(q[:, t], k[:, t], v[:, t], row, state)
            rows.append(y)
    return torch.stack(rows, 1)


CALLS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    'simple_causal': (lambda q, k, v, _: ops.aft_simple_causal(q, k, v), (1,)),
    'local_causal': (lambda q, k, v, band: ops.aft_local_causal(q, k, v, band), (12, 5)),
    'conv': (lambda q, k, v, kernel: ops.aft_conv(q, k, v, kernel, (3, 4)), (70, 3, 3)),
    'step': (step, (12, 4)),
}


@pytest.mark.parametrize('inputs_dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('default', [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize('name', CALLS)
def test_the_default_dtype_of_torch_changes_nothing(name: str, default: torch.dtype, inputs_dtype: torch.dtype):
    operation, shape = CALLS[name]
    bias = randn(*shape, seed=8).float()
    inputs = [x.to(inputs_dtype).requires_grad_() for x in make_qkv(B=2, T=12, D=70)] + [bias.requires_grad_()]

    def run() -> list[Tensor]:
        y = operation(*inputs)
        grads = torch.autograd.grad(y.sum(), inputs, allow_unused=True) if y.requires_grad else ()
        return [y.detach(), *(x for x in grads if x is not None)]

    expected = run()
    torch.set_default_dtype(default)
    for found, want in zip(run(), expected, strict=True):
        assert found.dtype == want.dtype
        assert torch.equal(found, want)


@pytest.mark.parametrize('name', ['layout', *cpp.STRUCTS])
def test_kernels_of_another_layout_are_not_used(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(cpp, 'LAYOUT', -1 if name == 'layout' else cpp.LAYOUT)
    monkeypatch.setitem(cpp.STRUCTS, name if name in cpp.STRUCTS else 'aft_tokens', ctypes.c_int32 * 7)
    assert cpp.library.__wrapped__() is None
    message = 'expected C++ kernels of layout -1, got ' if name == 'layout' else f'{name} needs a struct of '
    assert message in caplog.text


@pytest.mark.parametrize(
    ('variable', 'value', 'reason'),
    [
        ('CXX', 'no-such-compiler', 'expected a C++ compiler, got none by the name of no-such-compiler'),
        ('CXX', 'false', 'false failed'),
        ('CXX', '"g++', 'expected CXX to be a command'),
        ('CXX', ' ', 'expected a C++ compiler'),
        ('TORCH_EXTENSIONS_DIR', '/dev/null', 'Not a directory'),
    ],
)
def test_without_a_compiler_the_torch_form_runs_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path, caplog, variable: str, value: str, reason: str
):
    inputs = single(make_inputs('aft_conv', (5, 7), 66, 3))
    expected = ops.aft_conv(**inputs)
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path))
    monkeypatch.setenv(variable, value)
    cpp.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert kernels_run(lambda: ops.aft_conv(**inputs)) == set()
            assert_close(ops.aft_conv(**inputs), expected.double(), 1e-5)
    finally:
        cpp.library.cache_clear()
    found = [record.getMessage() for record in caplog.records if record.name in (build.__name__, cpp.__name__)]
    assert len(found) == 1
    assert found[0].startswith('the C++ kernels cannot be built')
    assert reason in found[0]
    assert '\n' not in found[0]
