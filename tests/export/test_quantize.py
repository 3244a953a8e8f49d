"""int8 forms of ONNX files: the projections alone, near the float32 file, at every size."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from aft_vision.export import INT8_MODES, export_onnx, quantize_onnx
from aft_vision.export.verify import onnx_runner
from tools import export as tool

SMALL = dict(depth=2, embed_dim=32, patch_size=8, img_size=32, num_classes=5, num_heads=8, kernel_size=5)
SIZES = ((32, 32), (16, 56))


def photographs(count: int, *size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(1, 3, *size, generator=generator) for _ in range(count)]


@pytest.fixture(scope='module')
def exact(tmp_path_factory) -> Path:
    """A file in float32 of a block with AFT-conv and a block with attention."""
    for package in ('onnx', 'onnxruntime', 'onnxscript'):
        pytest.importorskip(package)
    torch.manual_seed(0)
    model = timm.create_model('aft_conv_tiny', **SMALL, attention_blocks=[1]).eval()
    model.pretrained_cfg['input_size'] = (3, 32, 32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    path = tmp_path_factory.mktemp('float32') / 'model.onnx'
    export_onnx(model, path)
    return path


@pytest.mark.parametrize('mode', INT8_MODES)
def test_the_int8_file_is_near_the_float32_file_at_every_size(exact, tmp_path, mode):
    path = Path(shutil.copy(exact, tmp_path))
    share = quantize_onnx(path, mode, photographs(24, 32, 32))
    assert share is not None
    assert 0.8 <= share <= 1.0
    assert [x.name for x in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_size < exact.stat().st_size
    expected, run = onnx_runner(exact, 1), onnx_runner(path, 1)
    for size in SIZES:
        (images,) = photographs(1, *size)
        difference = (run(images) - expected(images)).norm() / expected(images).norm()
        assert 0 < difference < 0.1


def test_only_the_projections_become_int8(exact, tmp_path):
    import onnx

    path = Path(shutil.copy(exact, tmp_path))
    assert quantize_onnx(path, 'dynamic') is None
    before, after = (Counter(node.op_type for node in onnx.load(file).graph.node) for file in (exact, path))
    # q, k, v, proj, fc1 and fc2 of AFT-conv; qkv, proj, fc1 and fc2 of attention; the head.
    assert after['MatMulInteger'] == 6 + 4 + 1
    # Both products of attention.
    assert after['MatMul'] == 2
    kept = ('Conv', 'Exp', 'Softmax', 'LayerNormalization', 'Gelu')
    assert [after[kind] for kind in kept] == [before[kind] for kind in kept]


@pytest.mark.parametrize('mode', INT8_MODES)
def test_two_products_of_the_largest_numbers_fit_into_16_bits(exact, tmp_path, mode):
    import onnx

    path = Path(shutil.copy(exact, tmp_path))
    quantize_onnx(path, mode, photographs(2, 32, 32))
    constants = [onnx.numpy_helper.to_array(x) for x in onnx.load(path).graph.initializer]
    weights = [x for x in constants if x.dtype == np.int8 and x.ndim == 2]
    assert len(weights) == 6 + 4 + 1
    # Processors without VNNI add two products of a uint8 and a weight in an int16.
    largest = max(int(abs(x.astype(int)).max()) for x in weights)
    assert 2 * 255 * largest <= np.iinfo(np.int16).max


def test_a_mode_without_what_it_needs_is_rejected(exact, tmp_path):
    path = Path(shutil.copy(exact, tmp_path))
    with pytest.raises(ValueError, match="mode must be one of dynamic, static, got 'int4'"):
        quantize_onnx(path, 'int4')
    with pytest.raises(ValueError, match="mode='static' needs 2 images or more, to calibrate and to compare, got 1"):
        quantize_onnx(path, 'static', photographs(1, 32, 32))
    assert path.read_bytes() == exact.read_bytes()


def test_the_tool_knows_the_modes():
    assert tool.INT8_MODES == INT8_MODES
