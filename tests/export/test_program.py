"""Programs of torch.export and ONNX files: equal to the model, at every size that they promise."""

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import photographs
from PIL import ExifTags, Image
from small_models import make
from torch import Tensor, nn

from aft_vision.export import (
    InputShape,
    choose_shape,
    describe_input,
    export_onnx,
    export_pt2,
    program,
    quantize_onnx,
)
from aft_vision.export.verify import Check, onnx_runner
from aft_vision.sizes import takes_any_size
from aft_vision.visualize import load_image

GUIDE = (Path(__file__).parents[2] / 'docs/guide/export.md').read_text()
SIZES = ((32, 32), (16, 56), (72, 64))


def images(batch: int, height: int, width: int) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(batch))


@torch.no_grad()
def assert_equal(model: nn.Module, run: Any, batch: int, size: tuple[int, int]) -> None:
    x = images(batch, *size)
    expected = model(x)
    assert run(x).shape == expected.shape
    assert ((run(x) - expected).abs().max() / expected.abs().max()).item() <= 1e-5


def opencv_runner(path: Path) -> Any:
    """Load an ONNX file as a function of images, in OpenCV 5: version 4 takes files of one size only."""
    cv2 = pytest.importorskip('cv2', minversion='5.0')
    net = cv2.dnn.readNetFromONNX(str(path))

    def run(x: Tensor) -> Tensor:
        net.setInput(x.numpy())
        return torch.from_numpy(net.forward())

    return run


@pytest.fixture(scope='module')
def run_onnx(onnx_file):
    return onnx_runner(onnx_file[0])


@pytest.mark.parametrize('size', SIZES, ids=str)
@pytest.mark.parametrize('batch', [1, 3])
def test_one_onnx_file_serves_every_size_and_batch(hybrid, run_onnx, batch, size):
    assert_equal(hybrid, run_onnx, batch, size)


def test_the_export_reports_three_sizes(onnx_file):
    checks = onnx_file[1]
    assert [(check.batch, check.size) for check in checks] == [(1, (32, 32)), (3, (16, 40)), (1, (56, 48))]
    assert all(check.difference <= 1e-5 for check in checks)
    assert [path.name for path in onnx_file[0].parent.iterdir()] == ['model.onnx']


def test_eq_8_and_the_exponentials_of_the_bias_are_folded(onnx_file):
    onnx = pytest.importorskip('onnx')
    graph = onnx.load(onnx_file[0]).graph
    constants = {x.name: x for x in graph.initializer}
    weights = [node.input[1] for node in graph.node if node.op_type == 'Conv']
    # Patches, and the taps of 8 heads, for 4 channels each and for the denominators.
    assert [list(constants[name].dims) for name in weights] == [[32, 3, 8, 8], [32, 1, 5, 5], [8, 1, 5, 5]]
    # Of the keys alone; and no standardisation, which would take a deviation.
    count = [node.op_type for node in graph.node].count
    assert (count('Exp'), count('Sqrt'), count('Pow')) == (1, 0, 0)
    # One product with its bias for each projection though no size is known, q, k, v, proj, fc1, fc2, head; in the block
    # with attention only fc1 and fc2, next to qkv, proj and two products of tokens.
    assert (count('Gemm'), count('MatMul'), count('Split')) == (7 + 2, 4, 0)
    assert count('LayerNormalization') == 2 * 2 + 1


def test_what_depends_on_constants_only_is_a_constant_of_the_onnx_file_however_large(tmp_path):
    onnx = pytest.importorskip('onnx')
    for package in ('onnxruntime', 'onnxscript'):
        pytest.importorskip(package)
    export_onnx(make(embed_dim=128, kernel_size=11), tmp_path / 'model.onnx')
    graph = onnx.load(tmp_path / 'model.onnx').graph
    constants = {x.name for x in graph.initializer}
    assert not [node.op_type for node in graph.node if constants.issuperset(x for x in node.input if x)]


