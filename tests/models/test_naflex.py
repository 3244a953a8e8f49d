"""Dicts of timm's NaFlex loader: each image of a batch keeps its own grid."""

from typing import Any

import pytest
import timm
import torch
from helpers import CLOTHING, assert_close, randn
from timm.data import create_dataset
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_loader import create_naflex_loader
from timm.data.naflex_transforms import Patchify
from torch import Tensor

import aft_vision  # noqa: F401

SMALL: dict[str, Any] = dict(patch_size=8, img_size=32, embed_dim=16, depth=2, num_classes=5)
MODELS = {
    'aft_conv_tiny': dict(num_heads=16, kernel_size=5),
    'aft_conv_tiny_k11_h32': dict(num_heads=4, kernel_size=5),
    'aft_axial_tiny': dict(num_heads=4, window_size=(3, 5), attention_blocks=[1]),
    'aft_axial_tiny, resampled': dict(num_heads=4, window_size=3, resample_bias=True),
    'aft_full_tiny': dict(dynamic_img_size=True, bias_dim=8),
    'aft_full_tiny, no position': dict(
        dynamic_img_size=True, bias_dim=8, class_token=False, pos_embed='none', global_pool='avg'
    ),
    'aft_simple_tiny': dict(dynamic_img_size=True),
    'aft_simple_tiny, averaged': dict(dynamic_img_size=True, class_token=False, global_pool='avg'),
}
# Two that are equal, and two that are padded to one.
GRIDS = [(3, 5), (4, 2), (3, 5), (1, 7), (8, 7), (8, 8)]


