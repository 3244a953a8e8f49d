"""Damaged bytes of checkpoints and exported weights are noticed when they are read."""

import json
import random
from pathlib import Path

import pytest
import timm
import torch
from helpers import save_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from aft_vision.export import export_model
from aft_vision.models.checkpoint import load_model, read_checkpoint
from aft_vision.models.decoders import create_decoder, load_decoder, save_decoder
from aft_vision.models.transfer_source import load_source
from aft_vision.models.weight_files import add_checksum, check_checksum

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


@pytest.fixture(scope='module')
def export(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('export') / 'model'
    export_model(load_model(checkpoint), folder, ['a', 'b', 'c'])
    return folder


def test_a_flipped_bit_of_an_exported_weight_is_noticed(export, tmp_path):
    content, weights = (export / 'model.safetensors').read_bytes(), load_file(export / 'model.safetensors')
    (tmp_path / 'config.json').write_bytes((export / 'config.json').read_bytes())
    start = 8 + int.from_bytes(content[:8], 'little')
    for bit in (8 * start, 8 * (start + len(content)) // 2, 8 * len(content) - 1):
        (tmp_path / 'model.safetensors').write_bytes(flip(content, bit))
        for read in (load_model, load_source):
            with pytest.raises(ValueError, match=r'got .*model\.safetensors, whose checksum is wrong'):
                read(tmp_path)
    # Names and shapes too, or the bit is in what describes the file to a reader.
    generator = random.Random(0)
    for _ in range(30):
        (tmp_path / 'model.safetensors').write_bytes(flip(content, generator.randrange(8 * start)))
        try:
            found = load_model(tmp_path).state_dict()
        except ValueError:
            continue
        assert all(torch.equal(found[name], x) for name, x in weights.items())


def test_an_export_with_a_checksum_is_the_file_that_timm_writes(checkpoint, export):
    weights, found = load_model(checkpoint).state_dict(), load_file(export / 'model.safetensors')
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], x) for name, x in weights.items())
    with safe_open(export / 'model.safetensors', 'pt') as file:
        assert file.metadata()['format'] == 'pt'


def test_weights_that_others_wrote_are_taken_as_they_are(tmp_path):
    save_file({'x': torch.ones(3)}, tmp_path / 'model.safetensors')
    check_checksum(tmp_path / 'model.safetensors')
    # Once and again, with what the header says besides.
    for _ in range(2):
        add_checksum(tmp_path / 'model.safetensors')
        check_checksum(tmp_path / 'model.safetensors')
    assert load_file(tmp_path / 'model.safetensors')['x'].tolist() == [1, 1, 1]


@pytest.mark.parametrize('content', [b'', b'\xff' * 64, (2).to_bytes(8, 'little') + b'[]', json.dumps({}).encode()])
def test_a_damaged_header_is_named(tmp_path, content):
    (tmp_path / 'model.safetensors').write_bytes(content)
    with pytest.raises(ValueError, match=r'model\.safetensors, whose header is damaged'):
        check_checksum(tmp_path / 'model.safetensors')
