"""What Triton kernels take of a GPU that is not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.kernel_resources import OPERATIONS, format_rows, main


@pytest.mark.parametrize('name', OPERATIONS)
def test_an_operation_launches_kernels_of_its_forward_and_its_backward(name: str, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip('triton')
    if not torch.cuda.is_available():
        # Kernels are what they are when they are imported, and other tests interpret them.
        monkeypatch.setenv('TRITON_INTERPRET', '1')
    from aft_vision.ops.kernels.gpu.resources import recording

    operation = OPERATIONS[name]
    with recording() as found:
        operation.launch(operation.draw(torch.bfloat16, 1))
    kernels = [each.kernel.fn.__name__ if hasattr(each.kernel, 'keys') else each.kernel.__name__ for each in found]
    assert 'forward_kernel' in kernels
    assert len({each for each in kernels if each != 'forward_kernel'}) >= 1
    # Nobody else's launches are taken.
    count = len(found)
    with recording():
        operation.launch(operation.draw(torch.bfloat16, 1))
    assert len(found) == count


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
