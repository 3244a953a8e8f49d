"""Drawing and completing images from the command line."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import generator
from PIL import Image
from small_decoders import randomize

from aft_vision.models import PixelDecoder, create_decoder, half_mask, images_to_tokens, save_decoder
from aft_vision.visualize import completion_sheet, image_sheet
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


@pytest.fixture(autouse=True)
def small_images(monkeypatch: pytest.MonkeyPatch):
    """Data sets of the size of the model above."""
    monkeypatch.setattr('aft_vision.data.pixels.SHAPE', (4, 4, 3))


@pytest.fixture(scope='module')
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp('images') / 'images.npz'
    images = torch.randint(256, (5, 4, 4, 3), generator=generator()).to(torch.uint8)
    np.savez(path, x_test=images.numpy())
    return path


def test_images_are_completed_below_what_is_given(checkpoint: Path, data: Path, tmp_path: Path):
    command = ['--checkpoint', str(checkpoint), '--data', str(data), '--indices', '3', '1', '--num-samples', '2']
    out = tmp_path / 'out.png'
    completed = sample_pixels.main([*command, '--originals', '--scale', '2', '--out', str(out)])
    images = torch.from_numpy(np.load(data)['x_test'][[3, 1]]).permute(0, 3, 1, 2)
    assert torch.equal(completed[:, :, :2], images[:, :, :2].repeat_interleave(2, 0))
    assert not torch.equal(completed[0], completed[1])
    sheet = completion_sheet(images, half_mask('top-half', (4, 4)), completed, 2, show_originals=True)
    assert np.array_equal(np.array(Image.open(out)), np.array(sheet))
    # Two columns of 4 pixels, four rows, enlarged twice, with margins of two.
    assert sheet.size == (2 * 10 + 2, 4 * 10 + 2)
    pixels = torch.from_numpy(np.array(sheet))
    assert torch.equal(pixels[2:6:2, 2:10:2].permute(2, 0, 1), images[0, :, :2])
    assert (pixels[6:10, 2:10] == 128).all()
    assert torch.equal(pixels[12:20:2, 12:20:2].permute(2, 0, 1), completed[2])
    assert torch.equal(pixels[32:40:2, 12:20:2].permute(2, 0, 1), images[1])


def test_a_mask_may_be_an_image_and_images_may_be_files(checkpoint: Path, data: Path, tmp_path: Path):
    mask = torch.zeros(4, 4, dtype=torch.uint8)
    mask[1:3, 1:3] = 255
    Image.fromarray(mask.numpy()).save(tmp_path / 'mask.png')
    image = np.load(data)['x_test'][2]
    Image.fromarray(image).save(tmp_path / 'image.png')
    command = ['--checkpoint', str(checkpoint), '--images', str(tmp_path / 'image.png'), '--temperature', '0.5']
    completed = sample_pixels.main([*command, '--mask', str(tmp_path / 'mask.png'), '--out', str(tmp_path / 'o.png')])
    same = completed[0] == torch.from_numpy(image).permute(2, 0, 1)
    assert same[:, 1:3, 1:3].all()
    assert same.sum() < 20
    assert images_to_tokens(completed).shape == (1, 48)


def test_images_of_a_folder_that_cannot_be_decoded_are_named_and_counted(checkpoint, data, tmp_path, capsys, caplog):
    for number, image in enumerate(np.load(data)['x_test'][:2]):
        Image.fromarray(image).save(tmp_path / f'{number}.png')
    (tmp_path / '00.png').write_bytes(b'no image')
    out = tmp_path / 'sheets' / 'out.png'
    command = ['--checkpoint', str(checkpoint), '--images', str(tmp_path), '--temperature', '0.5', '--out', str(out)]
    completed = sample_pixels.main(command)
    whole = torch.from_numpy(np.load(data)['x_test'][:2]).permute(0, 3, 1, 2)
    assert torch.equal(completed[:, :, :2], whole[:, :, :2])
    assert '00.png' in caplog.text
    assert '2 images are in' in (printed := capsys.readouterr().out)
    assert '1 image that cannot be decoded is left out' in printed


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--data', '{data}', '--indices', '5'], 'expected indices from 0 to 4, got 5'),
        (['--data', '{data}', '--mask', 'middle'], 'mask must be one of .*, or an image file, got middle'),
        (['--data', '{data}', '--mask', '{erased}'], r'got .*erased\.png with transparent ones'),
        (['--images', '{large}'], r'expected an image of 4 x 4 pixels \(H x W\), got 6 x 5'),
        (['--data', '{data}', '--mask', '{large}'], r'expected a mask of 4 x 4 pixels \(H x W\), got 6 x 5'),
        (['--images', '{data}'], 'expected an image that can be decoded, got none of 1'),
        (['--images', 'missing.png'], r'expected image files or folders, got missing\.png, which do not exist'),
        (['--data', '{data}', '--top-k', '0'], 'top_k must be at least 1, got 0'),
    ],
    ids=['index', 'mask', 'erased mask', 'size', 'size of the mask', 'no image', 'no file', 'rule'],
)
def test_a_wrong_argument_is_named(arguments: list[str], message: str, checkpoint: Path, data: Path, tmp_path: Path):
    Image.new('RGB', (5, 6)).save(tmp_path / 'large.png')
    Image.new('RGBA', (4, 4), (255, 255, 255, 0)).save(tmp_path / 'erased.png')
    files = {name: tmp_path / f'{name}.png' for name in ('large', 'erased')}
    filled = [text.format(data=data, **files) for text in arguments]
    with pytest.raises(ValueError, match=message):
        sample_pixels.main(['--checkpoint', str(checkpoint), '--out', str(tmp_path / 'out.png'), *filled])


def test_data_of_another_size_than_the_model_are_named(data: Path, tmp_path: Path):
    path = tmp_path / 'model.pt'
    save_decoder(create_decoder('aft_simple_pixel', img_size=(4, 6), depth=1, dim=8), path)
    message = r'expected images of 4 x 6 pixels \(H x W\), as .*model\.pt has, got 4 x 4 in .*images\.npz'
    with pytest.raises(ValueError, match=message):
        sample_pixels.main(['--checkpoint', str(path), '--data', str(data), '--out', str(tmp_path / 'out.png')])


def test_a_completion_is_not_overwritten_by_the_sheet(checkpoint: Path, data: Path, tmp_path: Path):
    arguments = ['--checkpoint', str(checkpoint), '--data', str(data), '--folder', str(tmp_path / 'each')]
    with pytest.raises(ValueError, match=r'another file than those in --folder, got --out .*0000\.png'):
        sample_pixels.main([*arguments, '--out', str(tmp_path / 'each' / '0000.png')])
    assert not (tmp_path / 'each').exists()
