"""Compiling kernels for GPUs that are not here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# In a process without the interpreter: the kernels of this one may be for it. The second GPU has no shared memory.
SCRIPT = """
import json, torch
import compile_kernels
from aft_vision.ops.declaration import Shape
compile_kernels.SHARED_MEMORY['8.0'] = 0
shape = Shape(2, (3, 7), 16, 1, 1)
found = [compile_kernels.compile_kernels('simple', (torch.float16,), x, shape, choices=1) for x in ('12.0', '8.0')]
print(json.dumps([[sorted(x.kernels), *x[1:]] for x in found]))
"""


def test_kernels_are_compiled_and_one_that_does_not_fit_fails(tmp_path: Path):
    pytest.importorskip('triton', minversion='3.6')
    tests = Path(__file__).parent
    environment = {
        'PATH': '/usr/bin:/bin',
        'PYTHONPATH': f'{tests.parent}:{tests}',
        'TRITON_CACHE_DIR': str(tmp_path),
    }
    command = [sys.executable, '-c', SCRIPT]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    fits, too_large = json.loads(done.stdout)
    assert fits == [['backward_kernel', 'forward_kernel'], 2, 0, None]
    assert too_large[:3] == [['forward_kernel'], 1, 1]
    assert 'out of resource: shared memory' in too_large[3]
