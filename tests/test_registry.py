"""The contract of timm, its scripts and transformers for every registered aft_* model."""

import fnmatch
import importlib
from functools import cache

import pytest
import timm
import torch
from timm.models import get_notrace_functions, get_notrace_modules, group_parameters, save_for_hf
from timm.optim import param_groups_weight_decay
from timm.utils import reparameterize_model
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import aft_vision  # noqa: F401, the import registers the models
from aft_vision.export import export_model

# Parameters with and without biases on q, k and v (the columns #Params of AFT Table 7, exact). AFT-full is DeiT plus
# 12 * 2 * 197 * 128 factors of its bias, so base is 86,567,656 + 605,184; AFT-simple has the parameters of DeiT.
# AFT-axial has h (27 + 27) biases and h * 4 gains and shifts a block where AFT-conv of as many heads has h (121 + 2).
# The nano models have 6 blocks of width 128 on 12 x 12 patches of 8 pixels, and ten classes.
PARAMETERS = {
    'aft_full_nano': (1_457_290, 1_454_986),
    'aft_simple_nano': (1_234_570, 1_232_266),
    'aft_axial_nano': (1_133_994, 1_132_362),
    'aft_conv_nano': (1_310_346, 1_308_042),
    'aft_full_tiny': (6_322_600, 6_315_688),
    'aft_full_small': (22_655_848, 22_642_024),
    'aft_full_base': (87_172_840, 87_145_192),
    'aft_simple_tiny': (5_717_416, 5_710_504),
    'aft_simple_small': (22_050_664, 22_036_840),
    'aft_axial_tiny': (5_331_112, 5_326_120),
    'aft_axial_small': (20_285_608, 20_276_200),
    'aft_conv_tiny': (5_962_792, 5_955_880),
    'aft_conv_tiny_k11_h32': (5_356_072, 5_351_080),
    'aft_conv_small': (22_541_416, 22_527_592),
    'aft_conv_small_k11_h16': (20_298_088, 20_288_680),
    'aft_conv_small_k15_h384': (23_020_648, 23_006_824),
    'aft_conv_base_k25_h32_384': (79_864_552, 79_845_736),
    'aft_pyramid_pico': (2_747_346, 2_745_378),
    'aft_pyramid_nano': (9_582_584, 9_578_872),
    'aft_pyramid_tiny': (11_416_888, 11_411_576),
}
# Classes of the packaged weights.
TRAINED = {'pyramid_nano': 1000, '_nano': 10, '_pico': 210}
PYRAMIDS = ('aft_pyramid_nano', 'aft_pyramid_pico', 'aft_pyramid_tiny')
SMALL_PYRAMID = dict(stem_dim=8, dims=(8, 16, 16, 32), depths=(1, 1, 1, 1), num_heads=(4, 8), head_hidden_size=16)
# Of images, in pixels: every model takes 224 in tests/models.
SIZE = 64
# The one-hot model has no registered name.
ONEHOT = 'aft_conv_tiny onehot'
VITS = ['aft_conv_tiny', 'aft_full_tiny', 'aft_simple_tiny', 'aft_axial_tiny', ONEHOT]
all_models = pytest.mark.parametrize('name', list(PARAMETERS))
all_models_and_onehot = pytest.mark.parametrize('name', [*PARAMETERS, ONEHOT])
one_of_each = pytest.mark.parametrize('name', [*VITS, PYRAMIDS[0]])
one_vit_of_each = pytest.mark.parametrize('name', VITS)


def create_model(name: str, **kwargs) -> nn.Module:
    """A model by its registered name, behind which another mixer may stand."""
    name, *mixer = name.split()
    return timm.create_model(name, **({'mixer': mixer[0]} if mixer else {}), **kwargs)


def create_without_values(name: str, **kwargs) -> nn.Module:
    """A whole model on the meta device; timm's ViTs would initialise it, which takes seconds."""
    return create_model(name, device='meta', **({} if name in PYRAMIDS else {'weight_init': 'skip'}), **kwargs)


@cache
def describe(name: str) -> nn.Module:
    """A whole model without values, which no test changes."""
    return create_without_values(name)


def create_small(name: str, **kwargs) -> nn.Module:
    """A model of two blocks that mix tokens, for small images."""
    size = SMALL_PYRAMID if name in PYRAMIDS else {'depth': 2, 'img_size': SIZE}
    return create_model(name, **{**size, **kwargs})


