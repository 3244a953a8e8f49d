import pytest
import timm
import torch

from aft_vision.layers import AFTMixer
from aft_vision.visualize import capture_mixers

TINY = dict(depth=2, embed_dim=16, patch_size=8, num_classes=3)


def test_every_registered_model_gives_its_inputs():
    for name in timm.list_models(module='aft_vit'):
        heads = {'num_heads': 4} if '_conv_' in name or '_axial_' in name else {}
        model = timm.create_model(name, **TINY, **heads, img_size=32)
        logits, layers = capture_mixers(model, torch.zeros(2, 3, 32, 32))
        assert logits.shape == (2, 3)
        assert [inputs.v.shape for inputs in layers] == [(2, 16 + model.num_prefix_tokens, 16)] * 2
        assert layers[0].grid == (4, 4)
        assert layers[1].k.shape == (2, 16 + model.num_prefix_tokens, heads.get('num_heads', 16))


def test_the_output_is_that_of_the_model_in_evaluation_and_the_mode_stays():
    model = timm.create_model('aft_conv_tiny', **TINY, num_heads=4, gumbel=True, drop_path_rate=0.5)
    torch.nn.init.normal_(model.blocks[0].attn.kernel.gamma)
    images = torch.randn(1, 3, 24, 40, generator=torch.Generator().manual_seed(0))
    logits, layers = capture_mixers(model, images)
    assert model.training
    assert model.blocks[1].training
    assert not logits.requires_grad
    assert layers[0].grid == (3, 5)
    torch.testing.assert_close(logits, model.eval()(images).detach())


def test_the_keys_are_those_of_the_projection():
    model = timm.create_model('aft_full_tiny', **TINY, img_size=32).eval()
    images = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found: list[torch.Tensor] = []
    model.blocks[0].norm1.register_forward_hook(lambda _module, _inputs, x: found.append(x))
    _, layers = capture_mixers(model, images)
    x = found[0]
    keys = torch.nn.functional.linear(x, model.blocks[0].attn.qkv.weight[16:32], model.blocks[0].attn.qkv.bias[16:32])
    torch.testing.assert_close(layers[0].k, keys.detach())


def test_nothing_stays_hooked_after_a_failure():
    model = timm.create_model('aft_full_tiny', **TINY, img_size=32)
    with pytest.raises(ValueError, match='takes images of 32 x 32'):
        capture_mixers(model, torch.zeros(1, 3, 64, 64))
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model.training


def test_a_model_of_other_mixers_is_rejected():
    model = timm.create_model('vit_tiny_patch16_224', **TINY, num_heads=2)
    with pytest.raises(ValueError, match='token mixers of AFTMixer, got VisionTransformer'):
        capture_mixers(model, torch.zeros(1, 3, 224, 224))


def test_a_bare_mixer_without_patches_is_rejected():
    with pytest.raises(ValueError, match="timm's patch_embed, got AFTMixer"):
        capture_mixers(AFTMixer(8, 8), torch.zeros(1, 3, 32, 32))
