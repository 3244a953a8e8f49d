"""Images as tokens, the pixel and character models by name, and their checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import generator
from small_decoders import randomize
from torch import Tensor

from aft_vision.models import (
    AFTDecoder,
    PixelDecoder,
    create_decoder,
    half_mask,
    images_to_tokens,
    load_decoder,
    save_decoder,
    tokens_to_images,
)
from aft_vision.models.decoders import DECODERS


def test_the_parameters_of_the_main_row_are_counted_exactly():
    # L = 24, d = 256, d' = 64: projections and MLP with their biases, two norms, the factors; then embeddings and head.
    layer = 4 * (256**2 + 256) + (8 * 256**2 + 5 * 256) + 4 * 256 + 2 * 3072 * 64
    outside = 256 * 256 + 256 + 3072 * 256 + 2 * 256 + 256 * 256
    model = create_decoder('aft_local_pixel', device='meta')
    assert sum(p.numel() for p in model.parameters()) == 24 * layer + outside


def small(name: str = 'aft_local_pixel', **kwargs: Any) -> PixelDecoder:
    args = dict(depth=1, dim=8, **(dict(img_size=(3, 4)) if name.endswith('pixel') else dict(context=12)))
    args |= dict(window=5) if 'local' in name else {}
    model = randomize(create_decoder(name, **(args | kwargs)))
    return model  # type: ignore[return-value]


def draw_images(batch: int = 2) -> Tensor:
    return torch.randint(256, (batch, 3, 3, 4), generator=generator(2)).to(torch.uint8)


def test_tokens_are_in_raster_order_with_the_colours_inside_a_pixel():
    images = draw_images()
    tokens = images_to_tokens(images)
    expected = [images[1, c, y, x].item() for y in range(3) for x in range(4) for c in range(3)]
    assert tokens.dtype == torch.int64
    assert tokens[1].tolist() == expected
    assert torch.equal(tokens_to_images(tokens, (3, 4)), images)


def test_images_are_drawn_with_a_seed():
    model = small()
    images = model.sample_images(2, seed=1)
    assert images.shape == (2, 3, 3, 4)
    assert images.dtype == torch.uint8
    assert torch.equal(images_to_tokens(images), model.sample(2, seed=1))


@pytest.mark.parametrize('kind', ['pixels', 'pixels of each image', 'sub-pixels'])
def test_what_is_given_of_an_image_stays(kind: str):
    model, images = small(), draw_images()
    shape = {'pixels': (3, 4), 'pixels of each image': (2, 3, 4), 'sub-pixels': (2, 3, 3, 4)}[kind]
    mask = torch.rand(shape, generator=generator(3)) > 0.5
    given = (mask if mask.ndim == 4 else mask.unsqueeze(-3)).expand(2, 3, 3, 4)
    completed = model.complete_images(images, mask, 2, seed=1)
    assert completed.shape == (4, 3, 3, 4)
    for index in range(4):
        same = completed[index] == images[index // 2]
        assert same[given[index // 2]].all()
        assert not same[~given[index // 2]].all()


def test_the_top_half_alone_decides_what_comes_below_it():
    model, images = small(), draw_images()
    mask = half_mask('top-half', (3, 4))
    assert mask.tolist() == [[True] * 4, [False] * 4, [False] * 4]
    other = images.clone()
    other[:, :, 1:] = 7
    assert torch.equal(model.complete_images(other, mask, seed=1), model.complete_images(images, mask, seed=1))


@pytest.mark.parametrize(('one', 'other'), [('top-half', 'bottom-half'), ('left-half', 'right-half')])
def test_two_halves_make_an_image(one: str, other: str):
    assert torch.equal(half_mask(one, (3, 5)), ~half_mask(other, (3, 5)))
    assert half_mask(one, (4, 4)).sum() == 8


@pytest.mark.parametrize('name', DECODERS)
def test_a_checkpoint_gives_the_model_back(name: str, tmp_path: Path):
    model = small(name)
    save_decoder(model, tmp_path / 'model.pt', epoch=3)
    loaded = load_decoder(tmp_path / 'model.pt')
    assert not loaded.training
    assert (loaded.task, loaded.model_args) == (model.task, model.model_args)
    tokens = torch.zeros(1, model.context, dtype=torch.int64)
    assert torch.equal(loaded(tokens), model(tokens))
    assert torch.load(tmp_path / 'model.pt', weights_only=True)['epoch'] == 3


def test_a_decoder_with_numbers_of_numpy_is_read_back(tmp_path: Path):
    sizes = dict(img_size=(np.int64(4), np.int64(4)), depth=np.int32(1), dim=np.int64(4), dropout=np.float64(0.5))
    model = create_decoder('aft_simple_pixel', **sizes).eval()
    save_decoder(model, tmp_path / 'model.pt', history=[{'loss': np.float32(0.5)}], shape=np.array([4, 4]))
    loaded = load_decoder(tmp_path / 'model.pt')
    assert loaded.model_args['kwargs'] == dict(img_size=(4, 4), depth=1, dim=4, dropout=0.5)
    tokens = torch.zeros(1, model.context, dtype=torch.int64)
    assert torch.equal(loaded(tokens), model(tokens))
    content = torch.load(tmp_path / 'model.pt', weights_only=True)
    assert (content['history'], content['shape']) == ([{'loss': 0.5}], [4, 4])


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (b'no checkpoint', 'expected a whole file of weights, got .*, which is damaged or of another kind'),
        (b'junk\n', 'expected a whole file of weights, got .*, which is damaged or of another kind$'),
        ({'state_dict': {}}, r"'model_args', 'state_dict', 'task'.* got \['state_dict'\]"),
        ({'state_dict': {}, 'task': 'pixel', 'model_args': {'name': 'resnet50', 'kwargs': {}}}, "got 'resnet50'"),
        (
            {'state_dict': {}, 'task': 'char', 'model_args': {'name': 'aft_simple_char', 'kwargs': dict(depth=1)}},
            'Missing key.*start_embed',
        ),
    ],
    ids=['bytes', 'unknown byte', 'keys', 'name', 'weights'],
)
def test_a_file_that_is_no_checkpoint_is_named(content: Any, message: str, tmp_path: Path):
    path = tmp_path / 'model.pt'
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=message):
        load_decoder(path)


REJECTED = [
    (lambda: create_decoder('aft_conv_pixel'), "must be one of aft_local_pixel, .* got 'aft_conv_pixel'"),
    (lambda: create_decoder('aft_local_char', img_size=8), 'aft_local_char: AFTDecoder has no img_size; it takes'),
    (lambda: create_decoder('aft_simple_pixel', window=8), "mixer='simple' has no window"),
    (lambda: create_decoder('aft_local_pixel', context=100), r'context must be 75, .* 5 x 5 pixels, got 100'),
    (lambda: small().complete_images(draw_images()[:, :, :2], half_mask('top-half', (3, 4))), r'\(B, 3, 3, 4\), got'),
    (lambda: small().complete_images(draw_images().float(), half_mask('top-half', (3, 4))), 'must be uint8'),
    (lambda: small().complete_images(draw_images(), torch.ones(4, 3).bool()), r'\(3, 4\) or .* got .* \(4, 3\)'),
    (lambda: small().to_images(torch.zeros(1, 35)), r'expected 36 tokens for 3 x 4 pixels, got shape \(1, 35\)'),
    (lambda: half_mask('middle', (3, 4)), "must be one of top-half, .* got 'middle'"),
    (lambda: save_decoder(AFTDecoder(4, dim=4, mixer='simple'), 'x.pt'), 'made by create_decoder'),
    (lambda: load_decoder('missing.pt'), 'missing.pt, which does not exist'),
]


@pytest.mark.parametrize(('call', 'message'), REJECTED, ids=[message for _, message in REJECTED])
def test_a_wrong_input_is_named(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_square_image_may_be_told_by_its_context():
    assert create_decoder('aft_simple_pixel', context=48, depth=1, dim=4).img_size == (4, 4)
