"""The verification of the kernels on a GPU, and what it says without one."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from aft_vision.commandline import run_command
from tools import verify_gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        run_command(verify_gpu.main, [])
    assert stopped.value.code == 2
    assert capsys.readouterr() == ('', 'error: nothing was verified: there is no GPU that torch can use\n')


@pytest.mark.parametrize('reason', [None, 'y is off by 1.0e+00 of 2.0e+00'])
def test_it_records_every_operator_at_shapes_of_models(
    reason: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip('triton')
    from aft_vision.ops.common import verify

    found: list[SimpleNamespace] = []

    def record(name: str, types: tuple[torch.dtype, ...], device: torch.device, *shapes: tuple[int, ...]) -> str | None:
        found.append(SimpleNamespace(name=name, types=types, tokens=max(x.grid[0] * x.grid[1] for x in shapes)))
        return reason if name == 'conv' else None

    monkeypatch.setattr(verify_gpu, 'find_obstacle', lambda: None)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'a GPU')
    monkeypatch.setattr(verify, 'verify', record)
    with nullcontext() if reason is None else pytest.raises(SystemExit) as stopped:
        verify_gpu.main([])
    assert reason is None or stopped.value.code == 1
    assert {x.name for x in found} == set(verify.OPERATORS)
    assert {x.types for x in found if len(x.types) == 1} == {(dtype,) for dtype in verify.BOUNDS}
    # As under autocast.
    halves = [(half, half, half, torch.float32) for half in (torch.bfloat16, torch.float16)]
    biased = {'full', 'conv', 'onehot', 'local_causal'}
    assert {(x.name, x.types) for x in found if len(x.types) > 1} == {(name, x) for name in biased for x in halves}
    assert len(found) == 3 * len(verify.OPERATORS) + 8
    assert min(x.tokens for x in found) >= 196
    lines = capsys.readouterr().out.splitlines()
    assert sum('agrees' in line for line in lines) == (26 if reason is None else 21)
    assert lines[-1].startswith('recorded for a GPU in ')
