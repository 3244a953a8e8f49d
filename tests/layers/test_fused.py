"""The layers of fused models: the values of torch's, and where they compute otherwise than torch."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from helpers import assert_close, randn, torch_version
from timm.utils import reparameterize_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

from aft_vision.layers.fused import FusedLinear, FusibleConvNormAct, fuse_linear
from aft_vision.models.aft_pyramid import FusibleEdgeResidual
from aft_vision.models.attention_block import AttentionBlock
from aft_vision.ops import linear
from aft_vision.ops.linear import multiply_onednn

# docs/guide/install.md: the layers that older ones compile multiply by torch's product.
compiles_fused_layers = pytest.mark.skipif(torch_version() < (2, 14), reason='needs torch 2.14')
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason='this torch has no oneDNN')
ROWS, WIDTH = 200, 160
# The layer chooses as it is traced; tests/models has a mixer in the kernels of inductor.
compile_eagerly = partial(torch.compile, backend='aot_eager')


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take oneDNN for the fastest library, whatever is measured."""
    monkeypatch.setattr(linear, 'fastest', lambda *_: 'onednn')


def make_linear(bias: bool = True) -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH, bias=bias).eval()
    fuse_linear(layer)
    return layer


def packed_linear() -> FusedLinear:
    """Return a layer that has packed its weight for inputs of ROWS rows."""
    layer = make_linear()
    with torch.no_grad():
        for _ in range(2):
            layer(torch.zeros(ROWS, WIDTH))
    assert isinstance(layer, FusedLinear)
    assert layer.packed is not None
    return layer


def operators(function: Callable[[], object]) -> set[str]:
    with torch.profiler.profile() as profile:
        function()
    return {event.name for event in profile.events()}


def multiplies_by_onednn(function: Callable[[], object]) -> bool:
    return any('mkldnn::_linear_pointwise' in name for name in operators(function))


@needs_onednn
@pytest.mark.parametrize('rows', [(1,), (197,), (3, 50), (2, 3, 65), ()])
@pytest.mark.parametrize(('inner', 'outer'), [(1, 1), (7, 3), (64, 200), (384, 1536)])
@pytest.mark.parametrize('bias', [True, False])
def test_products_of_onednn_match_float64(rows: tuple[int, ...], inner: int, outer: int, bias: bool):
    x, weight, shift = randn(*rows, inner), randn(outer, inner, seed=1), randn(outer, seed=2) if bias else None
    expected = F.linear(x, weight, shift)
    for w in (weight.float(), weight.float().t().contiguous().t()):
        got = multiply_onednn(x.float(), w, None if shift is None else shift.float())
        assert got.shape == expected.shape
        assert_close(got, expected, 1e-6)


@needs_onednn
@compiles_fused_layers
@pytest.mark.parametrize(('way', 'bias'), [('torch', True), ('onednn', True), ('onednn', False), ('mkl', True)])
def test_a_fused_layer_multiplies_by_the_fastest_library(monkeypatch: pytest.MonkeyPatch, bias: bool, way: str):
    if way == 'mkl' and not torch.backends.mkl.is_available():
        pytest.skip('this torch has no MKL')
    monkeypatch.setattr(linear, 'fastest', lambda *_: way)
    layer, x = make_linear(bias), randn(ROWS, WIDTH).float()
    with torch.no_grad():
        for call in (layer, compile_eagerly(layer, dynamic=True)):
            for rows in (x, x[1:], x[:, None], x):
                assert_close(call(rows), copy.deepcopy(layer).double()(rows.double()), 1e-6)
            assert multiplies_by_onednn(lambda call=call: call(x)) == (way == 'onednn')
        assert ('mkl::_mkl_linear' in operators(lambda: layer(x))) == (way == 'mkl')


@needs_onednn
def test_the_measurement_is_one_of_real_numbers_and_draws_none(monkeypatch: pytest.MonkeyPatch):
    measured: list[object] = []
    monkeypatch.setattr(linear, 'fastest', lambda *args: measured.append(args) or 'torch')
    for mode in (FakeTensorMode(), torch.device('meta')):
        with mode:
            assert not linear.onednn_is_faster()
    with torch.backends.mkldnn.flags(enabled=False):
        assert not linear.onednn_is_faster()
    assert not measured
    before = torch.get_rng_state()
    linear.onednn_is_faster()
    assert len(measured) == 1
    assert torch.equal(torch.get_rng_state(), before)


WRITES: dict[str, Callable[[nn.Module], object]] = {
    'loaded': lambda model: model.load_state_dict({name: 1.5 * x for name, x in model.state_dict().items()}),
    'moved': lambda model: model._apply(lambda x: 1.5 * x if x.is_floating_point() else x),
}


def make_convolutions(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = {
        'edge': lambda: FusibleEdgeResidual(16, 24, stride=2, exp_ratio=4, act_layer='hard_swish'),
        'skip': lambda: FusibleEdgeResidual(16, 16, exp_ratio=2, act_layer='silu'),
        'stem': lambda: FusibleConvNormAct(16, 24, 3, stride=2, act_layer='mish'),
        'depthwise': lambda: nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 24, 1)),
    }[kind]()
    for each in model.modules():
        if isinstance(each, nn.BatchNorm2d):
            for x in (each.weight.data, each.bias.data, each.running_mean, each.running_var):
                x.uniform_(0.5, 2)
    return model.eval()


