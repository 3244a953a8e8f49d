from collections.abc import Sequence
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from helpers import assert_close, randn
from torch import Tensor, nn

from aft_vision.resolution import (
    AveragedPrediction,
    check_size,
    distinct_names,
    draw_sizes,
    resize_images,
    resized_copy,
    size_label,
)

SMALL = dict(depth=1, embed_dim=16, num_classes=5)
FLEXIBLE = ('aft_conv_tiny', dict(num_heads=4, kernel_size=3))
FIXED = [('deit_tiny_patch16_224', dict(num_heads=1, img_size=64)), ('aft_full_tiny', dict(bias_dim=8, img_size=64))]


def make_model(name: str, **kwargs: object) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, **SMALL, **kwargs).double().eval()
    for parameter in model.parameters():
        # The head starts near 0, and all classes are then equally likely.
        nn.init.trunc_normal_(parameter, std=0.3)
    return model


def shrink(images: Tensor, side: int) -> Tensor:
    return F.interpolate(images, (side, side), mode='bicubic', antialias=True)


def log_mean(probabilities: Sequence[Tensor]) -> Tensor:
    return torch.log(sum(probabilities) / len(probabilities))


@pytest.mark.parametrize('flip', [False, True])
@torch.no_grad()
def test_predictions_are_averaged_as_probabilities(flip):
    model, images = make_model(FLEXIBLE[0], **FLEXIBLE[1]), randn(3, 3, 64, 64)
    averaged = AveragedPrediction(model, [32, 48, 64], flip=flip)
    views = [shrink(images, 32), shrink(images, 48), images]
    if flip:
        views += [view[..., torch.arange(view.shape[-1] - 1, -1, -1)] for view in views]
    expected = log_mean([model(view).softmax(-1) for view in views])
    assert_close(averaged(images), expected, 1e-12)
    assert_close(averaged(images).exp().sum(-1), torch.ones(3), 1e-12)
    # The views differ, so that the mean is none of them.
    assert (expected - model(images).log_softmax(-1)).norm() > 1e-3
    assert averaged.input_size == (64, 64)


@pytest.mark.parametrize(('name', 'kwargs'), FIXED)
@torch.no_grad()
def test_a_model_of_fixed_size_is_resized_once_for_each_size(name, kwargs):
    model, images = make_model(name, **kwargs), randn(2, 3, 64, 64)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    probabilities = []
    for side in (32, 48, 64):
        single = make_model(name, **kwargs)
        single.load_state_dict(before)
        single.set_input_size((side, side))
        probabilities.append(single(shrink(images, side) if side < 64 else images).softmax(-1))
    assert_close(AveragedPrediction(model, [32, 48, 64])(images), log_mean(probabilities), 1e-12)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert model(images).shape == (2, 5)


@torch.no_grad()
def test_one_view_is_the_prediction_itself():
    model, images = make_model(FLEXIBLE[0], **FLEXIBLE[1]), randn(2, 3, 32, 48)
    expected = model(images).log_softmax(-1)
    assert_close(AveragedPrediction(model)(images), expected, 1e-12)
    assert_close(AveragedPrediction(model, [(32, 48)])(images), expected, 1e-12)
    assert AveragedPrediction(model).input_size is None


@torch.no_grad()
def test_a_model_in_bfloat16_takes_images_of_other_sizes_and_is_averaged_in_float32():
    model, images = make_model(FLEXIBLE[0], **FLEXIBLE[1]), randn(2, 3, 48, 48)
    expected = AveragedPrediction(model, [32, 48])(images)
    found = AveragedPrediction(model.bfloat16(), [32, 48])(images.bfloat16())
    assert found.dtype == torch.float32
    assert_close(found.double(), expected, 3e-2)
    # In bfloat16 the sum would be off by 4e-3.
    assert_close(found.exp().sum(-1), torch.ones(2), 1e-6)


def test_a_size_of_no_pixels_is_rejected():
    with pytest.raises(ValueError, match=r'at least 1 px, got \(0, 0\)'):
        AveragedPrediction(make_model(FLEXIBLE[0], **FLEXIBLE[1]), [0])