def test_a_file_of_aft_simple_for_one_size_has_no_constants_of_tokens(tmp_path):
    onnx = pytest.importorskip('onnx')
    for package in ('onnxruntime', 'onnxscript'):
        pytest.importorskip(package)
    model = make('aft_simple_nano')
    export_onnx(model, tmp_path / 'model.onnx', choose_shape(model, (32, 48), fixed_size=True, batch=1))
    shapes = [list(x.dims) for x in onnx.load(tmp_path / 'model.onnx').graph.initializer]
    # The position embedding alone.
    assert [shape for shape in shapes if len(shape) == 3 and shape[1] >= 24] == [[1, 25, 32]]


def test_onnxruntime_does_not_merge_the_columns_beside_the_maps_into_the_convolution(onnx_file, tmp_path):
    onnx, onnxruntime = pytest.importorskip('onnx'), pytest.importorskip('onnxruntime')
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / 'optimized.onnx')
    onnxruntime.InferenceSession(str(onnx_file[0]), options, providers=['CPUExecutionProvider'])
    nodes = onnx.load(options.optimized_model_filepath).graph.node
    pads = [list(a.ints) for node in nodes if node.op_type == 'Conv' for a in node.attribute if a.name == 'pads']
    assert [x for x in pads if any(x)] == [[2, 0, 2, 0]] * 2


@pytest.mark.parametrize('size', SIZES, ids=str)
def test_openvino_computes_the_same_file_at_every_size(hybrid, onnx_file, size):
    pytest.importorskip('openvino')
    from tools.benchmark.models import openvino_runner

    assert_equal(hybrid, openvino_runner(onnx_file[0], 1), 3, size)


@pytest.mark.parametrize('size', SIZES, ids=str)
@pytest.mark.parametrize('batch', [1, 3])
def test_opencv_computes_the_same_file_at_every_size_and_batch(hybrid, onnx_file, batch, size):
    assert_equal(hybrid, opencv_runner(onnx_file[0]), batch, size)


def test_an_onnx_file_says_how_images_are_prepared(onnx_file):
    onnx = pytest.importorskip('onnx')
    found = {entry.key: json.loads(entry.value) for entry in onnx.load(onnx_file[0]).metadata_props}
    assert found['label_names'] == ['a', 'b', 'c', 'd', 'e']
    assert found['mean'] == [0.485, 0.456, 0.406]
    assert [found[name] for name in ('crop_pct', 'crop_mode', 'interpolation')] == [0.875, 'center', 'bicubic']
    assert found['input_size'] == [3, 32, 32]


def test_the_classes_of_imagenet_are_words_in_an_export():
    described = describe_input(timm.create_model('aft_conv_nano', pretrained=True), (64, 96))
    assert described['label_names'][:2] == ['tench', 'English springer']
    assert described['input_size'] == (3, 64, 96)
    assert describe_input(make(), (32, 32))['label_names'][1] == 'class 1'


@pytest.mark.parametrize('int8', [False, True])
def test_the_example_of_the_guide_reads_a_rotated_photograph_as_the_model_does(
    hybrid, onnx_file, tmp_path, monkeypatch, capsys, int8
):
    (example,) = (block for block in re.findall(r'```python\n(.*?)```', GUIDE, re.DOTALL) if 'exif_transpose' in block)
    monkeypatch.chdir(tmp_path)
    shutil.copy(onnx_file[0], 'model.onnx')
    if int8:
        quantize_onnx('model.onnx', 'dynamic')
    upright = photographs(1, (85, 121))[0]
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    upright.transpose(Image.Transpose.ROTATE_90).save('PHOTO.jpg', exif=exif)
    exec(example, namespace := {})
    images = load_image('PHOTO.jpg', hybrid)
    torch.testing.assert_close(torch.tensor(namespace['images']), images)
    if not int8:
        torch.testing.assert_close(torch.tensor(namespace['logits']), hybrid(images).detach())
    assert capsys.readouterr().out.strip() == 'abcde'[namespace['logits'].argmax()]


def test_the_matrix_form_has_no_convolution_but_the_patches():
    model = make()
    shape = choose_shape(model, (32, 48), fixed_size=True, lowering='matmul')
    traced = program.trace(program.fold(model, shape, 'matmul'), shape)
    assert [str(node.target) for node in traced.graph.nodes].count('aten.conv2d.default') == 1
    assert (8, 24, 24) in [tuple(x.shape) for x in traced.state_dict.values()]
    assert_equal(model, traced.module(), 3, (32, 48))