def make_model(name: str, **kwargs) -> nn.Module:
    """A model of two blocks whose every parameter is random: as made, gamma = beta = 0 would hide the kernel."""
    model = create_small(name, num_classes=5, **kwargs).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        for buffer in model.buffers():
            # Offsets; the statistics of batch norms stay what they are.
            if not buffer.is_floating_point():
                buffer.random_(-2, 3, generator=generator)
    return model


def make_images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (SIZE, SIZE)), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def run(model: nn.Module, images: Tensor) -> Tensor:
    return model(images)


def assert_same_outputs(actual: nn.Module, expected: nn.Module, images: Tensor | None = None) -> None:
    """Equal logits, within float32 rounding, on two images."""
    images = make_images() if images is None else images
    torch.testing.assert_close(run(actual, images), run(expected, images), rtol=1e-4, atol=1e-5)


def trace(model: nn.Module) -> nn.Module:
    """The model as torch.fx sees it, traced the way timm's tests do."""
    options = dict(
        leaf_modules=get_notrace_modules(), autowrap_functions=get_notrace_functions(), param_shapes_constant=True
    )
    _, nodes = get_graph_node_names(model, tracer_kwargs=options)
    return create_feature_extractor(model, return_nodes={nodes[-1]: 'logits'}, tracer_kwargs=options)


def test_the_models_of_the_paper_are_registered():
    assert sorted(timm.list_models('aft_*')) == sorted(PARAMETERS)
    assert timm.list_models(module='aft_pyramid') == list(PYRAMIDS)
    assert timm.list_models(module='aft_vit') == [name for name in timm.list_models('aft_*') if name not in PYRAMIDS]


@all_models
def test_parameter_counts_are_exact(name):
    models = describe(name), create_without_values(name, qkv_bias=False)
    assert tuple(sum(p.numel() for p in model.parameters()) for model in models) == PARAMETERS[name]


@pytest.mark.parametrize(
    'name', ['aft_full_tiny', 'aft_simple_tiny', 'aft_conv_small', 'aft_axial_tiny', 'aft_pyramid_nano']
)
def test_pretrained_says_that_there_are_no_weights(name):
    with pytest.raises(RuntimeError, match=rf'No pretrained weights exist for {name}\.'):
        timm.create_model(name, pretrained=True, device='meta')


@all_models
def test_default_config_is_that_of_the_paper(name):
    cfg = timm.get_pretrained_cfg(name)
    # Those with weights have their size and classes.
    classes = next((count for end, count in TRAINED.items() if name.endswith(end)), 1000)
    size, crop_pct = (384 if name.endswith('_384') else 224, 0.875) if classes == 1000 else (96, 1.0)
    assert (cfg.architecture, cfg.num_classes, cfg.input_size) == (name, classes, (3, size, size))
    assert cfg.crop_pct == crop_pct
    assert cfg.fixed_input_size is not name.startswith(('aft_conv', 'aft_axial', 'aft_pyramid'))
    assert not any([cfg.url, cfg.hf_hub_id])


@all_models_and_onehot
def test_no_weight_decay_names_parameters_of_the_model(name):
    model = describe(name)
    parameters = [n for n, _ in model.named_parameters()]
    unused = [pattern for pattern in model.no_weight_decay() if not fnmatch.filter(parameters, pattern)]
    # timm allows an optional parameter that this model does not have.
    assert all(getattr(model, name, None) is None for name in unused), unused


