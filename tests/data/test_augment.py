import numpy as np
import pytest
import torch
from helpers import NO_AUGMENTATION
from PIL import Image

from aft_vision.data import Augmentation, BatchAugmentation
from aft_vision.data.augment import eval_transform, train_transform
from aft_vision.data.sampling import seed_generators

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


def make_batch(size: int = 8, side: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(size, 3, side, side, generator=generator), torch.arange(size) % 5


def augment(options: Augmentation, seed: int = 0, smoothing: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    seed_generators(seed)
    images, targets = make_batch()
    return BatchAugmentation(options, 5, smoothing)(images.clone(), targets)


def only(**options: float) -> Augmentation:
    return Augmentation(**{'random_erasing': 0.0, 'mixup': 0.0, 'cutmix': 0.0, **options})


def test_nothing_chosen_changes_nothing():
    images, targets = augment(NO_AUGMENTATION)
    assert torch.equal(images, make_batch()[0])
    assert torch.equal(targets, make_batch()[1])


def test_mixup_mixes_each_image_with_its_mirror_in_the_batch_and_smooths_the_labels():
    images, targets = augment(only(mixup=0.8), smoothing=0.1)
    plain, labels = make_batch()
    one_hot = 0.9 * torch.nn.functional.one_hot(labels, 5).float() + 0.02
    share = (targets[0, 0].item() - 0.02) / 0.9
    assert 0 < share < 1
    torch.testing.assert_close(images, share * plain + (1 - share) * plain.flip(0))
    torch.testing.assert_close(targets, share * one_hot + (1 - share) * one_hot.flip(0))


def test_erasing_puts_normal_noise_in_a_rectangle_of_every_image():
    images, targets = augment(only(random_erasing=1.0))
    changed = (images != make_batch()[0]).all(1).flatten(1).float().mean(1)
    assert (changed > 0.01).all()
    assert (changed < 0.4).all()
    assert torch.equal(targets, make_batch()[1])


def test_no_mix_probability_means_no_mixing():
    assert not only(mixup=0.8, mix_prob=0.0).mixes
    assert only(mixup=0.8).mixes
    assert only(cutmix=0.8).mixes
    assert not only().mixes


@pytest.mark.parametrize('policy', ['rand-m9-mstd0.5-inc1', 'rand-m10-inc1', 'original', 'v0r'])
def test_posterize_to_no_bits_gives_a_black_image(policy: str):
    transform = train_transform((16, 16), Augmentation(auto_augment=policy), MEAN, STD)
    (step,) = [step for step in transform.transforms if hasattr(step, 'ops') or hasattr(step, 'policy')]
    ops = step.ops if hasattr(step, 'ops') else [op for pair in step.policy for op in pair]
    posterize = [op for op in ops if op.name.startswith('Posterize')]
    assert posterize
    for op in posterize:
        assert op.aug_fn(Image.new('RGB', (4, 4), (200, 100, 50)), 0).getextrema() == ((0, 0),) * 3
        assert op.aug_fn(Image.new('RGB', (4, 4), (200, 100, 50)), 1).getpixel((0, 0)) == (128, 0, 0)


def test_without_augmentation_training_sees_the_whole_image_as_uint8():
    pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    image = train_transform((16, 16), NO_AUGMENTATION, MEAN, STD)(Image.fromarray(pixels))
    assert torch.equal(torch.as_tensor(image), torch.from_numpy(pixels).permute(2, 0, 1))


@pytest.mark.parametrize('crop_pct', [0.0, 1.5])
def test_an_impossible_crop_is_rejected(crop_pct: float):
    with pytest.raises(ValueError, match=r'crop_pct must be in \(0, 1\], got'):
        eval_transform((16, 16), crop_pct)


@pytest.mark.parametrize(
    'options',
    [
        {'scale': (0.5, 0.1)},
        {'hflip': 1.5},
        {'random_erasing': -0.1},
        {'mix_prob': 2.0},
        {'mix_switch_prob': -1.0},
        {'mixup': -0.1},
        {'cutmix': float('nan')},
        {'color_jitter': -1.0},
        {'repeats': 0},
        {'auto_augment': 'foo'},
        {'auto_augment': 'rand-q9'},
    ],
)
def test_an_impossible_augmentation_is_rejected(options: dict[str, float]):
    with pytest.raises(ValueError, match=next(iter(options))):
        Augmentation(**options)


def ramp(height: int, width: int) -> Image.Image:
    """A grey image that brightens to the right and to the bottom."""
    rows, columns = np.linspace(0, 90, height)[:, None], np.linspace(0, 150, width)
    return Image.fromarray((rows + columns).astype(np.uint8)).convert('RGB')


@pytest.mark.parametrize('size', [(64, 64), (48, 80)])
@pytest.mark.parametrize('shape', [(40, 900), (900, 40), (200, 200), (3, 300)])
def test_a_crop_before_resizing_equals_one_after_it(monkeypatch, size, shape):
    image, transform = ramp(*shape), eval_transform(size, 0.875)
    after = transform(image)
    monkeypatch.setattr('aft_vision.data.augment.MAX_RESIZED_PIXELS', 0)
    torch.testing.assert_close(transform(image).int(), after.int(), rtol=0, atol=1)


@pytest.mark.parametrize('size', [(224, 224), (224, 160)])
@pytest.mark.parametrize('shape', [(1, 40_000), (40_000, 1)])
def test_a_thin_image_is_evaluated_in_little_memory(monkeypatch, size, shape):
    resize = Image.Image.resize

    def bounded(image, size, *args):
        assert size[0] * size[1] <= 2**24
        return resize(image, size, *args)

    monkeypatch.setattr('PIL.Image.Image.resize', bounded)
    pixels = eval_transform(size, 0.875)(ramp(*shape))
    assert pixels.shape == (3, *size)
    # It shows the centre, which is less than a pixel of its length.
    assert pixels.int().sub(int(ramp(*shape).getpixel((shape[1] // 2, shape[0] // 2))[0])).abs().max() <= 1
