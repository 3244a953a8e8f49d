import io
import tempfile
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import make_folder, photographs
from PIL import ExifTags, Image
from timm.data import create_transform, resolve_model_data_config

from aft_vision.data import CorruptImageError, Preprocessing, create_eval_loader
from aft_vision.visualize import (
    SkippedImages,
    capture_mixers,
    class_labels,
    class_names,
    draw_key_maps,
    find_photographs,
    find_readable,
    load_image,
    load_photograph,
    predictions,
    save_figure,
)

TINY = dict(depth=1, embed_dim=8, patch_size=8, num_heads=2, num_classes=3)


def test_images_are_spread_over_the_classes(tmp_path):
    make_folder(tmp_path, {'val': ['a', 'b', 'c']}, images=4)
    (tmp_path / 'val' / 'a' / 'notes.txt').write_text('no image')
    assert [path.parent.name for path in find_photographs(tmp_path, 3)] == ['a', 'b', 'c']
    assert len(find_photographs(tmp_path, 100)) == 12


def test_hidden_files_and_others_are_left_out_with_one_warning(tmp_path, caplog):
    make_folder(tmp_path, {'val': ['a', '.thumbnails']}, images=2)
    (tmp_path / 'val' / 'a' / 'x.heic').write_text('no image')
    for _ in range(2):
        assert len(find_photographs(tmp_path, 100)) == 2
    assert caplog.text.count('3 files (1 .heic, 2 hidden)') == 1


def test_the_next_image_takes_the_place_of_one_that_cannot_be_decoded(tmp_path, caplog):
    make_folder(tmp_path, {'val': ['a', 'b']}, images=3)
    for name in ('a/0.png', 'b/2.png'):
        (tmp_path / 'val' / name).write_bytes(b'damaged')
    skipped = SkippedImages()
    found = [path.relative_to(tmp_path / 'val').as_posix() for path in find_readable(tmp_path, 2, skipped)]
    assert found == ['a/1.png', 'a/2.png']
    assert len(find_readable(tmp_path, 100, skipped)) == 4
    for name in ('a/0.png', 'b/2.png'):
        assert caplog.text.count(name) == 1
    assert skipped.describe() == '2 images that cannot be decoded are left out'


def test_a_folder_in_which_no_image_can_be_decoded_is_rejected(tmp_path):
    (tmp_path / 'a.png').write_bytes(b'damaged')
    with pytest.raises(CorruptImageError, match='got none of 1'):
        find_readable(tmp_path, 2, SkippedImages())


@pytest.mark.parametrize(('at_most', 'message'), [(2, 'a folder with images'), (0, 'at least 1 image')])
def test_a_folder_without_images_is_rejected(tmp_path, at_most, message):
    with pytest.raises(ValueError, match=message):
        find_photographs(tmp_path, at_most)


def test_the_model_sees_what_evaluation_shows_it(tmp_path: Path):
    model = timm.create_model('aft_conv_tiny', **TINY)
    model.pretrained_cfg.update(input_size=(3, 32, 32), crop_pct=0.75, mean=(0.4, 0.5, 0.6))
    make_folder(tmp_path, {'val': ['a']}, images=1)
    photographs(1, (50, 40))[0].save(tmp_path / 'val' / 'a' / '0.png')
    photograph = load_photograph(tmp_path / 'val' / 'a' / '0.png', model)
    loader, _ = create_eval_loader(tmp_path, Preprocessing((32, 32), 0.75, (0.4, 0.5, 0.6)), 1, num_workers=0)
    torch.testing.assert_close(photograph.images, next(iter(loader))[0])
    assert photograph.pixels.shape == (448, 448, 3)
    assert photograph.pixels.dtype == torch.uint8
    assert torch.equal(load_image(photograph.path, model), photograph.images)


@pytest.mark.parametrize('kind', [bytes, bytearray, memoryview, io.BytesIO, 'temporary', 'open'])
def test_a_photograph_is_read_from_its_path_its_bytes_or_a_stream(tmp_path: Path, kind: Any):
    model, path = timm.create_model('aft_conv_tiny', **TINY), tmp_path / 'a.jpg'
    # Turned, as a telephone does.
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photographs(1, (50, 40))[0].save(path, exif=exif)
    expected = load_photograph(path, model)
    with tempfile.TemporaryFile() as temporary, path.open('rb') as opened:
        temporary.write(path.read_bytes())
        places = {'temporary': temporary, 'open': opened}
        file = places[kind] if isinstance(kind, str) else kind(path.read_bytes())
        found = load_photograph(file, model)
        assert found.path == (path if kind == 'open' else Path())
        assert torch.equal(found.pixels, expected.pixels)
        # A stream is read from its start again, and left open.
        assert torch.equal(load_image(file, model), expected.images)


@pytest.mark.parametrize(
    ('file', 'name'), [(b'no image', '8 bytes'), (b'', '0 bytes'), (io.BytesIO(b'no image'), 'a stream')]
)
def test_damaged_bytes_and_streams_are_said_without_their_content(file, name):
    with pytest.raises(CorruptImageError, match=f'can be decoded, got {name}: its format is unknown'):
        load_image(file, timm.create_model('aft_conv_tiny', **TINY))