def build(name: str, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = timm.create_model(name.split(',')[0], **{**SMALL, **MODELS[name], **kwargs}).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def images_of(*grids: tuple[int, int]) -> list[Tensor]:
    return [randn(3, 8 * height, 8 * width, seed=index).double() for index, (height, width) in enumerate(grids)]


def collate(images: list[Tensor], length: int = 17) -> dict[str, Any]:
    batch, _ = NaFlexCollator(length)([(Patchify(8)(image), 0) for image in images])
    # The collator makes float32.
    batch['patches'] = batch['patches'].double()
    return batch


def exact(batch: dict[str, Any]) -> list[Tensor]:
    """The images of a batch, as the collator rounded them."""
    found = []
    for patches, coord, valid in zip(batch['patches'], batch['patch_coord'], batch['patch_valid'], strict=True):
        rows, columns = (coord[valid].amax(0) + 1).tolist()
        pixels = patches[valid].view(rows, columns, 8, 8, 3)
        found.append(pixels.permute(4, 0, 2, 1, 3).reshape(1, 3, 8 * rows, 8 * columns))
    return found


@pytest.mark.parametrize('name', MODELS)
def test_an_image_in_a_batch_of_mixed_grids_equals_the_image_alone(name):
    model, batch = build(name), collate(images_of(*GRIDS), 64)
    logits, features = model(batch), model.forward_features(batch)
    options: dict[str, Any] = dict(indices=[0], norm=True, output_fmt='NLC', output_dict=True)
    found = model.forward_intermediates(batch, **options)
    assert torch.equal(features['patch_valid'], batch['patch_valid'])
    for index, image in enumerate(exact(batch)):
        assert_close(logits[index], model(image)[0], 1e-10)
        tokens = model.forward_features(image)[0]
        assert_close(features['patches'][index, : len(tokens)], tokens, 1e-10)
        assert not features['patches'][index, len(tokens) :].any()
        alone = model.forward_intermediates(image, **options)
        spatial = alone['image_intermediates'][0][0]
        assert_close(found['image_intermediates'][0][index, : len(spatial)], spatial, 1e-10)
        assert not found['image_intermediates'][0][index, len(spatial) :].any()
        assert_close(found['image_features'][index, : len(tokens)], tokens, 1e-10)


@pytest.mark.parametrize('name', ['aft_conv_tiny', 'aft_full_tiny'])
def test_gradients_are_those_of_the_images_alone(name):
    model, batch = build(name), collate(images_of((3, 2), (6, 7), (7, 7)), 50)
    batch['patches'].requires_grad_()
    weight = randn(3, 5, seed=9).double()
    (model(batch) * weight).sum().backward()
    gradients = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    images = [image.requires_grad_() for image in exact({**batch, 'patches': batch['patches'].detach()})]
    sum((model(image) * row).sum() for image, row in zip(images, weight, strict=True)).backward()
    for key, parameter in model.named_parameters():
        assert_close(gradients[key], parameter.grad, 1e-10)
    for patches, valid, image in zip(batch['patches'].grad, batch['patch_valid'], images, strict=True):
        assert_close(patches[valid], Patchify(8)(image.grad[0])['patches'], 1e-10)
        assert not patches[~valid].any()


def test_timms_scripts_find_the_patch_size():
    # As train.py and validate.py of timm's repository do; otherwise they take patches of 16 pixels.
    model = timm.create_model('aft_conv_nano').eval()
    dataset = create_dataset('', root=str(CLOTHING / 'validation'), is_training=False)
    loader = create_naflex_loader(
        dataset, patch_size=model.embeds.patch_size, max_seq_len=36, batch_size=4, is_training=False, num_workers=0,
        use_prefetcher=False, device=torch.device('cpu'),
    )  # fmt: skip
    batch, target = next(iter(loader))
    assert model(batch).shape == (len(target), 10)


# The position embedding of timm takes no batch without images.
@pytest.mark.parametrize('name', [name for name in MODELS if 'dynamic_img_size' not in MODELS[name]])
def test_a_batch_without_images_has_no_logits(name):
    model, batch = build(name), collate(images_of((2, 3)))
    empty = {key: batch[key][:0] for key in ('patches', 'patch_coord', 'patch_valid')}
    assert model(empty).shape == (0, 5)
    assert model.forward_features(empty)['patches'].shape[0] == 0


def test_patches_may_come_in_any_order_and_some_may_be_missing():
    model, batch = build('aft_conv_tiny'), collate(images_of((3, 4)), 12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    shuffled = {name: batch[name][:, order] for name in ('patches', 'patch_coord', 'patch_valid')}
    assert_close(model(shuffled), model(batch), 1e-10)
    features = model.forward_features(batch)['patches']
    assert_close(model.forward_features(shuffled)['patches'], features[:, order], 1e-10)
    # A patch that is left out counts as one that a mask leaves out.
    mask = torch.ones(1, 3, 4, dtype=torch.bool)
    mask[0, 1, 2] = False
    kept = {name: batch[name][:, mask.flatten()] for name in ('patches', 'patch_coord', 'patch_valid')}
    assert_close(model(kept), model(exact(batch)[0], attn_mask=mask), 1e-10)


def test_a_batch_of_long_and_high_images_is_computed_with_little_padding(monkeypatch):
    model, grids = build('aft_conv_tiny'), [(1, 16), (16, 1), (4, 4), (2, 8), (8, 2), (1, 16), (17, 1)]
    counts, embed = [], model.patch_embed.forward
    monkeypatch.setattr(
        model.patch_embed, 'forward', lambda x: counts.append(len(x) * x[0, 0].numel() // 64) or embed(x)
    )
    batch = collate(images_of(*grids))
    logits = model(batch)
    assert sum(counts) <= 1.1 * sum(height * width for height, width in grids)
    assert len(counts) < len(grids)
    for row, image in zip(logits, exact(batch), strict=True):
        assert_close(row, model(image)[0], 1e-10)


def test_what_does_not_fit_is_rejected():
    model, batch = build('aft_conv_tiny'), collate(images_of((2, 2)), 4)
    with pytest.raises(ValueError, match='got no patch_valid'):
        model({'patches': batch['patches'], 'patch_coord': batch['patch_coord']})
    with pytest.raises(ValueError, match=r'8 x 8 pixels of 3 channels, got \[1, 4, 768\]'):
        model({**batch, 'patches': torch.zeros(1, 4, 768)})
    with pytest.raises(ValueError, match='a bool patch_valid must have'):
        model({**batch, 'patch_valid': batch['patch_valid'].float()})
    with pytest.raises(ValueError, match="must be 'NLC', got 'NCHW'"):
        model.forward_intermediates(batch)
    with pytest.raises(ValueError, match='whose mask is patch_valid'):
        model(batch, attn_mask=torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match='got attention pooling'):
        build('aft_conv_tiny', global_pool='map')(batch)
    with pytest.raises(ValueError, match='dynamic_img_size=True'):
        build('aft_full_tiny', dynamic_img_size=False)(batch)
