from functools import partial
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from helpers import assert_close, generator, randn
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, RetinaNet

from aft_vision.models.pyramid import SimpleFeaturePyramid, padding_mask

CONV = dict(depth=2, embed_dim=32, num_heads=4, kernel_size=3)
FULL = dict(depth=2, embed_dim=32, bias_dim=8, dynamic_img_size=True)
MODELS = [('aft_conv_tiny', CONV), ('aft_full_tiny', FULL)]


def make_features(name: str, **kwargs: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, features_only=True, out_indices=(0, 1), **kwargs).eval()


def make_pyramid(name: str = 'aft_conv_tiny', **kwargs: Any) -> SimpleFeaturePyramid:
    torch.manual_seed(0)
    own = {key: kwargs.pop(key) for key in ('strides', 'extra_level') if key in kwargs}
    backbone = timm.create_model(name, features_only=True, **{'out_indices': (-1,), **kwargs})
    return SimpleFeaturePyramid(backbone, 16, **own)


@pytest.mark.parametrize(('name', 'kwargs'), MODELS)
@torch.no_grad()
def test_dense_features_of_a_padded_size_are_those_of_the_image_padded_by_hand(name, kwargs):
    image = randn(1, 3, 512, 683, dtype=torch.float32)
    padded = F.pad(image, (0, 5))
    model = make_features(name, dynamic_img_pad=True, **kwargs)
    assert model.feature_info.reduction() == [16, 16]
    features = model(image)
    assert [tuple(x.shape) for x in features] == [(1, 32, 32, 43)] * 2
    assert all(torch.isfinite(x).all() for x in features)
    for got, expected in zip(features, make_features(name, **kwargs)(padded), strict=True):
        assert torch.equal(got, expected)


@torch.no_grad()
def test_a_padding_mask_makes_dense_features_independent_of_the_batch():
    model = make_features('aft_conv_tiny', dynamic_img_pad=True, **CONV)
    image = randn(1, 3, 128, 171, dtype=torch.float32)
    batch = torch.zeros(2, 3, 192, 256)
    batch[0], batch[1, :, :128, :171] = randn(3, 192, 256, seed=1), image[0]
    mask = padding_mask([(192, 256), (128, 171)], (192, 256))
    alone = model(image)
    together = model.model.forward_intermediates(batch, attn_mask=mask, intermediates_only=True)
    for got, expected in zip(together, alone, strict=True):
        assert_close(got[1:, :, :8, :11], expected, 1e-5)
    seen = model(batch)
    assert (seen[1][1:, :, :8, :11] - alone[1]).norm() > 1e-3 * alone[1].norm()


def test_a_patch_with_one_pixel_of_the_image_counts():
    mask = padding_mask([(32, 17), (1, 48)], (32, 48))
    assert mask.tolist() == [[[True, True, False], [True, True, False]], [[True, True, True], [False, False, False]]]
    assert padding_mask([(8, 9)], (8, 12), patch_size=(8, 4)).tolist() == [[[True, True, True]]]
    assert padding_mask([(512, 683)], (512, 683)).shape == (1, 32, 43)
    assert padding_mask([(512, 683)], (512, 683)).all()


