from pathlib import Path

import pytest
import timm
from helpers import save_model

from tools.visualize_bias import main

KWARGS = dict(depth=1, embed_dim=8, patch_size=8, num_heads=2, kernel_size=3, num_classes=3)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_model(tmp_path / 'best.pth', 'aft_conv_tiny', timm.create_model('aft_conv_tiny', **KWARGS), KWARGS)


def test_the_picture_lies_beside_the_checkpoint(checkpoint, capsys):
    path = main(['--checkpoint', str(checkpoint)])
    assert path == checkpoint.parent / 'position_biases.png'
    assert path.stat().st_size > 1000
    assert str(path) in capsys.readouterr().out


def test_the_picture_goes_where_it_is_told(checkpoint, tmp_path):
    main(['--checkpoint', str(checkpoint), '--out', str(tmp_path / 'other.png'), '--max-heads', '1'])
    assert (tmp_path / 'other.png').is_file()
    assert not (tmp_path / 'position_biases.png').exists()


@pytest.mark.parametrize('option', ['--checkpoint', '--before'])
def test_a_checkpoint_is_not_overwritten(checkpoint, option):
    with pytest.raises(ValueError, match=r'another place than that of .*best\.pth, which is read'):
        main(['--checkpoint', 'other.pth', option, str(checkpoint), '--out', str(checkpoint)])
