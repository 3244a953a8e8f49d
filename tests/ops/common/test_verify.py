"""The comparison of kernels with the torch form before they are first used: what it catches, and what it keeps."""

import importlib
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import kernels_run, make_qkv, randn
from torch import Tensor

from aft_vision import ops
from aft_vision.ops import operator
from aft_vision.ops.common.errors import AcceleratorError
from aft_vision.ops.common.inputs import Qkv
from aft_vision.ops.declaration import OPERATIONS, Operation, Shape

SIMPLE = OPERATIONS['aft_simple']


@pytest.fixture
def verify(triton_device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The module, for a kind of device without a record, and a small shape."""
    monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path))
    from aft_vision.ops.common import verify

    monkeypatch.setattr(verify, 'is_needed', lambda device: True)
    monkeypatch.setattr(verify, 'SMALL', Shape(B=1, grid=(2, 3), D=2, channels=1, window=3))
    for name, form in ((name, x.form('triton')) for name, x in OPERATIONS.items()):
        if form is not None:
            larger = (Shape(B=1, grid=(3, 5), D=2, channels=1, window=3),) if name == 'aft_axial' else ()
            monkeypatch.setattr(form, 'shapes', larger)
    monkeypatch.setattr(verify, '_decisions', {})
    return verify


@pytest.fixture
def inputs(triton_device: str) -> list[Tensor]:
    return [x.float().to(triton_device) for x in make_qkv(B=1, T=5, D=3)]


def start_process(verify: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Forget what this process knows; the names of the operations that are compared from now on."""
    compared: list[str] = []
    find_failure = verify.find_failure
    monkeypatch.setattr(verify, '_decisions', {})
    monkeypatch.setattr(verify, 'find_failure', lambda x, *y: (compared.append(x.name), find_failure(x, *y))[1])
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
    assert line.startswith('the Triton kernels of aft_simple are not used for torch.float32 on ')
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
    assert compared == ['aft_simple']
    ops.aft_simple(*(x.bfloat16() for x in inputs))
    assert compared == ['aft_simple', 'aft_simple']
    compared = start_process(verify, monkeypatch)
    assert 'aft_vision::simple_forward' in kernels_run(lambda: ops.aft_simple(*inputs, backend='triton'))
    assert not compared


@pytest.mark.parametrize('during', ['capture', 'trace'])
def test_nothing_is_compared_during_a_capture_or_a_trace(
    during: str, verify: SimpleNamespace, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
):
    module, name = {'capture': (verify, 'is_capturing'), 'trace': (torch.jit, 'is_tracing')}[during]
    compared = start_process(verify, monkeypatch)
    expected = ops.aft_simple(*inputs, backend='eager')
    with monkeypatch.context() as patch:
        patch.setattr(module, name, lambda *_: True)
        assert torch.equal(ops.aft_simple(*inputs), expected)
        operator._warn_once.cache_clear()
        with pytest.warns(UserWarning, match="no 'triton' form"):
            assert torch.equal(ops.aft_simple(*inputs, backend='triton'), expected)
    # A backward after it takes what the torch form saved.
    assert 'aft_vision::simple_forward' not in kernels_run(lambda: ops.aft_simple(*inputs))
    assert not compared
    verify.verify(SIMPLE, (torch.float32,), inputs[0].device)
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
        found = list(pool.map(lambda _: verify._decide(SIMPLE, (torch.float32,), inputs[0].device), range(3)))
    assert found == ['wrong'] * 3
    assert len(compared) == 1


def test_processes_that_compare_different_operators_keep_the_results_of_each_other(
    verify: SimpleNamespace, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
):
    device, both = inputs[0].device, threading.Barrier(2, timeout=10)
    verify._write_record(device, {'aft_conv float32': None})

    def compare(operation: Operation, *_: object) -> str:
        # Both are at it.
        both.wait()
        return f'{operation.name} is wrong'

    monkeypatch.setattr(verify, 'find_failure', compare)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda x: verify.verify(x, (torch.float32,), device), (OPERATIONS['aft_full'], SIMPLE)))
    wrong = {f'{name} float32': f'{name} is wrong' for name in ('aft_full', 'aft_simple')}
    assert verify.read_record(device) == {'aft_conv float32': None, **wrong}