@pytest.mark.parametrize(
    ('patch_size', 'strides'), [(16, (4, 8, 16, 32)), (8, (4, 8, 16, 32)), (32, (4, 8, 16, 32)), (16, (8, 64))]
)
@torch.no_grad()
def test_maps_have_their_strides_for_any_patch_size(patch_size, strides):
    pyramid = make_pyramid(patch_size=patch_size, strides=strides, **CONV)
    maps = pyramid(randn(2, 3, 64, 128, dtype=torch.float32))
    assert {name: tuple(x.shape) for name, x in maps.items()} == {
        str(level): (2, 16, 64 // stride, 128 // stride) for level, stride in enumerate(strides)
    }
    assert pyramid.strides == strides
    assert pyramid.out_channels == 16


@pytest.mark.parametrize(
    ('name', 'kwargs'),
    [
        ('deit_tiny_patch16_224', dict(depth=1, embed_dim=32, num_heads=1)),
        ('resnet18', {}),
        ('swin_tiny_patch4_window7_224', dict(depths=(1, 1, 1, 1), embed_dim=16, num_heads=(1, 1, 1, 1))),
    ],
)
@torch.no_grad()
def test_any_timm_backbone_makes_a_pyramid(name, kwargs):
    pyramid = make_pyramid(name, extra_level=True, **kwargs).eval()
    maps = pyramid(randn(1, 3, 224, 224, dtype=torch.float32))
    assert [tuple(x.shape[1:]) for x in maps.values()] == [(16, side, side) for side in (56, 28, 14, 7, 4)]
    assert pyramid.strides == (4, 8, 16, 32, 64)


def norm_over_channels(x: Tensor, norm: nn.Module) -> Tensor:
    mean, variance = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
    return (x - mean) / (variance + 1e-6).sqrt() * norm.weight[:, None, None] + norm.bias[:, None, None]


@torch.no_grad()
def test_maps_equal_the_layers_of_the_paper_one_by_one():
    pyramid = make_pyramid(extra_level=True, **CONV).double()
    for parameter in pyramid.stages.parameters():
        parameter.normal_(generator=generator(3))
    image = randn(1, 3, 64, 96)
    (x,) = pyramid.backbone(image)
    four, eight, sixteen, thirty_two = pyramid.stages
    y = norm_over_channels(F.conv_transpose2d(x, four[0].weight, four[0].bias, stride=2), four[1])
    before = {
        '0': F.conv_transpose2d(F.gelu(y), four[3].weight, four[3].bias, stride=2),
        '1': F.conv_transpose2d(x, eight[0].weight, eight[0].bias, stride=2),
        '2': x,
        '3': x.unfold(2, 2, 2).unfold(3, 2, 2).amax((-2, -1)),
    }
    maps = pyramid(image)
    for (name, y), stage in zip(before.items(), (four, eight, sixteen, thirty_two), strict=True):
        assert y.shape[1] == {'0': 8, '1': 16, '2': 32, '3': 32}[name]
        y = norm_over_channels(F.conv2d(y, stage[-4].weight), stage[-3])
        y = norm_over_channels(F.conv2d(y, stage[-2].weight, padding=1), stage[-1])
        assert_close(maps[name], y, 1e-10)
    assert torch.equal(maps['pool'], maps['3'][:, :, ::2, ::2])


def make_targets() -> list[dict[str, Tensor]]:
    boxes = [[[8.0, 8.0, 60.0, 70.0], [40.0, 30.0, 90.0, 80.0]], [[5.0, 10.0, 50.0, 60.0]]]
    labels = [[1, 2], [1]]
    return [{'boxes': torch.tensor(b), 'labels': torch.tensor(n)} for b, n in zip(boxes, labels, strict=True)]


def make_images() -> list[Tensor]:
    return [torch.rand(3, *size, generator=generator(1)) for size in ((96, 128), (112, 80))]


@pytest.mark.parametrize(
    ('name', 'kwargs', 'levels', 'make_detector'),
    [
        ('aft_conv_tiny', CONV, dict(extra_level=True), FasterRCNN),
        ('aft_full_tiny', FULL, dict(extra_level=True), FasterRCNN),
        # Its scores start at 0.01.
        ('aft_conv_tiny', CONV, dict(strides=(8, 16, 32, 64, 128)), partial(RetinaNet, score_thresh=0.0)),
    ],
)
def test_a_detector_trains_its_backbone_and_finds_boxes(name, kwargs, levels, make_detector):
    pyramid = make_pyramid(name, **levels, **kwargs)
    model = make_detector(pyramid, num_classes=3, min_size=96, max_size=128)
    for key, value in pyramid.named_parameters():
        # Eq. 8 starts at a scale of 0, where the raw kernel gets no gradient yet.
        if key.endswith('kernel.gamma'):
            nn.init.constant_(value, 0.1)
    before = {key: value.detach().clone() for key, value in pyramid.named_parameters()}
    losses = model(make_images(), make_targets())
    assert all(torch.isfinite(loss) for loss in losses.values())
    sum(losses.values()).backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.any() for p in model.parameters())
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    assert all(not torch.equal(before[key], value) for key, value in pyramid.named_parameters())
    model.eval()
    with torch.no_grad():
        found = model(make_images())
    assert [set(x) for x in found] == [{'boxes', 'labels', 'scores'}] * 2
    assert sum(len(x['boxes']) for x in found) > 0
    assert all(torch.isfinite(x['boxes']).all() for x in found)


@torch.no_grad()
def test_the_padding_of_a_batch_can_be_masked():
    pyramid = make_pyramid(**CONV).eval()
    image = randn(1, 3, 64, 96, dtype=torch.float32)
    batch = F.pad(image, (0, 160, 0, 64))
    alone, masked = pyramid(image)['2'], pyramid(batch, padding_mask([(64, 96)], (128, 256)))['2']
    # The 3 x 3 convolution at the border sees what lies beyond it.
    assert_close(masked[:, :, :3, :5], alone[:, :, :3, :5], 1e-5)
    seen = pyramid(batch)['2'][:, :, :3, :5]
    assert (seen - alone[:, :, :3, :5]).norm() > 3e-3 * alone.norm()


SINGLE = r'whose stride is a power of two and at least 4, got a '


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda: make_pyramid(patch_size=14, **CONV), rf'{SINGLE}.* of the strides \[14\]'),
        (lambda: make_pyramid(out_indices=(0, 1), **CONV), rf'{SINGLE}.* of the strides \[16, 16\]'),
        (lambda: SimpleFeaturePyramid(timm.create_model('aft_conv_tiny', **CONV)), f'{SINGLE}AFTVisionTransformer'),
        (lambda: make_pyramid(strides=(4, 12), **CONV), r'ascending powers of two, got \(4, 12\)'),
        (lambda: make_pyramid(strides=(8, 4), **CONV), r'ascending powers of two, got \(8, 4\)'),
        (
            lambda: make_pyramid('resnet18')(torch.zeros(1, 3, 64, 64), torch.ones(1, 2, 2, dtype=torch.bool)),
            'attn_mask needs an AFT backbone, got a FeatureListNet',
        ),
        (lambda: padding_mask([(33, 16)], (32, 32)), r'at most 32 x 32 pixels, got \[\(33, 16\)\]'),
    ],
)
def test_a_wrong_pyramid_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
