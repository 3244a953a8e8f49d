import pytest
import timm
import torch
from torch import nn

from aft_vision.models.block_alignment import block_errors, block_tokens, pair_blocks, pair_models, select_blocks
from aft_vision.models.deit_transfer import deit_to_aft

SMALL = dict(embed_dim=64, patch_size=8, num_classes=3)


def make_vit(depth: int = 2, **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model('vit_tiny_patch16_224', **SMALL, img_size=32, depth=depth, num_heads=1, **kwargs).eval()


def make_images() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_blocks_are_paired_in_order_and_as_evenly_as_possible():
    assert pair_blocks(3, 3) == [range(0, 1), range(1, 2), range(2, 3)]
    assert pair_blocks(2, 5) == [range(0, 2), range(2, 5)]
    assert pair_blocks(12, 24)[-1] == range(22, 24)
    with pytest.raises(ValueError, match='at least the 3 blocks of the model, got 2'):
        pair_blocks(3, 2)


def test_the_last_block_of_each_pair_gives_the_weights():
    vit = make_vit(depth=5)
    selected, source = select_blocks(vit.state_dict(), pair_blocks(2, 5)), vit.state_dict()
    for place, taken in enumerate((1, 4)):
        assert torch.equal(selected[f'blocks.{place}.mlp.fc1.weight'], source[f'blocks.{taken}.mlp.fc1.weight'])
    assert selected.keys() == make_vit(depth=2).state_dict().keys()
    assert torch.equal(selected['pos_embed'], source['pos_embed'])


def test_the_tokens_of_the_blocks_are_those_of_the_forward_pass():
    vit, images = make_vit(), make_images()
    tokens = block_tokens(vit, images)
    assert [x.shape for x in tokens] == [(2, 17, 64)] * 3
    torch.testing.assert_close(vit.blocks[1](vit.blocks[0](tokens[0])), tokens[2])
    torch.testing.assert_close(vit.norm(tokens[2]), vit.forward_features(images))
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in vit.blocks)


def test_copied_blocks_of_attention_have_no_error():
    vit = make_vit(depth=4)
    model = timm.create_model('aft_simple_tiny', **SMALL, img_size=32, depth=4, attention_blocks=[0, 1, 2]).eval()
    model.load_state_dict(deit_to_aft(vit.state_dict(), model)[0])
    *copied, mixed = block_errors(model, block_tokens(vit, make_images()), pair_blocks(4, 4), (4, 4))
    assert max(copied) < 1e-9
    assert mixed > 1e-6


def test_the_error_is_relative_to_what_the_blocks_of_the_vit_add_to_the_patches():
    vit, images, pairs = make_vit(depth=4), make_images(), pair_blocks(2, 4)
    model = timm.create_model('aft_axial_tiny', **SMALL, depth=2, num_heads=4).eval()
    tokens = block_tokens(vit, images)
    errors = block_errors(model, tokens, pairs, (4, 4))
    for error, block, pair in zip(errors, model.double().blocks, pairs, strict=True):
        x, wanted = (tokens[place][:, 1:].double() for place in (pair.start, pair.stop))
        expected = (block(x, (4, 4)) - wanted).square().sum() / (wanted - x).square().sum()
        torch.testing.assert_close(error.double(), expected, rtol=1e-5, atol=0)


def test_other_patches_than_the_models_are_an_error():
    model = timm.create_model('aft_axial_tiny', **SMALL, depth=2, num_heads=4)
    with pytest.raises(ValueError, match='a teacher with the 25 tokens of the model, 5 x 5 of them patches, got 17'):
        block_errors(model, block_tokens(make_vit(), make_images()), pair_blocks(2, 2), (5, 5))
    # Patches of half the side have more tokens, the last of which are no part of the image that the model sees.
    with pytest.raises(ValueError, match=r'the patch size of the model, \(8, 8\), got \(4, 4\)'):
        pair_models(model, timm.create_model('vit_tiny_patch16_224', patch_size=4, depth=2))
    assert pair_models(model, make_vit()) == pair_blocks(2, 2)
