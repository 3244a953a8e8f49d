"""An ONNX file that the tests of exported programs and of quantized ones read."""

from pathlib import Path

import pytest
from small_models import make
from torch import nn

from aft_vision.export import export_onnx
from aft_vision.export.verify import Check


@pytest.fixture(scope='session')
def hybrid() -> nn.Module:
    """A block with AFT-conv and a block with attention."""
    model = make(depth=2, attention_blocks=[1])
    model.pretrained_cfg['label_names'] = ['a', 'b', 'c', 'd', 'e']
    return model


@pytest.fixture(scope='session')
def onnx_file(hybrid: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Check]]:
    """The hybrid as an ONNX file, and its comparisons."""
    for package in ('onnx', 'onnxruntime', 'onnxscript'):
        pytest.importorskip(package)
    path = tmp_path_factory.mktemp('onnx') / 'model.onnx'
    return path, export_onnx(hybrid, path)