def fuse(model: nn.Module) -> nn.Module:
    fused = copy.deepcopy(model)
    if hasattr(fused, 'fuse'):
        assert fused.fuse() is fused
    fuse_linear(fused)
    return fused


KINDS = ['edge', 'skip', 'stem', 'depthwise']


@needs_onednn
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_fused_convolutions_are_one_operation_each_and_match_float64(kind: str, layout: torch.memory_format):
    model = make_convolutions(kind)
    quick, names = fuse(model), set(model.state_dict())
    with torch.no_grad():
        for size in ((15, 22), (8, 8), (1, 3)):
            images = randn(2, 16, *size).float().contiguous(memory_format=layout)
            before = images.clone()
            expected = copy.deepcopy(model).double()(images.double())
            # The second call of a size packs the weights.
            for _ in range(3):
                assert_close(quick(images), expected, 1e-6)
            assert torch.equal(images, before)
        assert not {'aten::batch_norm', 'aten::conv2d', 'aten::hardswish', 'aten::silu'} & operators(
            lambda: quick(images)
        )
    assert set(quick.state_dict()) == names


@needs_onednn
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('write', WRITES)
def test_fused_convolutions_follow_their_parameters(kind: str, write: str):
    model, images = make_convolutions(kind), randn(2, 16, 9, 11).float()
    quick = fuse(model)
    with torch.no_grad():
        quick(images)
        first, before = quick(images), [x.clone() for x in quick.state_dict().values()]
        for each in (model, quick):
            WRITES[write](each)
        changed = any(not torch.equal(x, y) for x, y in zip(quick.state_dict().values(), before, strict=True))
        assert torch.equal(quick(images), first) != changed
        assert_close(quick(images), copy.deepcopy(model).double()(images.double()), 1e-5)
        assert_close(copy.deepcopy(quick)(images), quick(images).double(), 1e-6)


@needs_onednn
@pytest.mark.parametrize('kind', KINDS)
def test_training_fused_convolutions_is_an_error(kind: str):
    model = fuse(make_convolutions(kind))
    with pytest.raises(ValueError, match='is fused for inference and cannot be trained'):
        model.train()


@needs_onednn
@pytest.mark.parametrize('kind', KINDS)
def test_scripted_traced_and_exported_convolutions_are_those_of_torch(kind: str):
    model, images = make_convolutions(kind), randn(2, 16, 9, 11).float()
    quick = fuse(model)
    with torch.no_grad():
        expected = model(images)
        for _ in range(2):
            quick(images)
        for call in (
            torch.jit.script(quick),
            torch.fx.symbolic_trace(quick),
            torch.export.export(quick, (images,)).module(),
            lambda x: torch.func.vmap(quick)(x[None])[0],
        ):
            assert_close(call(images), expected.double(), 1e-6)
        with torch.autocast('cpu', torch.bfloat16):
            assert quick(images).dtype == model(images).dtype
        with pytest.raises(RuntimeError, match='16'):
            quick(images[:, :8])


# oneDNN would read other numbers than those of the bias.
@needs_onednn
@pytest.mark.parametrize('compiled', [False, True])
@pytest.mark.parametrize('make', [lambda: torch.randn(2 * WIDTH)[::2], lambda: torch.ones(1).expand(WIDTH)])
@pytest.mark.parametrize('kind', [nn.Linear, nn.Conv2d])
def test_a_bias_of_any_strides_is_added(onednn: None, kind: Any, make: Callable[[], Tensor], compiled: bool):
    layer = kind(WIDTH, WIDTH).eval() if kind is nn.Linear else kind(16, WIDTH, 3).eval()
    x = randn(ROWS, WIDTH).float() if kind is nn.Linear else randn(2, 16, 9, 11).float()
    layer.bias = nn.Parameter(make())
    quick = fuse(layer)
    with torch.no_grad():
        call = compile_eagerly(quick) if compiled else quick
        for _ in range(3):
            assert_close(call(x), copy.deepcopy(layer).double()(x.double()), 1e-6)


@needs_onednn
@pytest.mark.parametrize('kind', ['edge', 'depthwise', 'linear'])
def test_layers_made_in_inference_mode_follow_what_is_loaded(onednn: None, kind: str):
    with torch.inference_mode():
        layer = fuse(nn.Linear(WIDTH, WIDTH) if kind == 'linear' else make_convolutions(kind)).eval()
        x = randn(ROWS, WIDTH).float() if kind == 'linear' else randn(2, 16, 9, 11).float()
        for _ in range(2):
            layer(x)
        layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})
        for _ in range(2):
            assert_close(layer(x), copy.deepcopy(layer).double()(x.double()), 1e-5)


