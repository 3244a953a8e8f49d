import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from aft_vision.data import CorruptImageError, Decoding, LargeImageError, open_image
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


@pytest.mark.filterwarnings('error')
def test_an_image_above_pillows_limit_is_read(tmp_path):
    # 24 KB, which Pillow calls an attack.
    Image.new('1', (20_000, 10_000), 1).save(tmp_path / 'x.png')
    image = open_image(tmp_path / 'x.png')
    assert image.size == (20_000, 10_000)
    assert image.resize((1, 1)).getpixel((0, 0)) == (255,) * 3
    with pytest.raises(Image.DecompressionBombError):
        Image.open(tmp_path / 'x.png')


def test_an_image_above_the_limit_is_an_error_whose_key_reads_it(tmp_path):
    Image.new('RGB', (11, 10)).save(tmp_path / 'x.png')
    with pytest.raises(LargeImageError, match=r'at most 109 pixels, got .*x\.png of 11 x 10.*max_image_pixels=110'):
        open_image(tmp_path / 'x.png', decoding=Decoding(max_pixels=109))
    assert open_image(tmp_path / 'x.png', decoding=Decoding(max_pixels=110)).size == (11, 10)


@pytest.mark.parametrize(('max_pixels', 'size'), [(640 * 480, (640, 480)), (640 * 479, (320, 240)), (5000, (80, 60))])
def test_a_jpeg_above_the_limit_is_decoded_at_a_part_of_its_sides(tmp_path, max_pixels, size):
    ramp = np.linspace(0, 255, 640).astype(np.uint8)
    image = Image.fromarray(np.broadcast_to(ramp[None, :, None], (480, 640, 3)).copy())
    image.save(tmp_path / 'x.jpg', quality=95)
    found = open_image(tmp_path / 'x.jpg', decoding=Decoding(max_pixels=max_pixels))
    assert found.size == size
    np.testing.assert_allclose(found, image.resize(size, Image.Resampling.BOX), atol=3)
    with pytest.raises(LargeImageError):
        open_image(tmp_path / 'x.jpg', decoding=Decoding(max_pixels=4000))


@pytest.mark.parametrize('suffix', ['png', 'tiff', 'pgm'])
def test_lower_bits_of_sixteen_are_scaled_by_their_number(tmp_path, suffix):
    pixels = RAMP // 16
    Image.fromarray(pixels).save(tmp_path / f'x.{suffix}')
    found = open_image(tmp_path / f'x.{suffix}', decoding=Decoding(bits=12))
    np.testing.assert_array_equal(found, np.repeat(pixels[..., None] // 16, 3, axis=2))
    Image.fromarray(RAMP).save(tmp_path / f'x.{suffix}')
    with pytest.raises(CorruptImageError, match=r'values below 4096, as data\.bits=12 says, got 65535'):
        open_image(tmp_path / f'x.{suffix}', decoding=Decoding(bits=12))


def write_deep_tiff(path: Path, pixels: np.ndarray, bits: int, photometric: int) -> Path:
    """An uncompressed TIFF file of any number of bands, which Pillow itself cannot write."""
    height, width, bands = pixels.shape
    content = pixels.astype(f'<u{bits // 8}').tobytes()
    depths = np.full(bands, bits, '<u2').tobytes()
    start = 8 + len(content)
    # Bits at `start` if they are more than two numbers; then the directory.
    tags = [
        (256, 3, 1, width),
        (257, 3, 1, height),
        (258, 3, bands, start),
        (259, 3, 1, 1),
        (262, 3, 1, photometric),
        (273, 4, 1, 8),
        (277, 3, 1, bands),
        (278, 3, 1, height),
        (279, 4, 1, len(content)),
        (338, 3, bands - 3, 0),
    ]
    tags = [tag for tag in tags if tag[2]]
    directory = b''.join(struct.pack('<HHII', *tag) for tag in tags)
    head = b'II*\0' + struct.pack('<I', start + len(depths))
    path.write_bytes(head + content + depths + struct.pack('<H', len(tags)) + directory + b'\0\0\0\0')
    return path


def losses(path: Path, **options: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    open_image(path, decoding=Decoding(**options), report=found.__setitem__)
    return found


def test_what_is_lost_of_an_image_is_reported(tmp_path):
    grey = np.full((4, 4, 4), 100, np.uint8)
    Image.fromarray(grey).save(tmp_path / 'clear.png')
    Image.fromarray(grey[..., :2], 'LA').save(tmp_path / 'grey.png')
    Image.new('P', (4, 4)).save(tmp_path / 'palette.png', transparency=0)
    for name in ('clear', 'grey', 'palette'):
        assert 'transparent' in losses(tmp_path / f'{name}.png').pop('transparency')
    Image.fromarray(RAMP // 16).save(tmp_path / 'x.tiff')
    assert 'no value above 4095, so it is almost black; data.bits=12' in losses(tmp_path / 'x.tiff')['bits']
    Image.fromarray(RAMP // 256).save(tmp_path / 'x.png')
    assert 'data.bits=8' in losses(tmp_path / 'x.png')['bits']
    for bands in (4, 5):
        path = write_deep_tiff(tmp_path / 'bands.tiff', np.full((4, 4, bands), 100), 8, photometric=2)
        assert f'has {bands} bands; only the first three are read' in losses(path)['bands']
    path = write_deep_tiff(tmp_path / 'deep.tiff', np.full((4, 4, 3), 2000), 16, photometric=2)
    assert 'almost black' in losses(path)['bits']
    with pytest.raises(CorruptImageError, match=r'one band for data\.bits=12, got three of 16 bits'):
        losses(path, bits=12)


def test_an_image_that_loses_nothing_is_not_reported(tmp_path):
    Image.new('RGBA', (4, 4), (1, 2, 3, 255)).save(tmp_path / 'opaque.png')
    Image.new('RGB', (4, 4), (1, 2, 3)).save(tmp_path / 'plain.tiff')
    Image.new('CMYK', (4, 4), (1, 2, 3, 4)).save(tmp_path / 'printed.tiff')
    Image.fromarray(RAMP).save(tmp_path / 'deep.png')
    Image.fromarray(RAMP * 0).save(tmp_path / 'black.png')
    Image.fromarray(RAMP).save(tmp_path / 'grey_is_clear.png', transparency=0)
    for path in tmp_path.iterdir():
        assert losses(path) == {}
    Image.fromarray(RAMP // 16).save(tmp_path / 'twelve.png')
    assert losses(tmp_path / 'twelve.png', bits=12) == {}


def test_a_tiff_file_that_pillow_cannot_read_says_which_it_can(tmp_path):
    path = write_deep_tiff(tmp_path / 'x.tif', np.full((4, 4, 6), 100), 16, photometric=1)
    with pytest.raises(
        CorruptImageError, match=r'x\.tif: Pillow reads TIFF files of 1, 3 or 4 bands of 8 bits, or of 1'
    ):
        open_image(path)
