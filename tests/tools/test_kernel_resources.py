"""What Triton kernels take of a GPU that is not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.kernel_resources import OPERATIONS, format_rows, main, measure_operation, parse_args

# What each launches in its forward and in its backward; a kernel and its repair have one name.
LOCAL_CAUSAL = (
    'summary scan forward forward',
    'summary scan rows reverse sources sources band band',
)
KERNELS = {
    'aft_full': ('forward', 'column backward bias'),
    'aft_conv': ('forward forward', 'rows sources sources table table'),
    'aft_local_causal_256': LOCAL_CAUSAL,
    'aft_local_causal_32': LOCAL_CAUSAL,
    'aft_simple': ('forward', 'backward'),
    'aft_simple_causal': ('summary scan forward', 'group gradient_summary scan backward'),
    'aft_onehot': ('forward', 'backward'),
}


@pytest.fixture
def launchable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton, with its interpreter where there is no device."""
    pytest.importorskip('triton')
    if not torch.cuda.is_available():
        # Kernels are what they are when they are imported, and other tests interpret them.
        monkeypatch.setenv('TRITON_INTERPRET', '1')


@pytest.mark.usefixtures('launchable')
@pytest.mark.parametrize('name', OPERATIONS)
def test_an_operation_launches_the_kernels_of_its_forward_and_its_backward(name: str):
    from aft_vision.ops.common.resources import recording

    operation = OPERATIONS[name]
    with recording() as found:
        operation.launch(operation.draw(torch.bfloat16, 1))
    kernels = [each.kernel.fn.__name__ if hasattr(each.kernel, 'keys') else each.kernel.__name__ for each in found]
    assert kernels == [f'{each}_kernel' for each in ' '.join(KERNELS[name]).split()]


@pytest.mark.usefixtures('launchable')
def test_kernels_are_launched_again_once_nothing_is_recorded():
    from triton.runtime.jit import KernelInterface

    from aft_vision.ops.common.resources import recording

    launch = KernelInterface.__getitem__
    with recording():
        assert KernelInterface.__getitem__ is not launch
    assert KernelInterface.__getitem__ is launch
    with pytest.raises(ValueError, match='a bug'), recording():
        raise ValueError('a bug')
    assert KernelInterface.__getitem__ is launch


@pytest.mark.usefixtures('launchable')
def test_launches_of_one_kernel_have_a_row_for_each_code(monkeypatch: pytest.MonkeyPatch):
    from aft_vision.ops.common import resources

    codes = iter('abab')

    def measure(launch: resources.Launch, capability: tuple[int, int]) -> list[resources.Resources]:
        return [resources.Resources('a.kernel', {'BT': 16}, 4, registers, 0, 0, next(codes)) for registers in (30, 40)]

    monkeypatch.setattr(resources, 'measure_resources', measure)
    rows = measure_operation('aft_simple', torch.float32, (9, 0), 1)
    row = {'operation': 'aft_simple', 'kernel': 'a.kernel', 'tiles': {'BT': 16}, 'warps': 4, 'spilled': 0, 'shared': 0}
    assert rows == [row | {'registers': 30}, row | {'registers': 40}]


def test_without_triton_that_is_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, 'triton', None)
    monkeypatch.delitem(sys.modules, 'aft_vision.ops.common.resources', raising=False)
    with pytest.raises(ImportError, match=r'expected Triton.*pip install triton'):
        main(['--operations', 'aft_simple'])


def test_kernels_are_compiled_without_a_device(tmp_path: Path):
    triton = pytest.importorskip('triton')
    if not (Path(triton.__file__).parent / 'backends/nvidia/bin/ptxas').exists():
        pytest.skip('this Triton comes without ptxas')
    # A process of its own: kernels that another test has run in the interpreter cannot be compiled.
    environment = {name: value for name, value in os.environ.items() if name != 'TRITON_INTERPRET'}
    run = subprocess.run(
        [
            sys.executable,
            '-m',
            'tools.kernel_resources',
            '--operations',
            'aft_simple',
            '--json',
            str(tmp_path / 'json'),
        ],
        env=environment | {'TRITON_CACHE_DIR': str(tmp_path / 'cache')},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / 'json').read_text())
    assert {row['kernel'] for row in rows} == {'simple.forward_kernel', 'simple.backward_kernel'}
    # Each size of tiles of each.
    assert len({(row['kernel'], str(row['tiles']), row['warps']) for row in rows}) == len(rows) >= 4
    for row in rows:
        assert 16 <= row['registers'] <= 255
        assert row['spilled'] >= 0
        assert 0 < row['shared'] <= 227 * 1024
    assert 'simple.backward_kernel' in run.stdout


def test_a_line_has_the_range_over_the_sizes():
    row = {'kernel': 'full.forward_kernel', 'tiles': {'BT': 64}, 'warps': 8, 'spilled': 0, 'shared': 45000}
    rows = [row | {'registers': 147}, row | {'registers': 189, 'tiles': {'BT': 128}, 'spilled': 20}]
    head, line = format_rows('aft_full', rows).splitlines()
    assert head.split() == ['aft_full', 'registers', 'spilled', 'KiB']
    assert line.split() == ['full.forward_kernel', *'147 to 189 0 to 20 44'.split()]
    assert format_rows('aft_full', rows, each=True).splitlines()[2].split() == [*'BT 64, 8 warps 147 0 44'.split()]


def test_a_capability_is_a_version(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        main(['--capability', 'sm90'])
    assert "expected a compute capability like 9.0, got 'sm90'" in capsys.readouterr().err


@pytest.mark.parametrize('size', ['0', '-1', 'two'])
def test_a_batch_has_a_sequence(size: str, capsys: pytest.CaptureFixture):
    assert parse_args(['--batch-size', '3']).batch_size == 3
    with pytest.raises(SystemExit):
        parse_args([f'--batch-size={size}'])
    assert f"expected a batch size from 1, got '{size}'" in capsys.readouterr().err
