import copy
from dataclasses import asdict
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.data import create_transform, resolve_model_data_config
from timm.layers import SwiGLU
from timm.utils import reparameterize_model

from aft_vision.export.network import Network
from aft_vision.export.program import TOLERANCE
from aft_vision.export.standalone import UnsupportedError, compare, describe, image_processor
from aft_vision.models import AFTVisionTransformer
from aft_vision.models.harden import harden
from tests import helpers

SIZES: dict[str, Any] = dict(img_size=(24, 32), patch_size=8, embed_dim=16, depth=2, num_classes=3)
MODELS: dict[str, dict[str, Any]] = {
    'conv': dict(kernel_size=5, num_heads=4),
    'conv, raw and local': dict(kernel_size=3, standardize_kernel=False, global_context=False, query_gate=False),
    'conv, local_conv': dict(kernel_size=3, num_heads=8, local_conv=True, init_values=0.1, qkv_bias=False),
    'conv, gumbel': dict(kernel_size=3, gumbel=True, num_heads=4, dynamic_img_pad=True),
    'conv, attention': dict(
        kernel_size=3, depth=3, attention_blocks=[1], qk_norm=True, scale_attn_norm=True, scale_mlp_norm=True
    ),
    'axial': dict(mixer='axial', num_heads=2, window_size=(2, 3), global_pool='max'),
    'axial, resampled': dict(mixer='axial', resample_bias=True, standardize_kernel=False, local_conv=True),
    'full': dict(mixer='full', bias_dim=4),
    'full, any size': dict(mixer='full', factorize_bias=False, dynamic_img_size=True, reg_tokens=2),
    'full, averaged': dict(
        mixer='full', class_token=False, global_pool='avgmax', pos_embed='none', dynamic_img_size=True
    ),
    'local': dict(mixer='local', window_size=3, dynamic_img_size=True, dynamic_img_pad=True, no_embed_class=True),
    'local, pairs': dict(mixer='local', window_size=40, factorize_bias=False, pre_norm=True, proj_bias=False),
    'simple': dict(mixer='simple', act_layer='gelu_tanh', dynamic_img_size=True, global_pool='avg', fc_norm=False),
    'simple, unpooled': dict(
        mixer='simple', act_layer='silu', embed_norm_layer='layernorm', global_pool='', pool_include_prefix=True
    ),
}


def make_model(**kwargs: Any) -> AFTVisionTransformer:
    """A model whose parameters all have an effect."""
    model = AFTVisionTransformer(**{**SIZES, **kwargs})
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=helpers.generator(number)))
    return model.eval()


@pytest.mark.parametrize('kwargs', MODELS.values(), ids=MODELS)
def test_the_standalone_form_computes_what_the_model_computes(kwargs):
    model = make_model(**kwargs)
    arch = describe(model)
    checks = compare(model, arch, TOLERANCE)
    assert len(checks) == (4 if model.dynamic_img_size else 2)


@pytest.mark.parametrize('name', ['conv, gumbel', 'conv, attention', 'axial', 'full, any size', 'local', 'simple'])
def test_every_gradient_is_that_of_the_model_in_evaluation(name):
    model = make_model(**MODELS[name]).double()
    network = Network(describe(model), model.num_classes).double().eval()
    network.load_state_dict(model.state_dict())
    images, mask = helpers.randn(2, 3, 24, 32), torch.ones(2, 3, 4, dtype=torch.bool)
    mask[0, :, 2:] = False
    for parameters in (model, network):
        parameters(images, attn_mask=mask).square().sum().backward()
    expected = dict(model.named_parameters())
    largest = max(parameter.grad.abs().max() for parameter in expected.values())
    for key, parameter in network.named_parameters():
        helpers.assert_close(parameter.grad, expected[key].grad, 1e-9, key, floor=float(largest))