@pytest.mark.parametrize('channels', [1, 3])
@pytest.mark.parametrize('crop_mode', ['squash', 'border', 'center'])
def test_the_model_sees_its_own_transform_of_timm(tmp_path: Path, crop_mode: str, channels: int):
    model = timm.create_model('aft_conv_tiny', **TINY, in_chans=channels)
    own = dict(input_size=(channels, 32, 32), crop_pct=0.9, crop_mode=crop_mode, interpolation='bilinear')
    model.pretrained_cfg.update(own, mean=(0.4,) * channels, std=(0.2,) * channels)
    photographs(1, (70, 40))[0].save(tmp_path / '0.png')
    image = Image.open(tmp_path / '0.png').convert('L' if channels == 1 else 'RGB')
    expected = create_transform(**resolve_model_data_config(model))(image)[None]
    torch.testing.assert_close(load_image(tmp_path / '0.png', model), expected)
    assert load_photograph(tmp_path / '0.png', model).pixels.shape == (448, 448, 3)


@pytest.mark.parametrize('crop_mode', ['squash', 'border', 'center'])
def test_a_thin_image_has_the_size_of_the_model(tmp_path: Path, crop_mode: str):
    model = timm.create_model('aft_conv_tiny', **TINY)
    model.pretrained_cfg.update(input_size=(3, 224, 224), crop_pct=0.9, crop_mode=crop_mode)
    Image.new('RGB', (40_000, 1), 'white').save(tmp_path / 'thin.png')
    assert load_image(tmp_path / 'thin.png', model).shape == (1, 3, 224, 224)


@pytest.mark.parametrize('own', [{}, dict(input_size=(4, 32, 32), mean=(0.4,) * 4, std=(0.2,) * 4)])
def test_a_model_of_other_channels_is_named(tmp_path: Path, own: dict[str, Any]):
    photographs(1, (32, 32))[0].save(tmp_path / '0.png')
    model = timm.create_model('aft_conv_tiny', **TINY, in_chans=4)
    model.pretrained_cfg.update(own)
    with pytest.raises(ValueError, match='images of 1 or 3 channels, got one of 4'):
        load_image(tmp_path / '0.png', model)


def test_a_damaged_image_is_named(tmp_path):
    (tmp_path / 'bad.png').write_bytes(b'no image')
    with pytest.raises(CorruptImageError, match=r'can be decoded, got .*bad\.png'):
        load_photograph(tmp_path / 'bad.png', timm.create_model('aft_conv_tiny', **TINY))


def test_classes_have_the_names_of_the_checkpoint_of_imagenet_or_numbers():
    model = timm.create_model('aft_conv_tiny', **TINY)
    assert class_names(model) == ['class 0', 'class 1', 'class 2']
    model.pretrained_cfg['label_names'] = ['hat', 'shoe', 'shirt']
    assert class_names(model) == ['hat', 'shoe', 'shirt']
    imagenet = timm.create_model('aft_conv_tiny', **TINY | {'num_classes': 1000})
    assert (class_labels(imagenet)[0], class_names(imagenet)[0]) == ('n01440764', 'tench')
    # A crane is a bird or a machine.
    assert {'crane (n02012849)', 'crane (n03126707)'} <= {*class_names(imagenet)}
    assert len({*class_names(imagenet)}) == 1000
    model.pretrained_cfg['label_names'] = ['n03445777', 'n03888257', 'n01440764']
    assert class_names(model) == ['golf ball', 'parachute', 'tench']
    model.pretrained_cfg['label_names'] = ['n03445777', 'n03888257', 'n99999999']
    assert class_names(model) == ['n03445777', 'n03888257', 'n99999999']


def test_predictions_are_the_likeliest_classes():
    model = timm.create_model('aft_conv_tiny', **TINY)
    found = predictions(model, torch.tensor([[0.0, 2.0, 1.0]]), count=2)
    assert [name for name, _ in found] == ['class 1', 'class 2']
    assert [chance for _, chance in found] == pytest.approx([0.665241, 0.244728], abs=1e-5)


def test_a_model_without_classes_or_with_other_names_predicts_none():
    model = timm.create_model('aft_conv_tiny', **TINY)
    model.pretrained_cfg['label_names'] = ['hat', 'shoe']
    with pytest.raises(ValueError, match='label_names of 3 classes, as the model has, got 2'):
        predictions(model, torch.zeros(1, 3))
    model.reset_classifier(0)
    with pytest.raises(ValueError, match='a model with a classifier, got one with num_classes=0'):
        predictions(model, torch.zeros(1, 8))


def test_keys_are_drawn_below_the_photograph(tmp_path):
    photographs(1, (40, 30))[0].save(tmp_path / 'image.png')
    model = timm.create_model('aft_conv_tiny', **TINY)
    photograph = load_photograph(tmp_path / 'image.png', model, (24, 32))
    _, layers = capture_mixers(model, photograph.images)
    save_figure(draw_key_maps(photograph, layers, text='99% hat'), tmp_path / 'keys.png')
    assert len(Image.open(tmp_path / 'keys.png').convert('RGB').getcolors(1 << 24)) > 500
    with pytest.raises(ValueError, match=r'heads that can be drawn \(1 to 2\), got 9'):
        draw_key_maps(photograph, layers, heads=[8])
