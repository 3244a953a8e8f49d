"""Fixtures of the tests of the operations: the compiled kernels, and a device for Triton."""

import shutil

import pytest
import torch
from helpers import interpret_triton

from aft_vision.ops.common import build, cpp, launch


@pytest.fixture
def compiled() -> None:
    """Build the C++ kernels; skip the test if there is no compiler."""
    if shutil.which(build.chosen_compiler()[0]) is None:
        pytest.skip('there is no compiler here')
    assert cpp.library() is not None


@pytest.fixture
def triton_device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the device of the Triton kernels: CUDA, or the CPU in Triton's interpreter."""
    pytest.importorskip('triton', minversion='3.6')
    if torch.cuda.is_available():
        if torch.cuda.get_device_capability() < launch.CAPABILITY:
            pytest.skip(f'Triton needs a GPU of capability {launch.CAPABILITY}')
        return 'cuda'
    interpret_triton(monkeypatch)
    return 'cpu'


@pytest.fixture(params=['stationary', 'streamed'])
def longer(request: pytest.FixtureRequest, triton_device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the device of kernels of sequences in several pieces, which keep weights in shared memory, or terms."""
    from aft_vision.ops.conv import triton as conv
    from aft_vision.ops.full import triton as full

    monkeypatch.setattr(launch, 'WHOLE_INTERPRETED', 64)
    if request.param == 'streamed':
        for kernels in (conv, full):
            monkeypatch.setattr(kernels, 'keeps_weights', lambda: False)
    return triton_device


@pytest.fixture
def keeper(triton_device: str) -> torch.device:
    """Return the device of the Triton kernels; skip the test if its programs cannot keep the weights of a sequence."""
    if not launch.keeps_weights():
        pytest.skip('this GPU has too little shared memory')
    return torch.device(triton_device)
