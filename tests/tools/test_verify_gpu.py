"""The verification of the kernels on a GPU, what it says without one, and compiling for those that are not here."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import interpret_triton
from torch import Tensor

from aft_vision.ops.common.errors import AcceleratorError
from aft_vision.ops.declaration import OPERATIONS, Operation
from aft_vision_cli.commandline import run_command
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
    pytest.importorskip('triton', minversion='3.6')
    from aft_vision.ops.common import verify

    found: list[SimpleNamespace] = []

    def record(
        operation: Operation, types: tuple[torch.dtype, ...], device: torch.device, *shapes: tuple[int, ...]
    ) -> str | None:
        found.append(
            SimpleNamespace(name=operation.name, types=types, tokens=max(x.grid[0] * x.grid[1] for x in shapes))
        )
        return reason if operation.name == 'aft_conv' else None

    monkeypatch.setattr(verify_gpu, 'find_obstacle', lambda device: None)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'a GPU')
    monkeypatch.setattr(verify, 'verify', record)
    with nullcontext() if reason is None else pytest.raises(SystemExit) as stopped:
        verify_gpu.main([])
    assert reason is None or stopped.value.code == 1
    kernels = [x for x in OPERATIONS.values() if x.form('triton')]
    assert {x.name for x in found} == {x.name for x in kernels}
    assert {x.types for x in found if len(x.types) == 1} == {(dtype,) for dtype in verify.BOUNDS}
    # As under autocast.
    halves = torch.bfloat16, torch.float16
    mixed = {(x.name, (half,) * 3 + (torch.float32,) * len(x.biases)) for x in kernels if x.biases for half in halves}
    assert {(x.name, x.types) for x in found if len(x.types) > 1} == mixed
    assert len(found) == 3 * len(kernels) + 10
    assert min(x.tokens for x in found) >= 196
    lines = capsys.readouterr().out.splitlines()
    assert sum('agrees' in line for line in lines) == (31 if reason is None else 26)
    assert lines[-1].startswith('recorded for a GPU in ')


@pytest.fixture
def thorough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Arguments of a thorough dry run of one operator."""
    pytest.importorskip('triton', minversion='3.6')
    monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path))
    interpret_triton(monkeypatch)
    arguments = ['--operators', 'simple', '--dtypes', 'float32', '--json', str(tmp_path / 'found.json')]
    return ['--thorough', '--dry-run', *arguments]


def test_bits_that_change_are_found(thorough: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from aft_vision.ops.simple import triton as simple

    kernel, calls = simple.simple_forward, []

    def drift(*args: object) -> tuple[Tensor, Tensor]:
        calls.append(1)
        y, saved = kernel(*args)
        # Within the bounds.
        return y + 1e-7 * len(calls), saved

    monkeypatch.setattr(simple, 'simple_forward', drift)
    with pytest.raises(SystemExit) as stopped:
        verify_gpu.main(thorough)
    assert stopped.value.code == 1
    rows = json.loads((tmp_path / 'found.json').read_text())['rows']
    found = {row['check']: row['failure'] for row in rows}
    assert [found.pop(name) for name in ('float64', 'further shapes')] == [None, None]
    assert found == {'a second call': 'other bits in y', 'torch.compile': 'other bits in y'}


def test_a_check_that_loses_the_gpu_is_the_last(thorough: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def crash(*args: object) -> None:
        raise AcceleratorError('an illegal memory access\nwas encountered')

    monkeypatch.setattr(verify_gpu, 'step', crash)
    with pytest.raises(RuntimeError, match='the GPU is lost to this process'):
        verify_gpu.main(thorough)
    found = json.loads((tmp_path / 'found.json').read_text())
    assert not found['complete']
    assert [row['failure'] for row in found['rows']] == [None, None, 'an illegal memory access']


def test_a_check_that_raises_stops_no_other(thorough: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def fail(*args: object) -> None:
        raise RuntimeError('an illegal memory access\nwas encountered')

    monkeypatch.setattr(verify_gpu, 'step', fail)
    with pytest.raises(SystemExit):
        verify_gpu.main(thorough)
    rows = json.loads((tmp_path / 'found.json').read_text())['rows']
    assert [row['failure'] for row in rows] == [None, None, *['an illegal memory access'] * 2]


def test_it_compiles_for_each_capability(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pytest.importorskip('triton', minversion='3.6')
    from aft_vision.ops.common import targets

    def compile_kernels(name: str, types: tuple[torch.dtype, ...], capability: str, *shapes: object, choices: int):
        assert shapes
        assert choices == 2
        return targets.Compiled({name}, 1, 0, 'no ptxas' if capability == '12.0' else None)

    monkeypatch.setattr(targets, 'compile_kernels', compile_kernels)
    words = f'--compile 8.0 12.0 --choices 2 --operators full simple --json {tmp_path}/found.json'
    with pytest.raises(SystemExit) as stopped:
        verify_gpu.main(words.split())
    assert stopped.value.code == 1
    rows = json.loads((tmp_path / 'found.json').read_text())['rows']
    assert len(rows) == 2 * (5 + 3)
    assert {(row['check'], row['failure']) for row in rows} == {
        ('capability 8.0', None),
        ('capability 12.0', 'no ptxas'),
    }
