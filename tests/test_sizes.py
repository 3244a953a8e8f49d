import pytest
import timm
import torch

from aft_vision.sizes import check_image_size, check_resizable, default_size, resize_model, training_size

TINY = dict(depth=1, embed_dim=8, patch_size=8)


def test_a_model_is_made_for_the_size_of_its_arguments_or_of_its_preprocessing():
    conv = dict(TINY, num_heads=4, kernel_size=3, pretrained_cfg_overlay=dict(input_size=(3, 48, 64)))
    assert default_size(timm.create_model('aft_conv_tiny', **conv)) == (48, 64)
    assert default_size(timm.create_model('aft_full_tiny', **TINY, img_size=(32, 40))) == (32, 40)
    assert default_size(torch.nn.Linear(1, 1)) == (224, 224)


def test_the_training_size_is_that_of_the_run_if_the_checkpoint_says_so():
    model = timm.create_model('aft_full_tiny', **TINY, pretrained_cfg_overlay=dict(input_size=(3, 48, 64)))
    assert training_size(model) == (48, 64)
    assert training_size(model, {'model_name': 'aft_full_tiny'}) == (48, 64)
    assert training_size(model, {'config': {'data': {'img_size': (32, 40)}}}) == (32, 40)


@pytest.mark.parametrize(('name', 'kwargs'), [('aft_full_tiny', {}), ('vit_tiny_patch16_224', dict(num_heads=1))])
def test_a_model_of_fixed_input_size_is_resized(name, kwargs):
    model = timm.create_model(name, **TINY, **kwargs, img_size=32)
    assert resize_model(model, (32, 48)) is model
    assert model.patch_embed.grid_size == (4, 6)
    assert default_size(model) == (32, 48)


def test_any_other_model_stays_as_it_is():
    model = timm.create_model('aft_conv_tiny', **TINY, num_heads=4, kernel_size=3)
    before = dict(model.state_dict())
    assert resize_model(model, (32, 48)) is model
    assert resize_model(model, None) is model
    assert model.state_dict().keys() == before.keys()
    assert model.patch_embed.grid_size == (28, 28)


def test_a_size_that_patches_do_not_fill_is_rejected():
    model = timm.create_model('aft_full_tiny', **TINY, img_size=32)
    for check in (check_image_size, resize_model):
        with pytest.raises(ValueError, match=r'multiples of the patch size \(8, 8\), got \(32, 44\)'):
            check(model, (32, 44))
    assert model.patch_embed.grid_size == (4, 4)


def test_a_model_that_cannot_be_resized_keeps_its_size():
    model = torch.nn.Linear(1, 1)
    model.pretrained_cfg = {'fixed_input_size': True, 'input_size': (3, 48, 48)}
    assert resize_model(model, (48, 48)) is model
    for check in (check_resizable, resize_model):
        with pytest.raises(ValueError, match='expected a model that can be resized, got a Linear, which cannot'):
            check(model, (32, 32))