def test_no_weights_of_aft_axial_are_repeated_for_images_or_maps_which_opencv_does_wrongly():
    model = make('aft_axial_tiny')
    shape = choose_shape(model, (32, 48), fixed_size=True)
    traced = program.trace(program.fold(model, shape), shape)
    products = [node for node in traced.graph.nodes if str(node.target) == 'aten.matmul.default']
    shapes = [[tuple(x.meta['val'].shape) for x in node.args] for node in products]
    assert shapes
    assert all(left[:-2] == right[:-2] for left, right in shapes)


@torch.no_grad()
def test_aft_full_keeps_its_bias_as_a_constant_of_the_chosen_size():
    model = make('aft_full_tiny')
    shape = choose_shape(model, (32, 48))
    assert shape.fixed_size
    traced = program.trace(program.fold(model, shape), shape)
    assert (25, 25) in [tuple(x.shape) for x in traced.state_dict.values()]
    model.set_input_size((32, 48))
    assert_equal(model, traced.module(), 3, (32, 48))


def test_what_is_resampled_bicubically_is_a_constant_as_openvino_ignores_antialiasing(tmp_path):
    onnx = pytest.importorskip('onnx')
    pytest.importorskip('onnxruntime')
    model, path = make('aft_full_tiny', dynamic_img_size=True), tmp_path / 'model.onnx'
    export_onnx(model, path, choose_shape(model, (32, 48)))
    graph = onnx.load(path).graph
    assert [25, 25] in [list(x.dims) for x in graph.initializer]
    assert 'Resize' not in {node.op_type for node in graph.node}
    assert_equal(model, onnx_runner(path), 3, (32, 48))


# Those in aten operations of any size become ONNX files.
@pytest.fixture(scope='module')
def pt2_file(tmp_path_factory) -> tuple[Path, list[Check]]:
    model, path = make(), tmp_path_factory.mktemp('exported') / 'operators.pt2'
    return path, export_pt2(model, path, choose_shape(model, (24, 24)))


def libraries(program: torch.export.ExportedProgram) -> set[str]:
    return {str(node.target).partition('.')[0] for node in program.graph.nodes if node.op == 'call_function'}


def test_one_pt2_file_serves_every_size_and_batch(pt2_file):
    program = torch.export.load(pt2_file[0])
    assert 'aft_vision' in libraries(program)
    run = program.module()
    for batch, size in zip((1, 3, 2), SIZES, strict=True):
        assert_equal(make(), run, batch, size)


def test_a_pt2_file_of_any_size_is_verified_at_two_patch_rows_at_least(pt2_file):
    assert [check.size for check in pt2_file[1]] == [(24, 24), (16, 32), (56, 48)]


def test_a_program_of_fixed_size_takes_any_batch_and_has_no_alias_which_core_ml_does_not_know(tmp_path):
    model, path = make(depth=2, attention_blocks=[1], exportable=True), tmp_path / 'model.pt2'
    checks = export_pt2(model, path, choose_shape(model, fixed_size=True))
    assert [(check.batch, check.size) for check in checks] == [(1, (32, 32)), (3, (32, 32))]
    loaded = torch.export.load(path)
    assert_equal(model, loaded.module(), 4, (32, 32))
    operators = {str(node.target) for node in loaded.run_decompositions({}).graph.nodes}
    assert 'aten.conv2d.default' in operators
    assert 'aten.alias.default' not in operators


def test_a_fixed_batch_takes_no_other(tmp_path):
    model = make()
    export_pt2(model, tmp_path / 'model.pt2', InputShape((32, 32), True, 2))
    run = torch.export.load(tmp_path / 'model.pt2').module()
    assert_equal(model, run, 2, (32, 32))
    with pytest.raises(AssertionError, match=r'x\.size\(\)\[0\] == 2'):
        run(images(3, 32, 32))


@pytest.mark.parametrize('name', ['aft_conv_tiny', 'aft_full_tiny'])
def test_torch_writes_a_model_that_was_not_made_exportable_to_onnx_in_its_own_operators(name: str, tmp_path):
    for package in ('onnxruntime', 'onnxscript'):
        pytest.importorskip(package)
    model, path = make(name), tmp_path / 'model.onnx'
    torch.onnx.export(model, (images(2, 32, 32),), path, dynamo=True, verbose=False)
    assert_equal(model, onnx_runner(path), 2, (32, 32))