def stop_once(verify: SimpleNamespace, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the record as a process does that is stopped while it compares."""
    device, seen = inputs[0].device, []
    start_process(verify, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(verify, 'find_failure', lambda *_: seen.append(verify.record_path(device).read_text()))
        assert verify.failure(SIMPLE, inputs) is None
    (text,) = seen
    verify.record_path(device).write_text(text)


def test_a_process_that_is_stopped_during_the_comparison_leaves_it_to_the_next(
    verify: SimpleNamespace, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
):
    stop_once(verify, inputs, monkeypatch)
    compared = start_process(verify, monkeypatch)
    assert 'aft_vision::simple_forward' in kernels_run(lambda: ops.aft_simple(*inputs))
    assert compared == ['aft_simple']
    assert verify.read_record(inputs[0].device) == {'aft_simple float32': None}


def test_a_kernel_whose_comparison_ended_two_processes_is_not_used(
    verify: SimpleNamespace, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
):
    for _ in range(2):
        stop_once(verify, inputs, monkeypatch)
    compared = start_process(verify, monkeypatch)
    assert verify.failure(SIMPLE, inputs) == verify.UNFINISHED
    assert torch.equal(ops.aft_simple(*inputs), ops.aft_simple(*inputs, backend='eager'))
    assert not compared
    # The tool compares whatever is recorded.
    assert verify.verify(SIMPLE, (torch.float32,), inputs[0].device) is None
    start_process(verify, monkeypatch)
    assert verify.failure(SIMPLE, inputs) is None


@pytest.mark.parametrize('q', ['float32', 'none'])
def test_each_combination_of_types_is_compared_by_itself(
    q: str, verify: SimpleNamespace, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
):
    from aft_vision.ops.simple import triton as simple

    same = [x.half() for x in inputs]
    mixed = [inputs[0] if q == 'float32' else None, *same[1:]]
    kernel = simple.simple_forward

    def broken(inputs: Qkv, save: bool) -> tuple[Tensor, ...]:
        y, saved = kernel(inputs, save)
        q = inputs.q
        return y if q is not None and q.dtype == torch.float16 else y + 1, saved

    monkeypatch.setattr(simple, 'simple_forward', broken)
    for found in (same, mixed):
        assert torch.equal(
            ops.aft_simple(*found), ops.aft_simple(*found, backend='triton' if found is same else 'eager')
        )
    record = verify.read_record(inputs[0].device)
    assert record.pop('aft_simple float16') is None
    ((entry, reason),) = record.items()
    assert entry == f'aft_simple {q.capitalize() if q == "none" else q} float16 float16'
    assert 'y is off by' in reason


def test_a_half_with_a_float32_bias_is_compared_as_it_runs(
    verify: SimpleNamespace, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
):
    half = [x.half() for x in inputs]
    bias = randn(5, 5).float().to(inputs[0].device)
    assert 'aft_vision::full_forward' in kernels_run(lambda: ops.aft_full(*half, bias, backend='triton'))
    assert verify.read_record(inputs[0].device) == {'aft_full float16 float16 float16 float32': None}


def test_a_comparison_that_is_interrupted_leaves_the_record_as_it_was(
    verify: SimpleNamespace, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
):
    device = inputs[0].device
    verify._write_record(device, {'aft_full float32': None})

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, 'find_failure', interrupt)
    with pytest.raises(KeyboardInterrupt):
        verify.verify(SIMPLE, (torch.float32,), device)
    assert verify.read_record(device) == {'aft_full float32': None}


def test_a_record_is_of_one_kind_of_device_one_torch_one_triton_and_one_source(
    verify: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    device = torch.device('cpu')
    paths = [verify.record_path(device)]
    for module, name, value in [
        (verify, 'device_name', lambda device: 'another GPU'),
        (verify.torch, '__version__', '99.0'),
        (verify.triton, '__version__', '99.0'),
        (verify, '_source_digest', lambda: 'another source'),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            paths.append(verify.record_path(device))
    assert len(set(paths)) == 5


def test_a_record_is_of_the_source_of_every_kernel(verify: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    read, found = Path.read_bytes, set()
    for name in ('no file', 'full/kernels.py', 'conv/kernels.py', 'causal/local_triton.py', 'common/kernels.py'):

        def change(self: Path, name: str = name) -> bytes:
            return read(self) + (b'#' if str(self).endswith(name) else b'')

        monkeypatch.setattr(Path, 'read_bytes', change)
        found.add(verify._source_digest.__wrapped__())
    assert len(found) == 5


@pytest.mark.parametrize('text', ['', '{"results": ', '[1]', '{"results": 3}'])
def test_a_damaged_record_is_none(text: str, verify: SimpleNamespace):
    device = torch.device('cpu')
    verify._write_record(device, {'aft_full float32': 'wrong'})
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
        assert 'aft_simple' in compared


def test_a_lack_of_memory_is_not_recorded_and_the_next_process_compares_again(
    verify: SimpleNamespace, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
):
    def run_out(*args: object) -> None:
        raise torch.OutOfMemoryError('CUDA out of memory')

    device = inputs[0].device
    with monkeypatch.context() as patch:
        patch.setattr(verify, 'draw_inputs', run_out)
        assert verify.failure(SIMPLE, inputs) == 'CUDA out of memory'
    assert verify.read_record(device) == {}
    compared = start_process(verify, monkeypatch)
    assert verify.failure(SIMPLE, inputs) is None
    assert compared == ['aft_simple']


@pytest.mark.parametrize(
    ('error', 'message'),
    [
        (RuntimeError, 'Triton Error [CUDA]: out of memory'),
        (RuntimeError, 'CUBLAS_STATUS_ALLOC_FAILED when calling'),
        (AcceleratorError, 'CUDA error: out of memory'),
    ],
)
def test_a_lack_of_memory_of_any_library_is_not_recorded(
    error: type[Exception], message: str, verify: SimpleNamespace, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
):
    def run_out(x: Tensor) -> Tensor:
        raise error(message)

    damage(run_out, 0, monkeypatch, 'simple_forward')
    assert verify.failure(SIMPLE, inputs) == message
    assert verify.read_record(inputs[0].device) == {}


def test_a_kernel_that_makes_the_device_unusable_is_recorded_and_the_error_raised(
    verify: SimpleNamespace, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
):
    def crash(x: Tensor) -> Tensor:
        raise RuntimeError('Triton Error [CUDA]: an illegal memory access was encountered')

    with monkeypatch.context() as patch:
        damage(crash, 0, patch, 'simple_forward')
        patch.setattr(verify, 'is_lost', lambda device: True)
        with pytest.raises(AcceleratorError):
            verify.failure(SIMPLE, inputs)
    assert start_process(verify, monkeypatch) == []
    assert verify.failure(SIMPLE, inputs) == 'Triton Error [CUDA]: an illegal memory access was encountered'


def test_a_failure_of_a_further_check_is_kept(
    verify: SimpleNamespace, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
):
    assert verify.failure(SIMPLE, inputs) is None
    verify.record_failure(SIMPLE, (torch.float32,), inputs[0].device, 'dv is off')
    start_process(verify, monkeypatch)
    assert verify.failure(SIMPLE, inputs) == 'dv is off'


@pytest.mark.parametrize('name', [name for name, x in OPERATIONS.items() if x.form('triton')])
def test_a_broken_kernel_of_each_operation_is_found(
    name: str, verify: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, triton_device: str
):
    device, operation = torch.device(triton_device), OPERATIONS[name]
    assert verify.find_failure(operation, (torch.float32,), device) is None
    form = verify.triton_form(operation)
    forward = form.forward

    def broken(*args: object) -> tuple[Tensor, ...]:
        y, *others = forward(*args)
        return 1.1 * y, *others

    monkeypatch.setattr(form, 'forward', broken)
    assert 'y is off' in verify.find_failure(operation, (torch.float32,), device)


def test_a_way_to_compute_larger_inputs_is_compared_too(
    verify: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, triton_device: str
):
    kernels = importlib.import_module('aft_vision.ops.axial.triton')
    forward = kernels.axial_forward

    def broken(inputs: Any, save: bool) -> tuple[Tensor, Tensor]:
        y, den = forward(inputs, save)
        return y if kernels._is_paired(inputs) else 1.1 * y, den

    monkeypatch.setattr(kernels, 'axial_forward', broken)
    assert 'y is off' in verify.find_failure(OPERATIONS['aft_axial'], (torch.float32,), torch.device(triton_device))


def test_where_torch_may_round_products_to_tf32_the_comparison_allows_it(verify: SimpleNamespace):
    wanted = (torch.ones(9, dtype=torch.float64),)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision('highest')
        with pytest.raises(RuntimeError, match='y is off'):
            verify._check((wanted[0] * (1 + 3e-4),), wanted, (torch.float32,), 1.0)
        torch.set_float32_matmul_precision('high')
        verify._check((wanted[0] * (1 + 3e-4),), wanted, (torch.float32,), 1.0)
        with pytest.raises(RuntimeError, match='y is off'):
            verify._check((wanted[0] * (1 + 3e-3),), wanted, (torch.float32,), 1.0)
    finally:
        torch.set_float32_matmul_precision(before)


def test_what_the_deterministic_mode_refuses_is_no_failure_of_a_kernel(
    verify: SimpleNamespace, triton_device: str, monkeypatch: pytest.MonkeyPatch
):
    from aft_vision.ops.full import triton as full

    forward = full.full_forward

    def strict(*args: object) -> tuple[Tensor, ...]:
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError('Deterministic behavior was enabled, but this operation is not deterministic')
        return forward(*args)

    monkeypatch.setattr(full, 'full_forward', strict)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert verify.find_failure(OPERATIONS['aft_full'], (torch.float32,), torch.device(triton_device)) is None
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
