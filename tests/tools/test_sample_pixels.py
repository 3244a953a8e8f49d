"""Drawing images from the command line, and interrupts of it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_decoders import randomize

from aft_vision.models import create_decoder, save_decoder
from aft_vision.visualize import image_sheet
from tools import sample_pixels
from tools import sampling as tool_sampling


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp('pixel') / 'model.pt'
    save_decoder(randomize(create_decoder('aft_local_pixel', img_size=(4, 4), depth=1, dim=8, window=5)), path)
    return path


def stop_after(monkeypatch: pytest.MonkeyPatch, positions: int) -> None:
    """Let the next run be interrupted after so many positions."""
    run_batches = tool_sampling.run_batches

    def interrupted(*args, should_stop: Callable[[], bool], **kwargs):
        asked = iter(range(positions))
        return run_batches(*args, should_stop=lambda: next(asked, None) is None, **kwargs)

    monkeypatch.setattr(tool_sampling, 'run_batches', interrupted)


def test_images_are_drawn_in_batches_and_written(checkpoint: Path, tmp_path: Path):
    command = ['--checkpoint', str(checkpoint), '--num-images', '5', '--batch-size', '2', '--columns', '3']
    images = sample_pixels.main([*command, '--folder', str(tmp_path / 'each'), '--out', str(tmp_path / 'out.png')])
    assert images.shape == (5, 3, 4, 4)
    assert len({image.numpy().tobytes() for image in images}) == 5
    assert np.array_equal(np.array(Image.open(tmp_path / 'out.png')), np.array(image_sheet(images, 3)))
    assert np.array_equal(np.array(Image.open(tmp_path / 'each/0004.png')), images[4].permute(1, 2, 0).numpy())
    assert torch.equal(sample_pixels.main([*command, '--out', str(tmp_path / 'out.png')]), images)


@pytest.mark.parametrize('positions', [0, 7, 60, 130])
def test_interrupted_drawing_goes_on_to_the_same_images(
    positions: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    command = ['--checkpoint', str(checkpoint), '--num-images', '5', '--batch-size', '2']
    expected = sample_pixels.main([*command, '--out', str(tmp_path / 'whole.png')])
    command += ['--state', str(tmp_path / 'state.pt'), '--out', str(tmp_path / 'out.png')]
    with monkeypatch.context() as patch:
        stop_after(patch, positions)
        with pytest.raises(SystemExit) as stopped:
            sample_pixels.main(command)
    assert stopped.value.code == 130
    assert not (tmp_path / 'out.png').exists()
    with pytest.raises(ValueError, match=r'expected the state of a run with seed 1 in .* got 0'):
        sample_pixels.main([*command, '--seed', '1'])
    assert torch.equal(sample_pixels.main(command), expected)
    assert not (tmp_path / 'state.pt').exists()


def test_another_seed_draws_other_images_in_every_batch(checkpoint: Path, tmp_path: Path):
    command = [
        '--checkpoint',
        str(checkpoint),
        '--num-images',
        '4',
        '--batch-size',
        '2',
        '--out',
        str(tmp_path / 'o.png'),
    ]
    first, second = (sample_pixels.main([*command, '--seed', seed]) for seed in ('0', '1'))
    assert not (first[:, None] == second[None]).flatten(2).all(-1).any()


def test_a_model_of_another_task_is_named(tmp_path: Path):
    save_decoder(create_decoder('aft_simple_char', context=8, depth=1, dim=4), tmp_path / 'char.pt')
    with pytest.raises(ValueError, match=r'expected a pixel model in .*, got a char model'):
        sample_pixels.main(['--checkpoint', str(tmp_path / 'char.pt'), '--out', str(tmp_path / 'out.png')])
