"""Damaged checkpoints and exported weights are named when they are read."""

import random
from pathlib import Path

import pytest
import timm
import torch
from helpers import save_model

from aft_vision.export import export_model
from aft_vision.models.checkpoint import load_model, load_source, read_checkpoint
from aft_vision.models.decoders import create_decoder, load_decoder, save_decoder

KWARGS = dict(depth=1, embed_dim=16, patch_size=8, num_heads=2, kernel_size=3, num_classes=3)


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('run') / 'best.pth'
    torch.manual_seed(0)
    return save_model(path, 'aft_conv_tiny', timm.create_model('aft_conv_tiny', **KWARGS), KWARGS)


def flip(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_of_a_hundred_flipped_bits_of_a_checkpoint_none_changes_a_weight_in_silence(checkpoint, tmp_path):
    content, saved = checkpoint.read_bytes(), torch.load(checkpoint, weights_only=True)
    generator, noticed = random.Random(0), 0
    for _ in range(100):
        (tmp_path / 'best.pth').write_bytes(flip(content, generator.randrange(8 * len(content))))
        try:
            found = read_checkpoint(tmp_path / 'best.pth')
        except ValueError:
            noticed += 1
        else:
            # A bit between two entries of the file, which belongs to neither.
            assert (found['model_name'], found['model_kwargs']) == (saved['model_name'], saved['model_kwargs'])
            for name, x in saved['state_dict'].items():
                assert torch.equal(found['state_dict'][name], x)
    assert noticed > 75


def weight_bit(content: bytes, x: torch.Tensor) -> int:
    """A bit of the lowest byte of a tensor in a file."""
    return 8 * (content.index(x.numpy().tobytes()) + x.element_size())


def test_a_flipped_bit_of_a_weight_is_named_wherever_a_checkpoint_is_read(checkpoint, tmp_path):
    content = checkpoint.read_bytes()
    weight = torch.load(checkpoint, weights_only=True)['state_dict']['head.weight']
    (tmp_path / 'best.pth').write_bytes(flip(content, weight_bit(content, weight)))
    for read in (load_model, load_source):
        with pytest.raises(ValueError, match=r'got .*best\.pth.*: the checksum of best/data/\d+ in it is wrong'):
            read(tmp_path / 'best.pth')


def test_a_flipped_bit_of_a_decoder_is_noticed(tmp_path):
    model = create_decoder('aft_local_pixel', depth=1, dim=8, img_size=(8, 8))
    save_decoder(model, tmp_path / 'best.pth')
    content = (tmp_path / 'best.pth').read_bytes()
    weight = max(model.state_dict().values(), key=torch.Tensor.numel)
    (tmp_path / 'best.pth').write_bytes(flip(content, weight_bit(content, weight)))
    with pytest.raises(ValueError, match=r'the checksum of .* in it is wrong'):
        load_decoder(tmp_path / 'best.pth')


@pytest.mark.parametrize('damage', [lambda content: content[:-9], lambda content: content[:4], lambda content: b'{}'])
def test_an_export_with_damaged_weights_is_named(checkpoint, tmp_path, damage):
    export_model(load_model(checkpoint), tmp_path / 'export', ['a', 'b', 'c'])
    weights = tmp_path / 'export' / 'model.safetensors'
    weights.write_bytes(damage(weights.read_bytes()))
    for read in (load_model, load_source):
        with pytest.raises(ValueError, match=r'got .*export'):
            read(tmp_path / 'export')
