"""Inputs of timmx, and the error where it is missing."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch

from aft_vision.export import TIMMX_FORMATS, export_with_timmx

KWARGS = dict(depth=1, embed_dim=16, num_heads=4, kernel_size=3, patch_size=8, img_size=32, num_classes=3)


def test_timmx_gets_a_folder_that_gives_the_model_back(tmp_path, monkeypatch):
    model = timm.create_model('aft_conv_tiny', **KWARGS).eval()
    x = torch.randn(1, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    seen = []

    def export_model(backend, name, /, *, output, pretrained, input_size, dynamic_batch):
        # What timmx itself does with the name.
        built = timm.utils.reparameterize_model(timm.create_model(name, pretrained=pretrained, exportable=True).eval())
        torch.testing.assert_close(built(x), model(x))
        seen.append((backend, output, input_size, dynamic_batch))
        return Path(output)

    monkeypatch.setitem(sys.modules, 'timmx', SimpleNamespace(export_model=export_model))
    path = export_with_timmx(model, tmp_path / 'model.xml', 'openvino', (32, 48), dynamic_batch=True)
    assert path == tmp_path / 'model.xml'
    assert seen == [('openvino', str(path), (3, 32, 48), True)]


def test_a_resized_model_goes_to_timmx_at_its_new_size(tmp_path, monkeypatch):
    kwargs = dict(depth=1, embed_dim=16, patch_size=8, img_size=32, num_classes=3)
    model = timm.create_model('aft_full_tiny', **kwargs).eval()
    seen = []

    def export_model(backend, name, /, *, output, pretrained, input_size):
        built = timm.create_model(name, pretrained=pretrained, exportable=True).eval()
        seen.append((built(torch.zeros(1, *input_size)).shape, built.patch_embed.grid_size))
        return Path(output)

    monkeypatch.setitem(sys.modules, 'timmx', SimpleNamespace(export_model=export_model))
    export_with_timmx(model, tmp_path / 'model.xml', 'openvino', (32, 48))
    assert seen == [((1, 3), (4, 6))]
    assert model.patch_embed.grid_size == (4, 4)


def test_without_timmx_the_error_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'timmx', None)
    model = timm.create_model('aft_conv_tiny', **KWARGS)
    with pytest.raises(ImportError, match=r"coreml is written by timmx: pip install 'timmx\[coreml\]'"):
        export_with_timmx(model, tmp_path / 'model.mlpackage', 'coreml')


def test_an_unknown_format_lists_those_there_are(tmp_path):
    model = timm.create_model('aft_conv_tiny', **KWARGS)
    with pytest.raises(ValueError, match=r"format must be one of coreai, coreml, .*, torchscript, got 'tflite'"):
        export_with_timmx(model, tmp_path / 'model', 'tflite')


def test_the_formats_are_those_of_timmx():
    timmx = pytest.importorskip('timmx')
    assert {*TIMMX_FORMATS, 'onnx', 'torch-export'} == set(timmx.backends())


def test_the_command_line_offers_every_format():
    from tools.export import TIMMX_FORMATS as offered

    assert offered == TIMMX_FORMATS