def test_the_features_are_those_of_the_model():
    model = make_model(**MODELS['full, any size'])
    network = Network(describe(model), 0).eval()
    network.load_state_dict(model.state_dict(), strict=False)
    images = helpers.randn(1, 3, 40, 24, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(
            network.forward_features(images), model.forward_features(images), rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            network(images), model.forward_head(model.forward_features(images), pre_logits=True), rtol=1e-4, atol=1e-5
        )


def test_the_hard_form_of_a_gumbel_model_and_a_fused_model_have_one_too():
    compare(
        harden(make_model(**MODELS['conv, gumbel'])), describe(harden(make_model(**MODELS['conv, gumbel']))), TOLERANCE
    )
    fused = reparameterize_model(make_model(**MODELS['conv']))
    compare(fused, describe(fused), TOLERANCE)


def test_a_model_of_half_precision_is_compared_in_single():
    model = make_model(**MODELS['axial']).bfloat16()
    compare(model, describe(model), TOLERANCE)
    assert next(model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        (dict(norm_layer='rmsnorm'), r"RmsNorm .*norm_pre|RmsNorm .*norm1.* expected norm_layer='layernorm'"),
        (dict(act_layer='mish'), r'Mish \(blocks.0.mlp.act\) .* expected act_layer of gelu, gelu_tanh'),
        (dict(mlp_layer=SwiGLU), r'SwiGLU \(blocks.0.mlp\) .* expected the default mlp_layer'),
        (dict(global_pool='map'), r"AttentionPoolLatent \(attn_pool\) .* expected global_pool='avg'"),
        (dict(num_classes=0), 'a model without classifier .* expected num_classes of at least 1'),
        (dict(attention_blocks=[0, 1]), 'expected one that is not in attention_blocks'),
    ],
)
def test_what_has_no_standalone_form_is_rejected_with_the_fix(kwargs, message):
    with pytest.raises(UnsupportedError, match=message):
        describe(make_model(**kwargs))


def test_blocks_of_several_kinds_are_rejected():
    model = make_model(**MODELS['conv'])
    model.blocks[1] = make_model(kernel_size=3, num_heads=4).blocks[1]
    with pytest.raises(UnsupportedError, match='blocks of several kinds'):
        compare(model, describe(model), TOLERANCE)


def test_images_and_masks_of_other_sizes_are_rejected():
    fixed, free = (Network(describe(make_model(**MODELS[name])), 3) for name in ('full', 'conv'))
    with pytest.raises(ValueError, match=r'expected images of 24 x 32 pixels, got \(32, 32\)'):
        fixed(torch.zeros(1, 3, 32, 32))
    with pytest.raises(ValueError, match=r'multiples of 8 and 8 pixels, got \(20, 24\)'):
        free(torch.zeros(1, 3, 20, 24))
    others = [(2, 4, 3), (1, 3, 4), (1, 12), (3, 3, 4), (3, 4)]
    for mask in (torch.ones(2, 3, 4), *(torch.ones(shape, dtype=torch.bool) for shape in others)):
        with pytest.raises(ValueError, match=r'bool tensor of shape \(2, 3, 4\) or \(2, 12\)'):
            free(torch.zeros(2, 3, 24, 32), mask)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('pool', ['avg', 'avgmax'])
@pytest.mark.parametrize('masked', [False, True])
def test_the_mean_of_many_large_tokens_in_half_precision_is_finite(dtype, pool, masked):
    model = make_model(mixer='simple', dynamic_img_size=True, class_token=False, pos_embed='none', global_pool=pool)
    network = Network(describe(model), 0).to(dtype)
    network.fc_norm = torch.nn.Identity()
    tokens = (8 + helpers.randn(2, 96 * 96, 16, scale=0.1)).to(dtype)
    mask = torch.ones(2, 96, 96, dtype=torch.bool)
    mask[1, :, 40:] = False
    got = network.pool(tokens, mask if masked else None)
    kept = [tokens[0].double(), tokens[1].double()[mask[1].flatten() if masked else slice(None)]]
    mean, peak = (torch.stack([getattr(x, name)(0) for x in kept]) for name in ('mean', 'amax'))
    expected = mean if pool == 'avg' else 0.5 * (mean + peak)
    assert got.dtype == dtype
    helpers.assert_close(got, expected, torch.finfo(dtype).eps, pool)


def make_classifier(num_classes: int = 3) -> Any:
    """The model of transformers, float64, with the weights of `make_model`."""
    pytest.importorskip('transformers')
    from aft_vision.export.modeling_aft_vision import AFTVisionConfig, AFTVisionForImageClassification

    model = make_model(**MODELS['conv'], num_classes=num_classes)
    config = AFTVisionConfig(network=asdict(describe(model)), id2label=dict(enumerate('abc'[:num_classes])))
    classifier = AFTVisionForImageClassification(config)
    classifier.network.load_state_dict(model.state_dict())
    return classifier.double()