def test_a_model_is_left_as_it_was():
    model = make().train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    folded = program.fold(model, choose_shape(model))
    with torch.no_grad():
        for x in folded.state_dict().values():
            x.zero_()
    assert not folded.training
    assert model.training
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_a_file_that_differs_is_not_written(tmp_path):
    model = make()
    (tmp_path / 'model.pt2').write_bytes(b'the previous one')
    with pytest.raises(ValueError, match=r'within 0e\+00 of the largest one of PyTorch, got .* for \d images of'):
        export_pt2(model, tmp_path / 'model.pt2', InputShape((32, 32), True), aten=True, tolerance=0.0)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [('model.pt2', b'the previous one')]


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(program.importlib.util, 'find_spec', lambda name: None if name == 'onnxscript' else object())
    with pytest.raises(ImportError, match=r"ONNX needs onnxscript: pip install 'aft-vision\[export\]'"):
        export_onnx(make(), tmp_path / 'model.onnx')


@pytest.mark.parametrize(
    ('name', 'arguments', 'message'),
    [
        ('aft_conv_tiny', {'size': (30, 32)}, r'multiples of the patch size \(8, 8\), got \(30, 32\)'),
        ('aft_conv_tiny', {'lowering': 'matmul'}, 'expected a fixed size, got a dynamic one'),
        ('aft_conv_tiny', {'lowering': 'fft'}, "expected an AFT-conv for lowering='fft'"),
        ('aft_conv_tiny', {'batch': 0}, 'expected a batch of at least 1 image, got 0'),
        (
            'aft_full_tiny',
            {'lowering': 'matmul', 'fixed_size': True},
            "AFT-conv for lowering='matmul', got a AFTVisionTransformer",
        ),
    ],
)
def test_what_a_model_cannot_do_is_rejected(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        choose_shape(make(name), **arguments)


@pytest.mark.parametrize(
    ('name', 'size', 'smallest'),
    [('aft_conv_tiny', (32, 8), r'\(16, 16\)'), ('aft_pyramid_nano', (40, 32), r'\(33, 33\)')],
)
def test_a_program_of_any_size_from_a_grid_of_one_token_a_side_is_rejected(tmp_path, name, size, smallest):
    model = make() if name == 'aft_conv_tiny' else timm.create_model(name)
    with pytest.raises(ValueError, match=f'at least {smallest} pixels for a .pt2 of any size, got'):
        export_pt2(model, tmp_path / 'model.pt2', choose_shape(model, size))


# In the newest operator set.
def test_an_onnx_file_of_resampled_biases_takes_any_size_and_one_row_or_column_of_patches(tmp_path):
    onnx = pytest.importorskip('onnx')
    pytest.importorskip('onnxruntime')
    pytest.importorskip('onnxscript')
    model, path = make('aft_axial_tiny', resample_bias=True, local_conv=True), tmp_path / 'model.onnx'
    export_onnx(model, path, opset=25)
    run = onnx_runner(path)
    for size in (*SIZES, (8, 48), (32, 8), (8, 8)):
        assert_equal(model, run, 2, size)
    opsets = {each.domain: each.version for each in onnx.load(path).opset_import}
    assert opsets[''] == 25


def test_a_padding_model_of_half_precision_is_exported_in_single_at_its_size_or_for_all_of_whole_patches(tmp_path):
    model = make(dynamic_img_pad=True).bfloat16()
    shape = choose_shape(model, (30, 41), fixed_size=True)
    export_pt2(model, tmp_path / 'model.pt2', shape, aten=True)
    loaded = torch.export.load(tmp_path / 'model.pt2')
    assert 'aft_vision' not in libraries(loaded)
    assert_equal(model.float(), loaded.module(), 2, (30, 41))
    with pytest.raises(ValueError, match=r'multiples of the patch size .*, got \(30, 41\)'):
        choose_shape(model, (30, 41))


def test_aft_simple_without_positions_still_has_a_fixed_size():
    assert takes_any_size(make())
    assert not takes_any_size(make('aft_simple_tiny', pos_embed='none'))


def test_a_form_of_the_custom_operator_is_rejected(tmp_path):
    model = make()
    with pytest.raises(ValueError, match="lowering='matmul' is made of aten operations: expected aten=True"):
        export_pt2(model, tmp_path / 'model.pt2', InputShape((32, 32), True), lowering='matmul')


def test_more_weights_than_a_file_holds_are_rejected(tmp_path, monkeypatch):
    pytest.importorskip('onnxruntime')
    monkeypatch.setattr(program, 'MAX_ONNX_BYTES', 2**10)
    with pytest.raises(ValueError, match='expected weights of at most 0 MiB, got 0 MiB'):
        export_onnx(make(), tmp_path / 'model.onnx')


@pytest.mark.parametrize('opset', [17, 26])
def test_an_operator_set_that_torch_replaces_by_another_is_rejected(opset, tmp_path):
    pytest.importorskip('onnxruntime')
    pytest.importorskip('onnxscript')
    with pytest.raises(ValueError, match=f'got opset={opset}, for which it writes'):
        export_onnx(make(), tmp_path / 'model.onnx', opset=opset)
    assert not any(tmp_path.iterdir())


def test_an_onnx_file_names_its_axes(onnx_file):
    onnx = pytest.importorskip('onnx')
    graph = onnx.load(onnx_file[0]).graph
    axes = [[x.dim_param or x.dim_value for x in y.type.tensor_type.shape.dim] for y in (*graph.input, *graph.output)]
    assert axes == [['batch', 3, 'height', 'width'], ['batch', 5]]
    assert graph.input[0].name == 'images'


def test_an_onnx_file_has_no_other_names_of_its_axes_with_which_tract_would_compare_sizes(onnx_file):
    onnx = pytest.importorskip('onnx')
    shapes = [value.type.tensor_type.shape.dim for value in onnx.load(onnx_file[0]).graph.value_info]
    assert shapes
    assert all(axis.HasField('dim_value') for shape in shapes for axis in shape)


def test_a_vit_of_one_size_takes_others_from_the_older_exporter_of_torch(tmp_path):
    onnxruntime = pytest.importorskip('onnxruntime')
    model = timm.create_model('vit_tiny_patch16_224', depth=1, embed_dim=12, img_size=64, num_classes=5).eval()
    path, axes = tmp_path / 'model.onnx', {'images': {2: 'height', 3: 'width'}}
    torch.onnx.export(model, (images(1, 64, 64),), path, dynamo=False, input_names=['images'], dynamic_axes=axes)
    session = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])
    # As many patches; the rows of the position embedding are those of another size.
    assert session.run(None, {'images': images(1, 32, 128).numpy()})[0].shape == (1, 5)
    with pytest.raises(AssertionError, match="doesn't match model"):
        model(images(1, 32, 128))


