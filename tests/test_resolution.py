from pathlib import Path

import pytest
import timm
import torch
from helpers import assert_close, randn
from torch import nn

from aft_vision.resolution import (
    check_size,
    distinct_names,
    draw_sizes,
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


@pytest.mark.parametrize(('name', 'kwargs'), FIXED)
@torch.no_grad()
def test_a_model_of_fixed_size_is_resized_and_stays_as_it_is(name, kwargs):
    model, images = make_model(name, **kwargs), randn(2, 3, 48, 32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    single = make_model(name, **kwargs)
    single.set_input_size((48, 32))
    assert_close(resized_copy(model, (48, 32))(images), single(images), 1e-12)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    with pytest.raises(ValueError, match=r'at least 1 px, got 0'):
        resized_copy(model, 0)


@pytest.mark.parametrize(('name', 'kwargs'), [FLEXIBLE, *FIXED])
@torch.no_grad()
def test_padding_is_zeros_at_the_right_and_at_the_bottom(name, kwargs):
    model, images = make_model(name, **kwargs), randn(2, 3, 40, 52)
    padded = torch.zeros(2, 3, 48, 64, dtype=torch.float64)
    padded[:, :, :40, :52] = images
    expected = resized_copy(model, (48, 64))(padded)
    assert_close(resized_copy(model, (40, 52), pad=True)(images), expected, 1e-12)
    assert not model.patch_embed.dynamic_img_pad
    with pytest.raises(ValueError, match=r'multiples of the patch size \(16, 16\), got \(40, 52\)'):
        resized_copy(model, (40, 52))


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
        ({'max_tokens': 196}, 'native 196'),
    ],
)
def test_a_row_is_labelled_by_its_sizes(row, label):
    assert size_label(row) == label


def test_accuracy_has_standard_errors_and_the_size_of_training_is_marked():
    figure = {'top1': 36.0, 'top5': 90.0, 'samples': 100, 'images_per_second': 9.0, 'peak_memory_mb': 9.0}
    native = {**figure, 'max_tokens': 9}
    accuracy = draw_sizes([{**row(32), **figure}, {**row(64), **figure}, native], [64, 64]).axes[0]
    top1, whole, *_ = accuracy.containers
    for bars, count in ((top1, 2), (whole, 1)):
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