@pytest.mark.parametrize('name', ['attention_mask', 'output_hidden_states', 'num_items_in_batch'])
def test_an_argument_that_the_models_of_transformers_lack_is_rejected(name):
    classifier = make_classifier()
    from aft_vision.export.modeling_aft_vision import AFTVisionModel

    for model in (classifier, AFTVisionModel(classifier.config)):
        with pytest.raises(TypeError, match=name):
            model(helpers.randn(1, 3, 24, 32), **{name: True})


@pytest.mark.parametrize(
    ('problem', 'labels', 'loss'),
    [
        ('single_label_classification', [2, 0], F.cross_entropy),
        (None, [2, 0], F.cross_entropy),
        ('multi_label_classification', [[1.0, 0, 1], [0, 0, 0]], F.binary_cross_entropy_with_logits),
        (None, [[1.0, 0, 1], [0, 0, 0]], F.binary_cross_entropy_with_logits),
        ('regression', [[0.5, 1, 2], [-2.0, 0, 1]], F.mse_loss),
        (None, [[0.5], [-2.0]], F.mse_loss),
    ],
)
def test_the_loss_is_that_of_the_problem_type_or_else_of_the_labels(problem, labels, loss):
    classifier = make_classifier(1 if loss is F.mse_loss and problem is None else 3)
    classifier.config.problem_type = problem
    labels = torch.tensor(labels)
    labels = labels.double() if labels.is_floating_point() else labels
    output = classifier(helpers.randn(2, 3, 24, 32), labels=labels)
    torch.testing.assert_close(output.loss, loss(output.logits, labels))


def test_trainer_takes_the_same_step_with_and_without_accumulation(tmp_path):
    pytest.importorskip('accelerate')
    from transformers import Trainer, TrainingArguments

    data = [{'pixel_values': helpers.randn(3, 24, 32, seed=seed), 'labels': seed % 3} for seed in range(8)]
    classifier, found = make_classifier(), []
    for batch, accumulation in ((8, 1), (2, 4)):
        model = copy.deepcopy(classifier)
        arguments = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            optim='sgd',
            learning_rate=0.1,
            max_grad_norm=0.0,
            save_strategy='no',
            report_to='none',
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=data).train()
        pairs = zip(model.parameters(), classifier.parameters(), strict=True)
        found.append([(new - old).detach() for new, old in pairs])
    largest = max(float(step.abs().max()) for step in found[0])
    assert largest > 0
    for whole, accumulated in zip(*found, strict=True):
        helpers.assert_close(accumulated, whole, 1e-9, 'step', floor=largest)


@pytest.mark.parametrize(('size', 'config'), [((64, 64), {'crop_pct': 0.9}), ((48, 40), {'crop_mode': 'squash'})])
def test_the_image_processor_has_the_pixels_of_the_evaluation_transform(size, config):
    pytest.importorskip('transformers')
    from aft_vision.export.modeling_aft_vision import AFTVisionImageProcessor

    model = timm.create_model('aft_conv_nano', depth=1)
    model.pretrained_cfg.update(input_size=(3, *size), **config)
    options = image_processor(model, size)
    assert options is not None
    processor = AFTVisionImageProcessor(**{name: x for name, x in options.items() if name != 'auto_map'})
    transform = create_transform(**resolve_model_data_config(model))
    for photograph in helpers.photographs(3, (71, 94)):
        got = torch.as_tensor(processor(photograph, return_tensors='pt').pixel_values[0])
        torch.testing.assert_close(got, transform(photograph), rtol=0, atol=1e-6)


@pytest.mark.parametrize('config', [{'crop_mode': 'border'}, {'input_size': (3, 32, 48)}, {'interpolation': 'random'}])
def test_a_transform_that_no_image_processor_has_has_none(config):
    model = timm.create_model('aft_conv_nano', depth=1)
    model.pretrained_cfg.update({'input_size': (3, 32, 32), **config})
    assert image_processor(model, model.pretrained_cfg['input_size'][1:]) is None
