"""int8 forms of ONNX files: the projections alone, near the float32 file, at every size."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
import timm
import torch

from aft_vision.export import INT8_MODES, export_onnx, quantize_onnx
from aft_vision.export.verify import onnx_runner
from tools import export as tool

SMALL = dict(depth=1, embed_dim=32, patch_size=8, img_size=32, num_classes=5, num_heads=8)
SIZES = ((32, 32), (16, 56))


def photographs(count: int, *size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(1, 3, *size, generator=generator) for _ in range(count)]


@pytest.fixture(scope='module')
def files(tmp_path_factory) -> dict[str, Path]:
    for package in ('onnx', 'onnxruntime', 'onnxscript'):
        pytest.importorskip(package)
    folder, paths = tmp_path_factory.mktemp('float32'), {}
    for name, more in (('aft_conv_tiny', {'kernel_size': 5}), ('deit_tiny_patch16_224', {})):
        torch.manual_seed(0)
        model = timm.create_model(name, **SMALL, **more).eval()
        model.pretrained_cfg['input_size'] = (3, 32, 32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        paths[name] = folder / f'{name}.onnx'
        export_onnx(model, paths[name])
    return paths


@pytest.mark.parametrize('mode', INT8_MODES)
def test_the_int8_file_is_near_the_float32_file_at_every_size(files, tmp_path, mode):
    path = Path(shutil.copy(files['aft_conv_tiny'], tmp_path))
    share = quantize_onnx(path, mode, photographs(24, 32, 32))
    assert share is not None
    assert 0.8 <= share <= 1.0
    assert [x.name for x in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_size < files['aft_conv_tiny'].stat().st_size
    exact, run = onnx_runner(files['aft_conv_tiny'], 1), onnx_runner(path, 1)
    for size in SIZES:
        (images,) = photographs(1, *size)
        difference = (run(images) - exact(images)).norm() / exact(images).norm()
        assert 0 < difference < 0.1


def test_only_the_projections_become_int8(files, tmp_path):
    import onnx

    for name, products in (('aft_conv_tiny', 7), ('deit_tiny_patch16_224', 5)):
        path = Path(shutil.copy(files[name], tmp_path))
        assert quantize_onnx(path, 'dynamic') is None
        before, after = (Counter(node.op_type for node in onnx.load(file).graph.node) for file in (files[name], path))
        assert after['MatMulInteger'] == products
        # Both products of attention.
        assert after['MatMul'] == (2 if 'deit' in name else 0)
        kept = ('Conv', 'Exp', 'Softmax', 'LayerNormalization', 'Gelu')
        assert [after[kind] for kind in kept] == [before[kind] for kind in kept]


def test_a_mode_without_what_it_needs_is_rejected(files, tmp_path):
    path = Path(shutil.copy(files['aft_conv_tiny'], tmp_path))
    with pytest.raises(ValueError, match="mode must be one of dynamic, static, got 'int4'"):
        quantize_onnx(path, 'int4')
    with pytest.raises(ValueError, match="mode='static' needs 2 images or more, to calibrate and to compare, got 1"):
        quantize_onnx(path, 'static', photographs(1, 32, 32))
    assert path.read_bytes() == files['aft_conv_tiny'].read_bytes()


def test_the_tool_knows_the_modes():
    assert tool.INT8_MODES == INT8_MODES
