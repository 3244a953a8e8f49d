"""The comparison of kernels with the torch form before they are first used: what it catches, and what it keeps."""

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import kernels_run, make_qkv
from torch import Tensor

from aft_vision import ops
from aft_vision.ops.common import launch


@pytest.fixture
def verify(triton_device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The module, for a kind of device without a record, and a small shape."""
    monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path))
    from aft_vision.ops.common import verify

    monkeypatch.setattr(verify, 'is_needed', lambda device: True)
    monkeypatch.setattr(verify, 'SMALL', verify.Shape(B=1, grid=(2, 3), D=2, channels=1, window=3))
    monkeypatch.setattr(verify, '_decisions', {})
    return verify


@pytest.fixture
def inputs(triton_device: str) -> list[Tensor]:
    return [x.float().to(triton_device) for x in make_qkv(B=1, T=5, D=3)]


def start_process(verify: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Forget what this process knows; the names of the operators that are compared from now on."""
    compared: list[str] = []
    find_failure = verify.find_failure
    monkeypatch.setattr(verify, '_decisions', {})
    monkeypatch.setattr(verify, 'find_failure', lambda name, *x: (compared.append(name), find_failure(name, *x))[1])
    return compared


def damage(change: Callable[[Tensor], Tensor], i: int, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """Change the i-th result of AFT-simple's kernels."""
    from aft_vision.ops.simple import triton as simple

    kernel = getattr(simple, function)

    def broken(*args: object) -> tuple[Tensor, ...]:
        return tuple(change(x) if i == j else x for j, x in enumerate(kernel(*args)))

    monkeypatch.setattr(simple, function, broken)


def fail(x: Tensor) -> Tensor:
    raise RuntimeError('ptxas fatal: no such register\nand more')


def skip_last(x: Tensor) -> Tensor:
    return x.index_fill(1, torch.tensor([x.shape[1] - 1], device=x.device), float('nan'))


@pytest.mark.parametrize(
    ('change', 'i', 'function', 'reason'),
    [
        (lambda x: x * 1.001, 0, 'simple_forward', 'y is off by'),
        (skip_last, 0, 'simple_forward', 'y is off by nan'),
        (lambda x: x + 1e-3, 2, 'simple_backward', 'dv is off by'),
        (fail, 0, 'simple_forward', 'ptxas fatal: no such register'),
    ],
    ids=['wrong value', 'not written', 'wrong gradient', 'does not compile'],
)
def test_a_broken_kernel_is_not_used(
    change: Callable[[Tensor], Tensor],
    i: int,
    function: str,
    reason: str,
    verify: SimpleNamespace,
    inputs: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    damage(change, i, monkeypatch, function)
    with caplog.at_level(logging.WARNING):
        found = [ops.aft_simple(*inputs) for _ in range(3)]
    assert all(torch.equal(y, ops.aft_simple(*inputs, backend='eager')) for y in found)
    (line,) = [record.getMessage() for record in caplog.records if record.name == verify.__name__]
    assert line.startswith('the Triton kernels of simple are not used for torch.float32 on ')
    assert reason in line
    assert '\n' not in line
    with pytest.raises(RuntimeError, match=rf"backend='triton' needs kernels that agree .*: {reason}"):
        ops.aft_simple(*inputs, backend='triton')
    # In the next process too, which compares nothing.
    compared = start_process(verify, monkeypatch)
    assert torch.equal(ops.aft_simple(*inputs), found[0])
    assert not compared


def test_a_kernel_is_compared_once_for_each_type_and_then_used(
    verify: SimpleNamespace, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
):
    compared = start_process(verify, monkeypatch)
    assert 'aft_vision::simple_forward' in kernels_run(lambda: [ops.aft_simple(*inputs) for _ in range(2)])
    assert compared == ['simple']
    ops.aft_simple(*(x.bfloat16() for x in inputs))
    assert compared == ['simple', 'simple']
    compared = start_process(verify, monkeypatch)
    assert 'aft_vision::simple_forward' in kernels_run(lambda: ops.aft_simple(*inputs, backend='triton'))
    assert not compared


@pytest.mark.parametrize('during', ['capture', 'trace'])
def test_nothing_is_compared_during_a_capture_or_a_trace(
    during: str, verify: SimpleNamespace, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
):
    module, name = {'capture': (launch, 'is_capturing'), 'trace': (torch.jit, 'is_tracing')}[during]
    compared = start_process(verify, monkeypatch)
    expected = ops.aft_simple(*inputs, backend='eager')
    with monkeypatch.context() as patch:
        patch.setattr(module, name, lambda *_: True)
        assert torch.equal(ops.aft_simple(*inputs), expected)
        assert torch.equal(ops.aft_simple(*inputs, backend='triton'), expected)
    # A backward after it takes what the torch form saved.
    assert 'aft_vision::simple_forward' not in kernels_run(lambda: ops.aft_simple(*inputs))
    assert not compared
    verify.verify('simple', torch.float32, inputs[0].device)
    start_process(verify, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, lambda *_: True)
        assert 'aft_vision::simple_forward' in kernels_run(lambda: ops.aft_simple(*inputs))


def test_of_several_processes_one_compares_and_the_others_wait(
    verify: SimpleNamespace, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
):
    compared = []

    def compare(*args: object) -> str:
        compared.append(args)
        time.sleep(0.1)
        return 'wrong'

    monkeypatch.setattr(verify, 'find_failure', compare)
    # A lock is of an open file: threads that open it are to each other like processes.
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: verify._decide('simple', torch.float32, inputs[0].device), range(3)))
    assert found == ['wrong'] * 3
    assert len(compared) == 1


def test_a_kernel_whose_comparison_ended_its_process_is_not_used(
    verify: SimpleNamespace, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
):
    seen = []
    monkeypatch.setattr(verify, 'find_failure', lambda *_: seen.append(verify.read_record(inputs[0].device)))
    verify.verify('simple', torch.float32, inputs[0].device)
    assert seen == [{'simple float32': verify.UNFINISHED}]
    verify._write_record(inputs[0].device, seen[0])
    assert verify.failure('simple', inputs[2]) == verify.UNFINISHED


def test_a_comparison_that_is_interrupted_leaves_the_record_as_it_was(
    verify: SimpleNamespace, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
):
    device = inputs[0].device
    verify._write_record(device, {'full float32': None})

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, 'find_failure', interrupt)
    with pytest.raises(KeyboardInterrupt):
        verify.verify('simple', torch.float32, device)
    assert verify.read_record(device) == {'full float32': None}


def test_a_record_is_of_one_kind_of_device_one_triton_and_one_source(
    verify: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    device = torch.device('cpu')
    paths = [verify.record_path(device)]
    for module, name, value in [
        (verify, 'device_name', lambda device: 'another GPU'),
        (verify.triton, '__version__', '99.0'),
        (verify, '_source_digest', lambda: 'another source'),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            paths.append(verify.record_path(device))
    assert len(set(paths)) == 4


@pytest.mark.parametrize('text', ['', '{"results": ', '[1]', '{"results": 3}'])
def test_a_damaged_record_is_none(text: str, verify: SimpleNamespace):
    device = torch.device('cpu')
    verify._write_record(device, {'full float32': 'wrong'})
    assert json.loads(verify.record_path(device).read_text())['results'] == verify.read_record(device)
    verify.record_path(device).write_text(text)
    assert verify.read_record(device) == {}


def test_without_a_folder_to_write_to_each_process_compares(
    verify: SimpleNamespace, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / 'aft_vision').write_text('a file')
    for _ in range(2):
        compared = start_process(verify, monkeypatch)
        assert 'aft_vision::simple_forward' in kernels_run(lambda: ops.aft_simple(*inputs))
        assert 'simple' in compared
