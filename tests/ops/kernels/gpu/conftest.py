"""Fixtures of the tests of the Triton kernels."""

import pytest
import torch
from helpers import interpret_triton

from aft_vision.ops.common import launch


@pytest.fixture
def triton_device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where Triton kernels run during a test: on a CUDA device, else on the CPU in Triton's interpreter."""
    pytest.importorskip('triton')
    if torch.cuda.is_available():
        if torch.cuda.get_device_capability() < launch.CAPABILITY:
            pytest.skip(f'Triton needs a GPU of capability {launch.CAPABILITY}')
        return 'cuda'
    interpret_triton(monkeypatch)
    return 'cpu'
