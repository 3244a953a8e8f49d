import itertools

import pytest
import timm
import torch
from helpers import fixes_trained_sizes
from torch import Tensor, nn

from aft_vision.export import InputShape
from aft_vision.export.program import trace
from aft_vision.export.verify import grid_steps
from aft_vision.layers import AFTMixer
from aft_vision.models.attention_block import AttentionBlock
from aft_vision.models.deit_transfer import deit_to_aft

SMALL = dict(stem_dim=8, dims=(8, 8, 16, 16), depths=(2, 1, 1, 2), num_heads=(4, 4), num_classes=3)
HYBRID = dict(SMALL, attention_blocks=[5], local_conv=True)


def make_model(**kwargs) -> nn.Module:
    """A small pyramid whose every parameter and statistic is random, the same in every call."""
    torch.manual_seed(0)
    model = timm.create_model('aft_pyramid_nano', **{**HYBRID, **kwargs}).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.rand(tensor.shape, generator=generator), alpha=0.3)
    return model


def make_images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def run(model: nn.Module, *inputs: Tensor) -> Tensor:
    return model(*inputs)


@pytest.mark.parametrize('size', [(64, 96), (50, 37), (20, 20)])
def test_the_maps_have_strides_4_to_32_at_any_size(size):
    model = timm.create_model('aft_pyramid_nano', **SMALL, features_only=True).eval()
    maps = run(model, make_images(2, 3, *size))
    for found, info in zip(maps, model.feature_info.get_dicts(), strict=True):
        assert found.shape[1:] == (info['num_chs'], *(-(-side // info['reduction']) for side in size))
    assert model.feature_info.reduction() == [4, 8, 16, 32]


@torch.no_grad()
def test_maps_and_their_description_have_the_order_of_a_hierarchical_model_of_timm():
    small = {'aft_pyramid_nano': SMALL, 'convnext_atto': dict(depths=(1, 1, 1, 1))}
    images, found = make_images(1, 3, 64, 64), []
    for name, kwargs in small.items():
        model = timm.create_model(name, **kwargs, features_only=True, out_indices=(3, 1)).eval()
        maps = timm.create_model(name, **kwargs).eval().forward_intermediates(images, [3, 1], intermediates_only=True)
        assert [x.shape for x in maps] == [x.shape for x in model(images)]
        found.append((model.feature_info.reduction(), [64 // x.shape[-1] for x in maps]))
    assert found[0] == found[1]


def test_the_stages_have_convolutions_and_then_axial_mixers_and_attention_where_asked():
    model = make_model()
    kinds = [[type(block).__name__ for block in stage.blocks] for stage in model.stages]
    assert kinds == [['FusibleEdgeResidual'] * 2, ['FusibleEdgeResidual'], ['AFTBlock'], ['AFTBlock', 'AttentionBlock']]
    assert sum(isinstance(module, AFTMixer) for module in model.modules()) == 2
    assert isinstance(model.stages[3].blocks[1], AttentionBlock)


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'attention_blocks': [2]}, r'attention_blocks must be indices of the 3 blocks that mix tokens, 3 to 5'),
        ({'depths': (1, 1, 1)}, 'dims and depths must have 4 numbers each'),
        (
            {'window_size': (4, 4, 4)},
            r'window_size must be one number, or two for the last two stages',
        ),
    ],
)
def test_an_argument_that_does_not_fit_the_stages_is_an_error(kwargs, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model('aft_pyramid_nano', **{**SMALL, **kwargs})


def test_the_weights_of_a_vit_have_no_place_in_a_pyramid():
    with pytest.raises(ValueError, match='the patches and blocks of a ViT, got a AFTPyramid'):
        deit_to_aft({}, timm.create_model('aft_pyramid_nano', **SMALL))


def test_the_width_before_a_classifier_that_stays_is_that_of_its_hidden_layer():
    model = make_model(head_hidden_size=48)
    model.prune_intermediate_layers([3], prune_head=False)
    assert model.head_hidden_size == model.forward_head(torch.zeros(1, 16, 2, 2), pre_logits=True).shape[1] == 48
    model.prune_intermediate_layers([2])
    assert model.num_features == model.head_hidden_size == 16


@pytest.mark.parametrize('global_pool', ['avg', 'max', 'avgmax'])
def test_a_padded_image_gets_the_logits_that_it_gets_alone(global_pool):
    model = make_model(global_pool=global_pool)
    images, mask = make_images(2, 3, 96, 128), torch.zeros(2, 3, 4, dtype=torch.bool)
    mask[0], mask[1, :2, :3] = True, True
    logits = run(model, images, mask)
    torch.testing.assert_close(logits[:1], run(model, images[:1]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits[1:], run(model, images[1:, :, :64, :96]), rtol=1e-4, atol=1e-5)
    assert (logits[1:] - run(model, images[1:])).abs().max() > 1e-3


def test_the_maps_of_a_padded_image_are_those_that_it_has_alone():
    model, images = make_model(), make_images(1, 3, 64, 96)
    mask = torch.tensor([[[True, True, False], [False, False, False]]])
    padded = model.forward_intermediates(images, intermediates_only=True, attn_mask=mask)
    alone = model.forward_intermediates(images[:, :, :32, :64], intermediates_only=True)
    for found, wanted in zip(padded, alone, strict=True):
        torch.testing.assert_close(found[:, :, : wanted.shape[2], : wanted.shape[3]], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('last', [1, 2])
def test_a_padded_image_gets_the_logits_that_it_gets_alone_from_the_map_of_an_earlier_stage(last):
    model, images = make_model(), make_images(1, 3, 80, 72)
    model.prune_intermediate_layers([last])
    model.reset_classifier(4, 'avg')
    mask = torch.tensor([[[True, True, False], [True, True, False], [False, False, False]]])
    alone = run(model, images[:, :, :64, :64])
    torch.testing.assert_close(run(model, images, mask), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    'mask', [torch.ones(1, 2, 2, dtype=torch.bool), torch.ones(1, 2, 3), torch.ones(2, 2, 3, dtype=torch.bool)]
)
def test_a_mask_of_another_shape_or_type_is_an_error(mask):
    with pytest.raises(ValueError, match=r'attn_mask must be a bool tensor of shape \(1, 2, 3\)'):
        make_model()(make_images(1, 3, 64, 96), mask)


def test_checkpointing_and_scripting_change_nothing():
    images = make_images(2, 3, 64, 96)
    with timm.layers.set_scriptable(True):
        model = make_model()
    expected = run(model, images)
    torch.testing.assert_close(run(torch.jit.script(model), images), expected, rtol=1e-4, atol=1e-5)
    model.set_grad_checkpointing()
    torch.testing.assert_close(model(images).detach(), expected, rtol=1e-4, atol=1e-5)


def test_every_parameter_gets_a_gradient_with_drop_path():
    torch.manual_seed(0)
    model = make_model(drop_path_rate=0.1, proj_drop_rate=0.1, drop_rate=0.1, init_values=0.1).train()
    model(make_images(2, 3, 64, 64)).square().sum().backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]


def test_training_on_a_cpu_has_maps_whose_channels_are_neighbours():
    model, layouts = make_model().train(), []
    for stage in model.stages:
        stage.register_forward_hook(
            lambda stage, inputs, y: layouts.append(y.is_contiguous(memory_format=torch.channels_last))
        )
    model(make_images(2, 3, 64, 64))
    assert layouts == [True] * 4


def test_one_exported_program_is_for_any_size_and_batch():
    model = make_model(depths=(1, 1, 1, 0), attention_blocks=None, local_conv=False)
    # One position of the last stage, 32 pixels, would be a constant.
    assert grid_steps(model) == ((1, 1), 33)
    program = trace(model, InputShape((64, 64), False)).module()
    for shape in [(1, 3, 64, 64), (2, 3, 37, 50)]:
        images = make_images(*shape)
        torch.testing.assert_close(run(program, images), run(model, images), rtol=1e-4, atol=1e-5)


def test_attention_has_heads_that_divide_its_width():
    model = make_model(dims=(8, 16, 200, 64), attention_blocks=[3])
    assert model(make_images(1, 3, 64, 64)).shape == (1, 3)
    assert [block.attn.num_heads for block in model.modules() if isinstance(block, AttentionBlock)] == [2]


@fixes_trained_sizes
def test_a_compiled_pyramid_has_a_graph_for_each_size_it_is_trained_at():
    inputs = []

    def backend(graph, examples):
        inputs.append(examples)
        return graph

    torch._dynamo.reset()
    model = make_model(depths=(1, 1, 1, 0), attention_blocks=None).train()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for size in [(64, 64), (96, 64)]:
        compiled(make_images(2, 3, *size)).sum().backward()
    assert len(inputs) == 2
    # Inductor's backward for a CPU does not compile with an open size.
    assert not any(isinstance(x, torch.SymInt) for examples in inputs for x in examples)
