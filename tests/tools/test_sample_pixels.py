"""Drawing images from the command line."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_decoders import randomize

from aft_vision.models import PixelDecoder, create_decoder, save_decoder
from aft_vision.visualize import image_sheet
from tools import sample_pixels


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp('pixel') / 'model.pt'
    save_decoder(randomize(create_decoder('aft_local_pixel', img_size=(4, 4), depth=1, dim=8, window=5)), path)
    return path


def test_images_are_drawn_in_batches_and_written(checkpoint: Path, tmp_path: Path):
    command = ['--checkpoint', str(checkpoint), '--num-images', '5', '--batch-size', '2', '--columns', '3']
    images = sample_pixels.main([*command, '--folder', str(tmp_path / 'each'), '--out', str(tmp_path / 'out.png')])
    assert images.shape == (5, 3, 4, 4)
    assert len({image.numpy().tobytes() for image in images}) == 5
    assert np.array_equal(np.array(Image.open(tmp_path / 'out.png')), np.array(image_sheet(images, 3)))
    assert np.array_equal(np.array(Image.open(tmp_path / 'each/0004.png')), images[4].permute(1, 2, 0).numpy())
    assert torch.equal(sample_pixels.main([*command, '--out', str(tmp_path / 'out.png')]), images)


def test_an_interrupted_command_leaves_its_images_and_goes_on_from_a_seed(checkpoint, tmp_path, monkeypatch):
    command = ['--checkpoint', str(checkpoint), '--batch-size', '2', '--folder', str(tmp_path / 'each')]
    command += ['--out', str(tmp_path / 'out.png')]
    draw, seeds = PixelDecoder.sample_images, []

    def interrupted(*args, seed: list[int], **kwargs):
        seeds.append(seed)
        if len(seeds) == 2:
            raise KeyboardInterrupt
        return draw(*args, seed=seed, **kwargs)

    monkeypatch.setattr(PixelDecoder, 'sample_images', interrupted)
    with pytest.raises(KeyboardInterrupt):
        sample_pixels.main([*command, '--num-images', '5', '--seed', '7'])
    assert sorted(path.name for path in (tmp_path / 'each').iterdir()) == ['0007.png', '0008.png']
    sample_pixels.main([*command, '--num-images', '3', '--seed', '9'])
    assert seeds == [[7, 8], [9, 10], [9, 10], [11]]
    assert len(list((tmp_path / 'each').iterdir())) == 5


def test_the_seeds_of_images_count_up(checkpoint: Path, tmp_path: Path):
    command = ['--checkpoint', str(checkpoint), '--num-images', '4', '--out', str(tmp_path / 'o.png')]
    first, second = (sample_pixels.main([*command, '--seed', seed]) for seed in ('0', '2'))
    assert torch.equal(first[2:], second[:2])


def test_a_model_of_another_task_is_named(tmp_path: Path):
    save_decoder(create_decoder('aft_simple_char', context=8, depth=1, dim=4), tmp_path / 'char.pt')
    with pytest.raises(ValueError, match=r'expected a pixel model in .*, got a char model'):
        sample_pixels.main(['--checkpoint', str(tmp_path / 'char.pt'), '--out', str(tmp_path / 'out.png')])


@pytest.mark.parametrize('name', ['samples', 'samples.txt'])
def test_a_file_of_no_picture_is_named_before_anything_is_drawn(checkpoint: Path, tmp_path: Path, name: str):
    with pytest.raises(ValueError, match=r'the file of a picture, such as .*samples\.png, got --out'):
        sample_pixels.main(['--checkpoint', str(checkpoint), '--out', str(tmp_path / name), '--folder', str(tmp_path)])
    assert not any(tmp_path.iterdir())
