from pathlib import Path

import pytest
import torch
from PIL import Image
from timm.utils import random_seed

from aft_vision.data import Augmentation, create_eval_loader, create_loaders, find_split

CLOTHING = Path(__file__).parents[1] / 'assets' / 'clothing'


def make_folder(root: Path, splits: dict[str, list[str]], images: int = 2, size: tuple[int, int] = (40, 30)) -> Path:
    """An ImageFolder whose class i has the grey value 20 * i."""
    for split, classes in splits.items():
        for index, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(images):
                Image.new('RGB', size, (20 * index,) * 3).save(folder / f'{number}.png')
    return root


def test_embedded_photographs_are_balanced_and_small():
    for split, count in (('train', 60), ('validation', 20)):
        classes = sorted((CLOTHING / split).iterdir())
        assert len(classes) == 10
        assert {len(list(folder.glob('*.jpg'))) for folder in classes} == {count}
    assert sum(path.stat().st_size for path in CLOTHING.rglob('*') if path.is_file()) <= 3_000_000


def test_embedded_splits_share_no_image():
    train, validation = ({p.read_bytes() for p in (CLOTHING / s).rglob('*.jpg')} for s in ('train', 'validation'))
    assert len(train) == 600
    assert len(validation) == 200
    assert not train & validation


def test_loaders_give_normalised_batches_of_the_wanted_size():
    loaders = create_loaders(CLOTHING, (32, 48), 8, num_workers=0)
    images, targets = next(iter(loaders.train))
    assert images.shape == (8, 3, 32, 48)
    assert images.dtype == torch.float32
    assert targets.shape == (8,)
    assert loaders.class_names[0] == 'dress'
    assert len(loaders.train) == 600 // 8


def test_validation_loader_yields_every_image_once_with_its_class(tmp_path):
    make_folder(tmp_path, {'val': ['a', 'b', 'c']}, images=3)
    loader, names = create_eval_loader(tmp_path, (16, 16), 4, mean=(0, 0, 0), std=(1, 1, 1), num_workers=0)
    images, targets = (torch.cat(parts) for parts in zip(*loader, strict=True))
    assert names == ['a', 'b', 'c']
    assert targets.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    torch.testing.assert_close(images.mean(dim=(1, 2, 3)), targets * 20 / 255, rtol=0, atol=1e-3)


@pytest.mark.parametrize('size', [(28, 28), (28, 56), (56, 28)])
def test_evaluation_crop_resizes_by_crop_pct_and_takes_the_centre(tmp_path, size):
    folder = tmp_path / 'val' / 'a'
    folder.mkdir(parents=True)
    # White inside the centre 7/8 of both sides, black outside: crop_pct 0.875 sees white alone, 1.0 the black frame.
    height, width = 8 * size[0], 8 * size[1]
    image = Image.new('L', (width, height), 0)
    image.paste(255, (width // 16, height // 16, width - width // 16, height - height // 16))
    image.save(folder / '0.png')
    options = dict(mean=(0, 0, 0), std=(1, 1, 1), num_workers=0)
    cropped = next(iter(create_eval_loader(tmp_path, size, 1, crop_pct=0.875, **options)[0]))[0]
    whole = next(iter(create_eval_loader(tmp_path, size, 1, crop_pct=1.0, **options)[0]))[0]
    assert cropped.shape == (1, 3, *size)
    assert cropped[:, :, 1:-1, 1:-1].min() > 0.95
    assert whole[:, :, 0].max() < 0.5
    assert whole[:, :, :, 0].max() < 0.5


def test_training_augmentation_follows_the_seed():
    def first_batch(seed: int) -> torch.Tensor:
        random_seed(seed)
        return next(iter(create_loaders(CLOTHING, (16, 16), 4, num_workers=0).train))[0]

    torch.testing.assert_close(first_batch(0), first_batch(0))
    assert not torch.equal(first_batch(0), first_batch(1))


@pytest.mark.parametrize('policy', ['rand-m9-mstd0.5-inc1', 'rand-m10-inc1', 'original', 'v0r'])
def test_posterize_to_no_bits_gives_a_black_image(tmp_path, policy):
    make_folder(tmp_path, {'train': ['a', 'b'], 'val': ['a', 'b']})
    loader = create_loaders(tmp_path, (16, 16), 2, augment=Augmentation(auto_augment=policy), num_workers=0).train
    (step,) = [step for step in loader.dataset.transform.transforms if hasattr(step, 'ops') or hasattr(step, 'policy')]
    ops = step.ops if hasattr(step, 'ops') else [op for pair in step.policy for op in pair]
    posterize = [op for op in ops if op.name.startswith('Posterize')]
    assert posterize
    for op in posterize:
        assert op.aug_fn(Image.new('RGB', (4, 4), (200, 100, 50)), 0).getextrema() == ((0, 0),) * 3
        assert op.aug_fn(Image.new('RGB', (4, 4), (200, 100, 50)), 1).getpixel((0, 0)) == (128, 0, 0)


@pytest.mark.parametrize('name', ['val', 'validation', 'test'])
def test_each_name_of_the_evaluation_split_is_found(tmp_path, name):
    make_folder(tmp_path, {'train': ['a'], name: ['a']})
    assert find_split(tmp_path) == tmp_path / name


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(ValueError, match=r'nowhere, which is not one'):
        create_loaders(tmp_path / 'nowhere', (16, 16), 2)


def test_an_empty_directory_is_named(tmp_path):
    with pytest.raises(ValueError, match='which is empty'):
        create_loaders(tmp_path, (16, 16), 2)


def test_a_missing_split_lists_what_is_there(tmp_path):
    make_folder(tmp_path, {'train': ['a'], 'extra': ['a']})
    with pytest.raises(ValueError, match=r'expected a folder val or validation or test .* got only extra, train'):
        create_loaders(tmp_path, (16, 16), 2)


def test_different_class_folders_are_listed(tmp_path):
    make_folder(tmp_path, {'train': ['a', 'b'], 'val': ['a', 'c']})
    with pytest.raises(ValueError, match=r"only in training: \['b'\]; only in validation: \['c'\]"):
        create_loaders(tmp_path, (16, 16), 2)


def test_a_class_without_images_is_named(tmp_path):
    make_folder(tmp_path, {'train': ['a', 'b'], 'val': ['a', 'b']})
    for path in (tmp_path / 'train' / 'b').iterdir():
        path.unlink()
    with pytest.raises(ValueError, match='got none in b'):
        create_loaders(tmp_path, (16, 16), 1)


def test_a_split_without_class_folders_is_named(tmp_path):
    make_folder(tmp_path, {'train': ['a']})
    (tmp_path / 'val').mkdir()
    with pytest.raises(ValueError, match='expected one folder per class in'):
        create_loaders(tmp_path, (16, 16), 1)


def test_a_batch_larger_than_the_training_split_is_rejected(tmp_path):
    make_folder(tmp_path, {'train': ['a', 'b'], 'val': ['a', 'b']})
    with pytest.raises(ValueError, match=r'in \[1, 4\], .* got 5'):
        create_loaders(tmp_path, (16, 16), 5)


@pytest.mark.parametrize('options', [{'scale': (0.5, 0.1)}, {'hflip': 1.5}, {'random_erasing': -0.1}])
def test_an_impossible_augmentation_is_rejected(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Augmentation(**options)
