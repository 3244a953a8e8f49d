"""Latency in onnxruntime: what is timed, and against what."""

from pathlib import Path

import pytest
import timm
import torch

from aft_vision import timing
from aft_vision.export import Shape, latency, measure_latency, time_files
from aft_vision.export.verify import onnx_runner

KWARGS = dict(depth=1, patch_size=16, img_size=32, num_classes=3)


def write_products(path: Path, count: int) -> None:
    """An ONNX file that multiplies each 256 x 256 matrix with itself, some times."""
    onnx = pytest.importorskip('onnx')
    nodes = [onnx.helper.make_node('MatMul', [f'x{i}', f'x{i}'], [f'x{i + 1}']) for i in range(count)]
    ends = [onnx.helper.make_tensor_value_info(f'x{i}', 1, (1, 3, 256, 256)) for i in (0, count)]
    graph = onnx.helper.make_graph(nodes, 'products', ends[:1], ends[1:])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid('', 18)], ir_version=10), path)


def test_files_are_compared_with_the_first_by_the_time_that_each_takes(tmp_path, monkeypatch):
    pytest.importorskip('onnxruntime')
    files, counts, now = {}, {'first': 2, 'again': 2, 'larger': 20}, 0.0
    for name, count in counts.items():
        files[name] = tmp_path / f'{name}.onnx'
        write_products(files[name], count)

    def load(path, threads):
        run = onnx_runner(path, threads)

        def call(images):
            # A product takes a second, whatever else the machine does.
            nonlocal now
            now += counts[path.stem]
            return run(images)

        return call

    monkeypatch.setattr(latency, 'onnx_runner', load)
    monkeypatch.setattr(timing.time, 'perf_counter', lambda: now)
    rows = time_files(files, torch.zeros(1, 3, 256, 256), rounds=5)
    assert [(row['name'], row['milliseconds'], row['ratio'], row['ratio_range']) for row in rows] == [
        ('first', 2000, 1.0, [1.0, 1.0]),
        ('again', 2000, 1.0, [1.0, 1.0]),
        ('larger', 20000, 0.1, [0.1, 0.1]),
    ]


def test_an_aft_conv_is_timed_against_deit_and_its_other_forms(tmp_path, monkeypatch):
    pytest.importorskip('onnxruntime')
    written = []

    def export_onnx(model, path, shape, **kwargs):
        written.append((type(model).__name__, shape, kwargs['form']))
        write_products(path, 1)

    monkeypatch.setattr(latency, 'export_onnx', export_onnx)
    monkeypatch.setattr(latency, 'SECONDS_PER_TURN', 0.001)
    write_products(tmp_path / 'model.onnx', 1)
    model = timm.create_model('aft_conv_tiny_k11_h32', **KWARGS)
    rows = measure_latency(model, tmp_path / 'model.onnx', tmp_path, Shape((256, 256), fixed_size=False), rounds=2)
    assert [row['name'] for row in rows] == ['deit_tiny', 'conv, any size', 'conv, one size', 'matmul, one size']
    fixed = Shape((256, 256), fixed_size=True)
    deit, aft = 'VisionTransformer', 'AFTVisionTransformer'
    assert written == [(deit, fixed, 'conv'), (aft, fixed, 'conv'), (aft, fixed, 'matmul')]


def test_a_model_that_has_no_peer_is_an_error():
    with pytest.raises(ValueError, match='the patches and blocks of a DeiT, got a AFTPyramid'):
        latency.find_peer(timm.create_model('aft_pyramid_nano', dims=(8, 8, 16, 192), depths=(1, 1, 1, 1)))


def test_the_images_have_the_channels_of_the_model(tmp_path, monkeypatch):
    model, seen = timm.create_model('aft_conv_tiny_k11_h32', **KWARGS, in_chans=1), []
    monkeypatch.setattr(latency, 'write_peers', lambda *args: {'deit_tiny': tmp_path})
    monkeypatch.setattr(latency, 'time_files', lambda files, images, *args: seen.append(images.shape))
    measure_latency(model, tmp_path, tmp_path, Shape((32, 48), fixed_size=True))
    assert seen == [(1, 1, 32, 48)]


def test_too_large_matrices_and_the_own_form_are_left_out(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(latency, 'export_onnx', lambda model, path, shape, **kwargs: written.append(kwargs['form']))
    model = timm.create_model('aft_conv_tiny_k11_h32', **KWARGS)
    shape = Shape((32, 48), fixed_size=True)
    assert list(latency.write_peers(model, tmp_path, shape, 18, form='matmul')) == ['deit_tiny', 'conv, one size']
    monkeypatch.setattr(latency, 'MOST_MATRICES', 32 * 6**2 * 4 - 1)
    assert list(latency.write_peers(model, tmp_path, shape, 18)) == ['deit_tiny', 'conv, one size']
    assert written == ['conv'] * 4


def test_a_model_without_a_peer_is_rejected(tmp_path):
    model = timm.create_model('aft_conv_tiny', **KWARGS, embed_dim=32, num_heads=4)
    with pytest.raises(ValueError, match='expected a model as wide as a DeiT, one of 192, 384, 768, got 32'):
        latency.write_peers(model, tmp_path, Shape((32, 32), True), 18)


def test_no_round_is_rejected(tmp_path):
    pytest.importorskip('onnxruntime')
    write_products(tmp_path / 'one.onnx', 1)
    with pytest.raises(ValueError, match='got 1 calls, 0 rounds'):
        time_files({'one': tmp_path / 'one.onnx'}, torch.zeros(1), rounds=0)
