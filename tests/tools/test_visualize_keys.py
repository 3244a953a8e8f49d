from pathlib import Path

import pytest
import timm
from helpers import photographs, save_model
from PIL import Image

from tools.visualize_keys import main

KWARGS = dict(depth=2, embed_dim=8, patch_size=8, num_heads=4, kernel_size=3, num_classes=3)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    save_model(tmp_path / 'best.pth', 'aft_conv_tiny', timm.create_model('aft_conv_tiny', **KWARGS), KWARGS)
    photographs(1, (48, 64))[0].save(tmp_path / 'image.png')
    places = {'checkpoint': 'best.pth', 'image': 'image.png', 'out': 'new/keys.png'}
    return [text for name, place in places.items() for text in (f'--{name}', str(tmp_path / place))] + ['--size', '32']


def test_keys_are_drawn_where_they_are_wanted(arguments, tmp_path, capsys):
    path = main(arguments)
    assert path == tmp_path / 'new' / 'keys.png'
    assert len(Image.open(path).convert('RGB').getcolors(1 << 24)) > 100
    assert str(path) in capsys.readouterr().out


def test_a_query_draws_another_picture_than_the_keys(arguments):
    keys = Image.open(main(arguments)).convert('RGB')
    weights = Image.open(main([*arguments, '--query', '4', '4', '--heads', '1', '3', '--layers', '2'])).convert('RGB')
    assert weights.size[1] < keys.size[1]


@pytest.mark.parametrize(
    ('extra', 'message'),
    [
        (['--query', '5', '1'], 'a query row from 1 to 4 and a column from 1 to 4, got 5 and 1'),
        (['--heads', '5'], 'heads from 1 to 4, got 5'),
        (['--layers', '0'], r'layers with an AFT mixer \(1, 2\), got 0'),
        (['--size', '30'], r'multiples of the patch size \(8, 8\), got \(30, 30\)'),
    ],
)
def test_what_the_model_does_not_have_is_rejected(arguments, extra, message):
    with pytest.raises(ValueError, match=message):
        main([*arguments, *extra])


@pytest.mark.parametrize('name', ['image.png', 'best.pth'])
def test_what_is_read_is_not_overwritten(arguments, tmp_path, name):
    before = (tmp_path / name).read_bytes()
    with pytest.raises(ValueError, match=rf'another place than that of .*{name}, which is read, got --out'):
        main([*arguments, '--out', str(tmp_path / name)])
    assert (tmp_path / name).read_bytes() == before