@needs_onednn
def test_no_columns_and_no_onednn_are_those_of_torch(onednn: None):
    assert fuse(nn.Linear(0, 5)).eval()(torch.zeros(2, 0)).shape == (2, 5)
    layer, x = packed_linear(), randn(ROWS, WIDTH).float()
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        assert not multiplies_by_onednn(lambda: layer(x))


CALLS: dict[str, Callable[[nn.Linear, Tensor], object]] = {
    'few': lambda layer, x: (layer(x[:5]), layer(x[:5])),
    'none': lambda layer, x: layer(x[:0]),
    'strided': lambda layer, x: layer(x.t().contiguous().t()),
    'double': lambda layer, x: layer.double()(x.double()),
    'gradients': lambda layer, x: torch.enable_grad()(lambda: layer(x).sum().backward())(),
    'vmap': lambda layer, x: torch.func.vmap(layer)(x[None]),
    'tangents': lambda layer, x: torch.func.jvp(layer, (x,), (x,)),
    'graph': lambda layer, x: make_fx(layer)(x),
    'trace': lambda layer, x: torch.jit.trace(layer, x, check_trace=False),
    'script': lambda layer, x: torch.jit.script(layer)(x),
    'export': lambda layer, x: torch.export.export(layer, (x,)).module()(x),
    'strict export': lambda layer, x: torch.export.export(layer, (x,), strict=True).module()(x),
    'jagged': lambda layer, x: layer(torch.nested.nested_tensor([x[:90], x[90:]], layout=torch.jagged)),
    'compiled jagged': lambda layer, x: compile_eagerly(layer)(
        torch.nested.nested_tensor([x[:90], x[90:]], layout=torch.jagged)
    ),
    'compiled few': lambda layer, x: compile_eagerly(layer)(x[:5]),
}


@needs_onednn
@pytest.mark.parametrize('name', CALLS)
def test_every_other_call_is_one_of_torch(onednn: None, name: str):
    with torch.no_grad():
        layer, x = packed_linear(), randn(ROWS, WIDTH).float()
        assert multiplies_by_onednn(lambda: layer(x))
        assert not multiplies_by_onednn(lambda: CALLS[name](layer, x))


@needs_onednn
@pytest.mark.parametrize('compiled', [False, True])
def test_weights_of_a_subclass_have_their_own_product(onednn: None, compiled: bool):
    layer, x = make_linear(), randn(ROWS, WIDTH).float()
    with torch.no_grad():
        expected = layer(x)
        layer.weight, layer.bias = (nn.Parameter(TwoTensor(w.detach(), w.detach())) for w in (layer.weight, layer.bias))
        call = compile_eagerly(layer) if compiled else layer
        found: Any = call(x)
        assert_close(found.a, expected.double(), 1e-6)
        assert not multiplies_by_onednn(lambda: call(x))


@needs_onednn
def test_autocast_and_modes_see_the_layer_of_torch(onednn: None):
    layer, x = packed_linear(), randn(ROWS, WIDTH).float()
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * ROWS * WIDTH * WIDTH


MODELS: dict[str, Callable[[], nn.Module]] = {
    'conv': lambda: timm.create_model('aft_conv_tiny', img_size=64, depth=2),
    'full': lambda: timm.create_model('aft_full_tiny', img_size=64, depth=2),
    'hybrid': lambda: timm.create_model('aft_axial_tiny', img_size=64, depth=2, attention_blocks=[1]),
    'pyramid': lambda: timm.create_model('aft_pyramid_nano', depths=(1, 1, 1, 1)),
}


@needs_onednn
@pytest.mark.parametrize('name', MODELS)
def test_a_fused_model_multiplies_by_onednn(onednn: None, name: str):
    model, images = MODELS[name]().eval(), randn(8, 3, 64, 64).float()
    quick = reparameterize_model(model)
    assert quick.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        quick(images)
        assert multiplies_by_onednn(lambda: quick(images))
        assert_close(quick(images), copy.deepcopy(model).double()(images.double()), 1e-5)
    linear = [each for block in quick.modules() if hasattr(block, 'fuse') for each in block.modules()]
    assert not any(type(each) is nn.Linear for each in linear)


@needs_onednn
def test_weights_are_packed_when_a_size_comes_again(onednn: None):
    layer, packed = make_linear(), lambda x: 'mkldnn::_linear_pointwise' in operators(lambda: layer(x))
    x = randn(ROWS, WIDTH).float()
    with torch.no_grad():
        assert [packed(each) for each in (x, x[1:], x, x, x, x[1:], x[1:])] == [False] * 3 + [True] * 2 + [False, True]


@needs_onednn
def test_hooks_and_parameters_of_a_layer_stay(onednn: None):
    block, seen = AttentionBlock(64, 2).eval(), []
    block.mlp.fc1.register_forward_hook(lambda *_: seen.append('fc1'))
    parameters = list(block.parameters())
    assert block.fuse() is block
    assert type(block.attn.qkv) is FusedLinear
    assert all(x is y for x, y in zip(block.parameters(), parameters, strict=True))
    block(torch.zeros(1, 4, 64))
    assert seen == ['fc1']
