"""Trials of the compiled forms: what fails is left out, and calls go to the next form."""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_matches_reference, kernels_run, make_inputs, make_qkv, plain
from torch.utils.flop_counter import FlopCounterMode

from aft_vision import ops
from aft_vision.ops import reference, trials
from aft_vision.ops.common import cpp, trial
from aft_vision.ops.declaration import OPERATIONS, Form

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures('compiled')]


@pytest.fixture(autouse=True)
def own_library(compiled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Open the library again in a test, with records in a folder of its own, and as it was after it."""
    monkeypatch.setattr(trials, 'library_folder', lambda: tmp_path)
    cpp._forget_library()
    yield
    monkeypatch.undo()
    cpp._forget_library()
    cpp.library()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A file in the place of a library: its records are of its content."""
    path = tmp_path / 'library.so'
    path.write_bytes(b'of these kernels')
    return path


def form_of(operation: str, name: str) -> Form:
    return next(form for form in OPERATIONS[operation].forms if form.name == name)


def crash(*_: Any) -> None:
    signal.raise_signal(signal.SIGABRT)


def fall_short(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        y, saved = forward(*args)
        return 0.9 * y, saved

    return run


def test_a_form_that_ends_the_process_or_is_wrong_is_left_out_and_named_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(form_of('aft_full', 'cpp'), 'forward', crash)
    wide = form_of('aft_conv', 'wide')
    monkeypatch.setattr(wide, 'forward', fall_short(wide.forward))
    inputs = plain(make_inputs('aft_full', 20, 40))
    with caplog.at_level(logging.WARNING):
        assert kernels_run(lambda: ops.aft_full(**inputs)) == set()
        ops.aft_full(**inputs)
    (record,) = [x for x in caplog.records if x.name == trials.__name__]
    assert 'aft_full cpp single: the process ended by SIGABRT' in record.getMessage()
    assert 'aft_conv wide single: expected the result of the torch form' in record.getMessage()
    assert {place[:2] for place in cpp.failures} == {('aft_full', 'cpp'), ('aft_conv', 'wide')}
    # The next form of the same operation, of which one is compiled.
    q, k, v = (x.float() for x in make_qkv(B=1, T=12, D=70, heads=7))
    kernel = torch.ones(7, 3, 3)
    assert kernels_run(lambda: ops.aft_conv(q, k, v, kernel, (3, 4))) == {'aft_vision::conv_forward'}
    assert_matches_reference(ops.aft_full, reference.aft_full, make_inputs('aft_full', 20, 40))
    # A later process reads what this one found.
    monkeypatch.setattr(trials, 'run_trials', lambda calls: pytest.fail('expected no second trial'))
    cpp._forget_library()
    assert cpp.library() is not None
    assert {place[:2] for place in cpp.failures} == {('aft_full', 'cpp'), ('aft_conv', 'wide')}


@pytest.mark.parametrize('kind', [cpp.PAIRS, cpp.TILES])
def test_bfloat16_is_multiplied_in_float32_where_a_faster_way_fails(kind: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpp, 'native_operands', lambda: kind)
    inputs = plain(make_inputs('aft_full', 20, 40), torch.bfloat16)
    with cpp.multiply_bfloat16_as(cpp.SINGLE):
        single = ops.aft_full(**inputs)
    for failures, is_single in (({}, False), ({('aft_conv', 'conv', kind): 'the process ended by SIGSEGV'}, True)):
        monkeypatch.setattr(cpp, 'JUDGES', [lambda path, native, found=failures: found])
        cpp._forget_library()
        found = []
        assert kernels_run(lambda found=found: found.append(ops.aft_full(**inputs)))
        assert torch.equal(found[0], single) is is_single


def test_compiled_decoding_that_fails_is_left_to_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpp, 'JUDGES', [lambda path, native: {cpp.DECODING: 'the process ended by SIGSEGV'}])
    monkeypatch.setattr('aft_vision.ops.decode.step_cpp.simple_step', crash)
    q, k, v = (x[:, 0].float() for x in make_qkv(B=2, T=1, D=8))
    y, _ = ops.aft_simple_step(q, k, v, ops.aft_simple_state(2, 8))
    torch.testing.assert_close(y, torch.sigmoid(q) * v)


@pytest.mark.parametrize('name', ['torch', 'fork'])
def test_where_a_child_tells_nothing_all_forms_stay_and_nothing_is_kept(
    name: str, monkeypatch: pytest.MonkeyPatch, library: Path, tmp_path: Path
):
    def fork() -> int:
        raise OSError('Cannot allocate memory')

    if name == 'torch':
        monkeypatch.setattr(OPERATIONS['aft_full'].forms[-1], 'forward', crash)
    else:
        monkeypatch.setattr(trial.os, 'fork', fork)
    assert trials.judge(library, cpp.native_operands()) == {}
    assert [*tmp_path.glob('library_*.json')] == []


@pytest.mark.parametrize('mode', ['autocast', 'inference', 'device', 'dtype', 'flops'])
def test_modes_of_the_caller_do_not_reach_trials(mode: str, library: Path, tmp_path: Path):
    default = torch.get_default_dtype()
    contexts = {
        'autocast': torch.autocast('cpu', torch.bfloat16),
        'inference': torch.inference_mode(),
        'device': torch.device('meta'),
        'flops': FlopCounterMode(display=False),
    }
    try:
        torch.set_default_dtype(torch.float64 if mode == 'dtype' else default)
        with contexts.get(mode, nullcontext()):
            assert trials.judge(library, cpp.native_operands()) == {}
    finally:
        torch.set_default_dtype(default)
    (record,) = tmp_path.glob('library_*.json')
    assert json.loads(record.read_text())['failures'] == {}


def test_the_environment_can_switch_trials_off(monkeypatch: pytest.MonkeyPatch, library: Path):
    monkeypatch.setenv('AFT_KERNEL_TRIALS', '0')
    monkeypatch.setattr(trials, 'run_trials', lambda calls: pytest.fail('expected no trial'))
    assert trials.judge(library, cpp.native_operands()) == {}


@pytest.mark.parametrize('content', ['', '{"aft_full', '[1]', '{"aft_full cpp single": 3}'])
def test_a_damaged_record_is_made_again(content: str, library: Path, tmp_path: Path):
    trials.judge(library, cpp.native_operands())
    (record,) = tmp_path.glob('library_*.json')
    found = record.read_text()
    record.write_text(content)
    assert trials.judge(library, cpp.native_operands()) == {}
    assert record.read_text() == found


@pytest.mark.skipif('-fsanitize' in os.environ.get('CXX', ''), reason='a sanitizer takes longer')
def test_trials_take_less_than_a_second(library: Path):
    # Of this process and its children, whatever else runs.
    before = os.times()
    trials.judge(library, cpp.native_operands())
    after = os.times()
    assert sum(after[:4]) - sum(before[:4]) < 1.0


@pytest.mark.parametrize('change', ['library', 'torch', 'kinds'])
def test_what_was_found_for_something_else_is_not_read(change: str, library: Path, monkeypatch: pytest.MonkeyPatch):
    native = cpp.SINGLE
    trials.judge(library, native)
    tried: list[dict[str, Any]] = []
    monkeypatch.setattr(trials, 'run_trials', lambda calls: tried.append(calls) or {})
    assert trials.judge(library, native) == {}
    assert not tried
    if change == 'library':
        library.write_bytes(b'of others')
    elif change == 'torch':
        monkeypatch.setattr(torch, '__version__', 'another')
    else:
        native = cpp.TILES
    trials.judge(library, native)
    assert any('aft_full cpp tiles' in calls for calls in tried) is (change == 'kinds')
    assert tried


def test_a_failure_for_lack_of_memory_or_time_is_not_kept(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for failure in (MemoryError('std::bad_alloc'), None):
        with monkeypatch.context() as patch:

            def forward(*_: Any, failure: Exception | None = failure) -> None:
                if failure is not None:
                    raise failure
                signal.raise_signal(signal.SIGKILL)

            patch.setattr(form_of('aft_full', 'cpp'), 'forward', forward)
            assert ('aft_full', 'cpp', cpp.SINGLE) in trials.judge(library, cpp.SINGLE)
        assert [*tmp_path.glob('library_*.json')] == []
        assert trials.judge(library, cpp.SINGLE) == {}
        for path in tmp_path.glob('library_*.json'):
            path.unlink()


def test_another_thread_waits_for_the_trials(monkeypatch: pytest.MonkeyPatch):
    entered, failure = threading.Event(), {('aft_full', 'cpp', cpp.PAIRS): 'deliberate'}

    def judge(path: Path, native: int) -> dict[tuple[str, str, int], str]:
        entered.set()
        time.sleep(0.2)
        return failure

    monkeypatch.setattr(cpp, 'JUDGES', [judge])
    monkeypatch.setattr(cpp, 'native_operands', lambda: cpp.compiled() and cpp.PAIRS)
    first = threading.Thread(target=cpp.library)
    first.start()
    entered.wait()
    assert cpp.operands(torch.ones(1, dtype=torch.bfloat16)) == cpp.SINGLE
    first.join()
    assert cpp.failures == failure


def test_weights_of_a_form_that_is_left_out_are_not_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpp, 'JUDGES', [lambda path, native: {('aft_full', 'cpp', cpp.SINGLE): 'deliberate'}])
    cpp.library()
    monkeypatch.setattr(cpp, 'pack', lambda *_: pytest.fail('expected no compiled call'))
    inputs = plain(make_inputs('aft_full', 20, 40))
    assert ops.bias_weights('aft_full', inputs['bias'], inputs['v']) is None
