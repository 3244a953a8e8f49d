"""int8 forms of ONNX files: the projections alone, near the float32 file, at every size."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from aft_vision.export import INT8_MODES, quantize_onnx
from aft_vision.export.verify import onnx_runner
from tools import export as tool

SIZES = ((32, 32), (16, 56))


def photographs(count: int, *size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(1, 3, *size, generator=generator) for _ in range(count)]


@pytest.fixture
def exact(onnx_file: tuple[Path, object]) -> Path:
    """A file in float32 of a block with AFT-conv and a block with attention."""
    return onnx_file[0]


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