@all_models_and_onehot
def test_only_the_weights_of_linear_and_convolution_layers_decay(name):
    model = describe(name)
    no_decay, decay = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    assert (no_decay['weight_decay'], decay['weight_decay']) == (0.0, 0.05)
    layers = {f'{n}.weight' for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    decaying = {id(p) for p in decay['params']}
    assert {n for n, p in model.named_parameters() if id(p) in decaying} == layers


@all_models_and_onehot
def test_group_matcher_gives_each_block_a_group_of_its_own(name):
    model = describe(name)
    group_of = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    lists = [n for n, module in model.named_modules() if n.rpartition('.')[2] == 'blocks']
    blocks = [f'{n}.{i}.' for n in lists for i in range(len(model.get_submodule(n)))]
    groups = [{group for n, group in group_of.items() if n.startswith(block)} for block in blocks]
    assert all(len(group) == 1 for group in groups)
    depth = {'aft_pyramid_pico': 8, 'aft_pyramid_nano': 10, 'aft_pyramid_tiny': 14}.get(
        name, 6 if 'nano' in name else 12
    )
    assert len(set().union(*groups)) == len(blocks) == depth
    assert len(set(group_of.values())) == depth + 2


@all_models_and_onehot
def test_an_unknown_argument_is_a_type_error(name):
    with pytest.raises(TypeError, match='not_an_argument'):
        create_model(name, device='meta', not_an_argument=1)


@one_of_each
def test_init_weights_restores_every_tensor_after_to_empty(name):
    fresh = create_small(name)
    model = create_small(name, device='meta').to_empty(device='cpu')
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(float('nan') if tensor.is_floating_point() else -1)
    model.init_weights()
    expected = {**dict(fresh.named_parameters()), **dict(fresh.named_buffers())}
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        spread, expected_spread = (x.detach().double().std(correction=0).item() for x in (tensor, expected[key]))
        assert spread == pytest.approx(expected_spread, rel=0.3), key
        assert expected_spread > 0 or torch.equal(tensor, expected[key]), key
    assert torch.isfinite(run(model.eval(), make_images())).all()


@one_of_each
def test_the_state_dict_holds_all_that_matters(name):
    model = make_model(name)
    keys = {n for n, _ in [*model.named_parameters(), *model.named_buffers()]}
    assert set(model.state_dict()) == keys
    run(model, make_images())
    model.train()(make_images()).sum().backward()
    assert set(model.state_dict()) == keys == {n for n, _ in [*model.named_parameters(), *model.named_buffers()]}
    restored = create_small(name, num_classes=5).eval()
    restored.load_state_dict(model.state_dict())
    assert_same_outputs(restored, model.eval())


@pytest.mark.parametrize('name', [*VITS, *PYRAMIDS])
def test_a_headless_checkpoint_with_sorted_keys_passes_the_filter_unchanged(name):
    model = make_model(name)
    model.reset_classifier(0)
    filter_fn = importlib.import_module(type(model).__module__).checkpoint_filter_fn
    restored = create_small(name, num_classes=0).eval()
    restored.load_state_dict(filter_fn(dict(sorted(model.state_dict().items())), restored))
    assert_same_outputs(restored, model)


@pytest.mark.parametrize(
    ('name', 'kwargs', 'size'),
    [
        ('aft_conv_tiny', dict(kernel_size=7, num_heads=6), (96, 160)),
        (ONEHOT, dict(num_heads=6), (96, 160)),
        ('aft_axial_tiny', dict(window_size=(3, 5), attention_blocks=[1], local_conv=True), (96, 160)),
        ('aft_full_tiny', dict(img_size=(96, 160)), (96, 160)),
        ('aft_simple_tiny', dict(query_gate=False), (SIZE, SIZE)),
    ],
)
def test_a_saved_folder_gives_the_same_model(name, kwargs, size, tmp_path):
    model = make_model(name, **kwargs)
    save_for_hf(model, tmp_path, safe_serialization=True)
    restored = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    assert_same_outputs(restored, model, make_images(*size))


def test_a_saved_folder_remembers_a_size_that_was_set_later(tmp_path):
    model = make_model('aft_full_tiny')
    model.set_input_size((96, 160))
    save_for_hf(model, tmp_path, safe_serialization=True)
    restored = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    assert_same_outputs(restored, model, make_images(96, 160))


@one_of_each
def test_a_saved_folder_opens_in_transformers(name, tmp_path):
    transformers = pytest.importorskip('transformers')
    model = make_model(name)
    export_model(model, tmp_path / 'export', [f'class {i}' for i in range(model.num_classes)])
    wrapped = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / 'export').eval()
    logits = wrapped(make_images()).logits
    torch.testing.assert_close(logits, run(model, make_images()), rtol=1e-4, atol=1e-5)


@one_of_each
def test_a_reparameterized_model_gives_the_same_output(name):
    model = make_model(name)
    keys = list(model.state_dict())
    fused = reparameterize_model(model)
    assert_same_outputs(fused, model)
    assert list(model.state_dict()) == keys


@one_of_each
def test_a_traced_model_gives_the_same_output(name):
    model = make_model(name)
    traced = trace(model)
    images = make_images()
    torch.testing.assert_close(traced(images)['logits'], run(model, images), rtol=1e-4, atol=1e-5)


# It warns that a trace is for one size.
@pytest.mark.filterwarnings('ignore::torch.jit.TracerWarning')
@one_of_each
def test_a_model_that_torch_jit_traced_gives_the_same_output(name):
    model, images = make_model(name), make_images()
    traced = torch.jit.trace(model, images)
    assert torch.equal(run(traced, images + 1), run(model, images + 1))
