"""Compiling kernels for GPUs that are not here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# In a process without the interpreter: the kernels of this one may be for it. Of each kernel of a forward, bytes of
# shared memory, and whether it multiplies on the tensor cores of that GPU.
FORWARDS = """
import json, torch
from compile_kernels import targeting
from kernel_checks import draw_inputs, find_operation, run_each
from aft_vision.ops.declaration import Shape
found = []
for name, shape in (('full', Shape(8, (1, 197), 384, 1, 1)), ('conv', Shape(8, (32, 32), 384, 24, 3))):
    operation, form = find_operation(name)
    inputs = draw_inputs(operation, shape, (torch.bfloat16,), 'cpu')
    with targeting('9.0') as (compiled, refused):
        list(run_each(lambda: form.forward(inputs, False), 1))
    found.append([(x.name, x.metadata.shared, 'wgmma.mma_async' in x.asm['ptx']) for x in compiled.values()])
    assert not refused
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_forward_is_one_kernel_whose_weights_fit_shared_memory(tmp_path: Path):
    pytest.importorskip('triton', minversion='3.6')
    tests = Path(__file__).parent
    paths = {'PATH': '/usr/bin:/bin', 'PYTHONPATH': f'{tests.parent}:{tests}', 'TRITON_CACHE_DIR': str(tmp_path)}
    done = subprocess.run([sys.executable, '-c', FORWARDS], env=paths, check=True, capture_output=True, text=True)
    full, conv = json.loads(done.stdout)
    # 200 x 208 weights of 2 bytes, and two programs on a multiprocessor of 228 KiB, each with 1 KiB of its own.
    [(name, shared, on_tensor_cores)] = full
    assert name == 'stationary_kernel'
    assert 2 * 200 * 208 < shared <= 113 * 1024
    assert on_tensor_cores
    [(name, shared, on_tensor_cores)] = conv
    assert name == 'lines_kernel'
    assert shared <= 227 * 1024
    assert on_tensor_cores