def test_one_number_is_no_list_of_sizes():
    with pytest.raises(ValueError, match=r'several sizes, such as \[64\], got 64'):
        AveragedPrediction(make_model(FLEXIBLE[0], **FLEXIBLE[1]), 64)


def test_a_model_that_takes_any_size_is_shared():
    model = make_model(FLEXIBLE[0], **FLEXIBLE[1])
    assert sum(p.numel() for p in AveragedPrediction(model, [32, 64]).parameters()) == sum(
        p.numel() for p in model.parameters()
    )


@pytest.mark.parametrize(('name', 'kwargs'), [FLEXIBLE, *FIXED])
@torch.no_grad()
def test_padding_is_zeros_at_the_right_and_at_the_bottom(name, kwargs):
    model, images = make_model(name, **kwargs), randn(2, 3, 40, 52)
    padded = torch.zeros(2, 3, 48, 64, dtype=torch.float64)
    padded[:, :, :40, :52] = images
    expected = resized_copy(model, (48, 64))(padded)
    assert_close(resized_copy(model, (40, 52), pad=True)(images), expected, 1e-12)
    averaged = AveragedPrediction(model, [(40, 52)], pad=True)
    assert_close(averaged(images), expected.log_softmax(-1), 1e-12)
    assert not model.patch_embed.dynamic_img_pad
    with pytest.raises(ValueError, match=r'multiples of the patch size \(16, 16\), got \(40, 52\)'):
        resized_copy(model, (40, 52))


@pytest.mark.parametrize(
    ('size', 'rows', 'columns'),
    [
        ((24, 48), slice(None), slice(None)),
        ((24, 24), slice(None), slice(24, 72)),
        ((12, 48), slice(12, 36), slice(None)),
    ],
)
def test_another_aspect_ratio_takes_the_centre_undistorted(size, rows, columns):
    images = randn(1, 3, 48, 96)
    expected = F.interpolate(images[..., rows, columns], size, mode='bicubic', antialias=True)
    assert_close(resize_images(images, size), expected, 1e-12)


def test_a_model_that_has_no_set_input_size_is_rejected():
    with pytest.raises(ValueError, match='a model that can be resized, got a MlpMixer'):
        check_size(timm.create_model('mixer_s32_224'), 64, pad=True)


def row(side: int) -> dict[str, int]:
    return {'height': side, 'width': side}


@pytest.mark.parametrize(
    ('row', 'label'),
    [
        (row(224), '224'),
        ({'height': 384, 'width': 256}, '384x256'),
        ({**row(288), 'scales': [[192, 192], [288, 256]]}, '192+288x256'),
    ],
)
def test_a_row_is_labelled_by_its_sizes(row, label):
    assert size_label(row) == label


def test_accuracy_has_standard_errors_and_the_size_of_training_is_marked():
    figure = {'top1': 36.0, 'top5': 90.0, 'samples': 100, 'images_per_second': 9.0, 'peak_memory_mb': 9.0}
    averaged = {**row(64), **figure, 'scales': [[32, 32], [64, 64]]}
    accuracy = draw_sizes([{**row(32), **figure}, {**row(64), **figure}, averaged], [64, 64]).axes[0]
    top1, average, *_ = accuracy.containers
    for bars, count in ((top1, 2), (average, 1)):
        (spread,) = bars.lines[2]
        # Of 100 images at 36 %: 4.8 points.
        assert [tuple(end[1] for end in each) for each in spread.get_segments()] == [
            pytest.approx((31.2, 40.8))
        ] * count
    line = next(line for line in accuracy.lines if line.get_label() == 'size of training')
    assert list(line.get_xdata()) == [1, 1]


@pytest.mark.parametrize(
    ('paths', 'names'),
    [
        (['runs/a/best.pth', 'runs/b/best.pth'], ['a', 'b']),
        (['runs/a/best.pth', 'runs/a/last.pth'], ['best.pth', 'last.pth']),
        (['x/a/best.pth', 'y/b/export'], ['x/a/best.pth', 'y/b/export']),
        (['best.pth', 'best.pth'], ['best.pth', 'best.pth']),
    ],
)
def test_checkpoints_are_named_by_what_tells_them_apart(paths, names):
    assert distinct_names([Path(path) for path in paths]) == names
