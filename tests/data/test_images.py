from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from aft_vision.data import CorruptImageError, open_image
from aft_vision.data.images import UPRIGHT

RAMP = np.linspace(0, 65535, 64).astype(np.uint16).reshape(4, 16)


@pytest.mark.parametrize('orientation', range(10))
def test_an_image_is_turned_as_pillow_turns_it(tmp_path, orientation):
    pixels = np.random.default_rng(0).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / 'x.png', exif=exif)
    with Image.open(tmp_path / 'x.png') as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    np.testing.assert_array_equal(open_image(tmp_path / 'x.png'), expected)
    assert (expected.shape == pixels.shape) == (UPRIGHT.get(orientation) not in list(UPRIGHT.values())[3:])


def test_a_tiff_file_is_turned_once(tmp_path):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (5, 7, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / 'x.tiff', exif=exif)
    np.testing.assert_array_equal(open_image(tmp_path / 'x.tiff'), image.transpose(Image.Transpose.ROTATE_270))


@pytest.mark.parametrize('exif', [b'Exif\0\0', b'Exif\0\0II*\0\xff\xff\xff\xff', b'Exif\0\0MM\0*\0\0\0\x08\x7f\xff'])
def test_an_image_with_a_damaged_exif_block_is_read_as_it_lies(tmp_path, exif):
    Image.new('RGB', (20, 10), (200,) * 3).save(tmp_path / 'x.jpg', exif=exif)
    assert open_image(tmp_path / 'x.jpg').size == (20, 10)


@pytest.mark.parametrize('suffix', ['png', 'tiff', 'pgm'])
def test_sixteen_bits_are_scaled(tmp_path, suffix):
    Image.fromarray(RAMP).save(tmp_path / f'x.{suffix}')
    pixels = np.asarray(open_image(tmp_path / f'x.{suffix}'))
    np.testing.assert_array_equal(pixels, np.repeat(RAMP[..., None] // 256, 3, axis=2))


def test_big_endian_pixels_are_scaled(tmp_path):
    # A TIFF file of 16 bits with the bytes of Motorola.
    image = Image.frombytes('I;16B', (16, 4), RAMP.astype('>u2').tobytes())
    image.save(tmp_path / 'x.tiff')
    assert np.asarray(open_image(tmp_path / 'x.tiff'))[..., 0].max() == 255
    assert np.asarray(open_image(tmp_path / 'x.tiff'))[0, 8, 0] == RAMP[0, 8] // 256


@pytest.mark.parametrize('mode', ['L', 'P', '1', 'LA', 'RGBA', 'CMYK'])
def test_other_modes_are_converted_as_pillow_does(tmp_path, mode):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)).convert(mode)
    image.save(tmp_path / 'x.tiff')
    np.testing.assert_array_equal(open_image(tmp_path / 'x.tiff'), image.convert('RGB'))


@pytest.mark.parametrize(
    ('values', 'found'),
    [
        (np.float32(0.5), 'floating-point'),
        # Those of 8 bits would become black.
        (np.int32(200), '32 bits or signed'),
        (np.int32(70000), '32 bits or signed'),
        (np.int32(-1), '32 bits or signed'),
    ],
)
def test_pixels_of_more_than_sixteen_bits_are_refused(tmp_path, values, found):
    Image.fromarray(np.full((4, 4), values)).save(tmp_path / 'x.tiff')
    with pytest.raises(CorruptImageError, match=rf'x\.tiff: expected .*pixels of 8 or 16 bits, got .*{found}'):
        open_image(tmp_path / 'x.tiff')


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / 'x.jpg').write_bytes(b'no image')
    with pytest.raises(CorruptImageError, match=r'can be decoded, got .*x\.jpg'):
        open_image(tmp_path / 'x.jpg')
    with Path(tmp_path / 'x.jpg').open('rb') as file, pytest.raises(CorruptImageError, match='got the third image'):
        open_image(file, 'the third image')