@pytest.mark.parametrize('size', [(70, 64), (64, 70), (33, 32), (7, 32)], ids=str)
def test_an_onnx_file_refuses_sizes_that_are_no_multiples_of_the_patch(run_onnx, size):
    with pytest.raises(Exception, match='height_and_width_must_be_multiples_of_8_and_8'):
        run_onnx(images(2, *size))


def local_paths() -> list[bytes]:
    """Return the folders of this machine: of the sources, the installed packages, the interpreter."""
    folders = [Path(program.__file__).parents[2], Path(torch.__file__).parents[1], sys.prefix, sys.base_prefix]
    return [str(folder).encode() for folder in folders]


def test_a_pt2_file_holds_no_paths_of_this_machine(pt2_file):
    path, _ = pt2_file
    with zipfile.ZipFile(path) as file:
        entries = {entry: file.read(entry) for entry in file.namelist()}
    assert {entry.split('/')[0] for entry in entries} == {'operators'}
    assert not [(entry, own) for entry, content in entries.items() for own in local_paths() if own in content]
    assert str(path.parent).encode() not in b''.join(entries.values())


def test_an_onnx_file_holds_no_paths_of_this_machine(onnx_file):
    content = onnx_file[0].read_bytes()
    assert not [path for path in local_paths() if path in content]
