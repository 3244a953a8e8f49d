"""Compiled and Triton forms of every operation: their values, masks, nasty inputs, and where they run.

What one operation alone promises, or one of its forms, is tested in its folder.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import timm
import torch
from helpers import (
    BIASES,
    BOUNDS,
    NASTY_BIASES,
    NASTY_KEYS,
    assert_close,
    assert_keys_of_minus_infinity_are_masked,
    assert_masked_tokens_have_no_effect,
    assert_matches_reference,
    change,
    kernels_run,
    make_inputs,
    make_nasty,
    plain,
    randn,
    single,
    threads,
)
from torch import Tensor

import aft_vision
from aft_vision.ops import operator, reference
from aft_vision.ops.common import cpp
from aft_vision.ops.declaration import OPERATIONS

# A call that takes another form than the one asked for is a failure.
pytestmark = pytest.mark.filterwarnings("error:.*has no '.*' form")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The arguments of `make_inputs` after the name: tokens or grid, channels, window, heads, sequences.
Sizes = tuple[Any, ...]


@pytest.fixture
def device(form: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give the device of a form: a backend or its name, and after it how it takes these inputs as others."""
    operator._warn_once.cache_clear()
    # Before any module of kernels is imported: without Triton it skips, and without a GPU Triton must interpret them.
    found = request.getfixturevalue('triton_device' if form.startswith('triton') else 'compiled')
    if form == 'triton products':
        # Short sequences as longer ones, few as many.
        for limit in (
            'common.launch.WHOLE',
            'common.launch.WHOLE_INTERPRETED',
            'conv.triton.DIRECT',
            'conv.triton.DIRECT_INTERPRETED',
        ):
            monkeypatch.setattr(f'aft_vision.ops.{limit}', 0)
    # Also on a processor that multiplies float32 faster, or has neither.
    kind = {'pairs': cpp.PAIRS, 'tiles': cpp.TILES}.get(form.split()[-1])
    with nullcontext() if kind is None else cpp.multiply_bfloat16_as(kind):
        yield found or 'cpu'


def dtype_of(form: str) -> torch.dtype:
    """The type of inputs that a form multiplies in its own way."""
    return torch.bfloat16 if form.endswith(('pairs', 'tiles')) else torch.float32


def op(form: str, name: str) -> Callable[..., Tensor]:
    """An operation in a form."""
    return partial(getattr(aft_vision.ops, name), backend=form.split()[0])


def rows(names: str, cases: Iterable[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrize a test, with the mark of the compiled kernels on their rows; the first name is `form`."""
    found = [
        pytest.param(*x, marks=() if x[0].startswith('triton') else pytest.mark.cpp, id='-'.join(map(str, x)))
        for x in cases
    ]
    return pytest.mark.parametrize(names, found)


# Less than a vector, whole ones and a rest, of channels, of tokens and of heads, heads within a vector, across two and
# wider than a strip; rows longer than the registers hold, kernels and biases beyond the grid, one row, few tokens;
# windows of one token and of more than the sequence, blocks of 32 and of 45 tokens.
HEADS = [
    *(((1, 5), 6, 5, 2), ((3, 4), 70, 5, 7), ((5, 7), 36, 5, 18), ((4, 8), 32, 5, 16), ((6, 3), 90, 5, 2)),
    ((4, 43), 12, 5, 3),
]
SEQUENCES = [(30, 16, 4), (64, 8, 3), (65, 37, 1), (40, 7, 60), (150, 37, 5), (200, 19, 91)]
# Rows and columns that tiles of 16 by 16, two by two, do not fill.
TILED: list[tuple[str, str, Sizes]] = [
    *(
        ('cpp tiles', 'aft_full', (T, D))
        for T, D in ((15, 16), (16, 5), (17, 40), (31, 16), (33, 33), (64, 3), (197, 20))
    ),
    ('cpp tiles', 'aft_full', (33, 17, 0, None, 1)),
    # Pieces of a row, steps of a piece, an odd number of rows and of strips, kernels beyond the grid.
    *(('conv tiles', 'aft_conv', ((1, 9), 6, 5, 2)), ('conv tiles', 'aft_conv', ((5, 15), 36, 5, 18))),
    *(('conv tiles', 'aft_conv', ((7, 8), 6, 5, 2)), ('conv tiles', 'aft_conv', ((3, 16), 18, 9, 1, 1))),
    *(('conv tiles', 'aft_conv', ((14, 14), 12, 11, 2, 3)), ('conv tiles', 'aft_conv', ((3, 33), 34, 3, 2))),
    *(('conv tiles', 'aft_conv', ((2, 40), 6, 31, 3)), ('conv tiles', 'aft_conv', ((3, 70), 4, 9, 1))),
    *(('cpp tiles', 'aft_local_causal', x) for x in ((15, 16, 4), (16, 5, 3), (17, 33, 60), (31, 16, 31), (33, 3, 9))),
    *(('cpp tiles', 'aft_local_causal', x) for x in ((64, 20, 64), (100, 20, 1), (150, 37, 5), (197, 19, 91))),
]
# The same in pairs, whose blocks of rows and strips are those of float32.
PAIRED = [(form.replace('tiles', 'pairs'), name, sizes) for form, name, sizes in TILED]
COMPILED: dict[tuple[str, str], list[Sizes]] = {
    ('cpp', 'aft_full'): [(8, 5), (20, 40), (17, 64), (61, 33)],
    ('wide', 'aft_conv'): HEADS,
    ('conv', 'aft_conv'): HEADS,
    # A head per channel.
    ('cpp', 'aft_conv'): [
        *(((5, 7), 66, 3), ((3, 30), 67, 9), ((4, 3), 72, 15), ((1, 9), 130, 5), ((1, 6), 65, 3), ((10, 9), 80, 11)),
    ],
    ('cpp', 'aft_onehot'): [((5, 7), 66, 4), ((1, 9), 130, 4), ((10, 9), 80, 4)],
    ('cpp', 'aft_axial'): [
        *(((5, 7), 66, (5, 7)), ((3, 30), 67, (2, 9)), ((6, 5), 60, (9, 2), 10), ((4, 3), 72, (4, 3), 3)),
        *(((2, 9), 96, (2, 9), 6), ((8, 2), 40, (3, 1), 20), ((10, 9), 40, (10, 9), 1)),
    ],
    ('cpp', 'aft_local_causal'): SEQUENCES,
    ('cpp', 'aft_simple_causal'): SEQUENCES,
}
# AFT-axial: heads of several channels, a head per channel, two parts of a head.
SEVERAL, EACH, PARTS = ((3, 7), 6, (3, 4), 2), ((3, 5), 2, (9, 5), 2, 6), ((4, 3), 40, (2, 3), 1, 1)


@rows(
    'form, name, sizes, others, dtype',
    [
        *(
            (*key, x, others, dtype)
            for key, sizes in COMPILED.items()
            for x, others, dtype in product(sizes, ('', 'masked'), DTYPES[:2])
        ),
        # It is copied to float32.
        *((*key, sizes[0], 'masked', torch.float16) for key, sizes in COMPILED.items()),
        *(('conv pairs', 'aft_conv', x, 'masked', torch.bfloat16) for x in HEADS),
        *(('cpp pairs', 'aft_full', (math.prod(x[0]), x[1]), 'masked', torch.bfloat16) for x in HEADS),
        *((*x, others, torch.bfloat16) for x in TILED for others in ('', 'masked', 'no gate')),
        *((*x, others, torch.bfloat16) for x in PAIRED for others in ('', 'masked')),
        ('cpp', 'aft_full', (20, 40), 'no gate', torch.float32),
        ('wide', 'aft_conv', ((3, 4), 70, 5, 7), 'no gate', torch.float32),
        ('conv', 'aft_conv', ((3, 4), 70, 5, 7), 'no gate', torch.float32),
        ('cpp', 'aft_conv', ((5, 7), 66, 3), 'no gate', torch.float32),
        ('cpp', 'aft_local_causal', (70, 9, 9), 'no gate', torch.float32),
        ('cpp', 'aft_simple_causal', (70, 9), 'no gate', torch.float32),
        # Kernels within and beyond reach.
        *(
            (form, 'aft_conv', (grid, 12, s, 3), others, dtype)
            for form, others in (('wide', ''), ('conv', ''), ('conv', 'window alone'))
            for grid, s in (((5, 7), 5), ((9, 40), 7), ((3, 4), 15), ((40, 2), 3))
            for dtype in DTYPES[:2]
        ),
        ('conv tiles', 'aft_conv', ((9, 40), 12, 7, 3), 'window alone', torch.bfloat16),
        ('conv tiles', 'aft_conv', ((3, 9), 12, 19, 3), 'window alone', torch.bfloat16),
        # Tiles that the tokens and channels do not fill, several tiles; one token.
        ('triton', 'aft_full', (5, 16), '', torch.bfloat16),
        ('triton', 'aft_full', (18, 17), '', torch.float32),
        ('triton', 'aft_full', (9, 5, 0, None, 3), 'masked', torch.float16),
        ('triton', 'aft_full', (16, 17, 0, None, 3), '', torch.float32),
        ('triton products', 'aft_full', (9, 5, 0, None, 3), 'masked', torch.float32),
        ('triton', 'aft_simple', (1, 3), '', torch.float32),
        ('triton', 'aft_simple', (5, 16), '', torch.float16),
        ('triton', 'aft_simple', (18, 17), '', torch.float32),
        ('triton', 'aft_simple', (5, 3), '', torch.bfloat16),
        ('triton', 'aft_simple', (9, 5), 'no gate', torch.float32),
        ('triton', 'aft_simple', (9, 5, 0, None, 3), 'masked', torch.float32),
        # Several tiles of tokens and of sequences, a row, a head per channel, a kernel beyond the grid, a column.
        ('triton', 'aft_conv', ((5, 7), 2, 3, 2, 3), '', torch.float32),
        ('triton', 'aft_conv', ((1, 5), 2, 3, 2, 5), '', torch.float32),
        ('triton', 'aft_conv', ((1, 9), 40, 5, 1), '', torch.float32),
        ('triton', 'aft_conv', ((4, 3), 16, 15, 2, 3), '', torch.float32),
        ('triton', 'aft_conv', ((6, 1), 6, 7, 2), '', torch.float32),
        # Four tiles of columns, of which three are near each other.
        ('triton', 'aft_conv', ((1, 50), 1, 3, 1, 1), '', torch.float32),
        ('triton', 'aft_conv', ((3, 5), 12, 3, 1, 3), 'masked no gate', torch.float32),
        ('triton', 'aft_conv', ((3, 5), 12, 3, 1, 3), 'masked no gate window alone', torch.float32),
        ('triton products', 'aft_conv', ((3, 5), 12, 3, 1, 3), 'masked', torch.float32),
        # A head per channel: lines of sources outside the windows of all targets of a tile, before and after them.
        ('triton', 'aft_conv', ((7, 2), 17, 3, 17, 1), '', torch.float32),
        ('triton', 'aft_conv', ((7, 2), 3, 3), 'masked no gate window alone', torch.float32),
        ('triton', 'aft_conv', ((3, 6), 5, 15), 'masked', torch.bfloat16),
        ('triton', 'aft_conv', ((2, 17), 3, 5, 3, 1), 'no gate', torch.float16),
        ('triton products', 'aft_conv', ((3, 6), 3, 3), 'masked', torch.float32),
        # Operands that heads and sequences do not fill.
        ('triton', 'aft_conv', ((2, 8), 20, 5, 4, 3), '', torch.float32),
        ('triton', 'aft_conv', ((2, 3), 14, 5, 2, 5), 'masked no gate', torch.bfloat16),
        ('triton', 'aft_axial', SEVERAL, '', torch.float32),
        ('triton', 'aft_axial', EACH, '', torch.float16),
        ('triton', 'aft_axial', PARTS, '', torch.float32),
        ('triton', 'aft_axial', ((2, 5), 3, (2, 4), 1, 3), 'masked no gate', torch.float32),
        # One block, several blocks with short and long windows, several tiles of channels.
        ('triton', 'aft_local_causal', (5, 3, 4), '', torch.float32),
        ('triton', 'aft_local_causal', (33, 3, 1, None, 1), '', torch.float32),
        ('triton', 'aft_local_causal', (33, 3, 40, None, 1), '', torch.float32),
        ('triton', 'aft_local_causal', (36, 5, 4, None, 1), '', torch.float32),
        ('triton', 'aft_local_causal', (5, 3, 4), '', torch.float16),
        ('triton', 'aft_local_causal', (36, 17, 33, None, 1), '', torch.float32),
        ('triton', 'aft_local_causal', (18, 3, 4), '', torch.bfloat16),
        ('triton', 'aft_local_causal', (40, 3, 4), 'masked no gate', torch.float32),
        ('triton', 'aft_simple_causal', (5, 4, 0, None, 1), '', torch.float16),
        ('triton', 'aft_simple_causal', (35, 5, 0, None, 1), '', torch.float32),
        ('triton', 'aft_simple_causal', (18, 3, 0, None, 1), '', torch.bfloat16),
    ],
)
def test_it_equals_float64(form: str, name: str, sizes: Sizes, others: str, dtype: torch.dtype, device: str):
    inputs = change(name, make_inputs(name, *sizes), others)
    assert_matches_reference(op(form, name), getattr(reference, name), inputs, dtype, device=device)


# What cancels there, keys and biases, has a gradient of rounding noise, which is measured against that of v.
@rows(
    'form, name, sizes, others',
    [
        ('triton', 'aft_full', (1, 3), 'no gate'),
        ('triton products', 'aft_full', (1, 3), 'no gate'),
        ('triton', 'aft_conv', ((1, 1), 3, 3, 1), ''),
        ('triton', 'aft_conv', ((1, 1), 3, 3), ''),
        ('triton', 'aft_local_causal', (1, 3, 1), ''),
        ('triton', 'aft_simple_causal', (1, 3), 'no gate'),
        ('triton', 'aft_axial', ((1, 1), 4, (2, 9), 2), ''),
        ('triton', 'aft_axial', ((6, 1), 4, (2, 9), 2), ''),
        ('cpp', 'aft_local_causal', (1, 6, 1), ''),
        ('cpp', 'aft_simple_causal', (1, 6), ''),
        *((f'cpp {kind}', 'aft_full', (1, 6), '') for kind in ('pairs', 'tiles')),
        ('conv', 'aft_conv', ((1, 1), 6, 3, 2), ''),
        *((f'cpp {kind}', 'aft_local_causal', (1, 6, 1), '') for kind in ('pairs', 'tiles')),
    ],
)
def test_one_token_or_an_axis_of_one_equals_float64(form: str, name: str, sizes: Sizes, others: str, device: str):
    inputs = change(name, make_inputs(name, *sizes), others)
    assert_matches_reference(
        op(form, name), getattr(reference, name), inputs, dtype_of(form), nasty=True, device=device
    )


# Inputs that underflow are repaired. The biases of AFT-onehot are numbers.
@rows(
    'form, name, sizes, others, keys, bias',
    [
        *(
            (form, name, sizes, '', *nasty)
            for form, name, sizes in (
                ('cpp', 'aft_full', (18, 5)),
                *((f'cpp {kind}', 'aft_full', (18, 5)) for kind in ('pairs', 'tiles')),
                ('wide', 'aft_conv', ((3, 6), 6, 5, 3)),
                ('conv', 'aft_conv', ((3, 6), 6, 5, 3)),
                *((f'conv {kind}', 'aft_conv', ((2, 9), 6, 5, 3)) for kind in ('pairs', 'tiles')),
                ('cpp', 'aft_axial', ((6, 5), 66, (6, 5))),
                ('cpp', 'aft_axial', ((6, 5), 66, (6, 5), 11)),
            )
            for nasty in product(NASTY_KEYS, ('within_50', 'plus_minus_80'))
        ),
        *(('cpp', 'aft_conv', ((6, 5), 66, 5), '', *nasty) for nasty in product(NASTY_KEYS, NASTY_BIASES)),
        *(('cpp', 'aft_onehot', ((6, 5), 66, 4), '', *x) for x in product(NASTY_KEYS, (-50.0, -1e4, 200.0))),
        *(('cpp', 'aft_simple_causal', (140, 11), x, y, 'ordinary') for x in ('', 'masked') for y in NASTY_KEYS),
        *(
            ('triton', 'aft_full', (11, 3, 0, None, 1), '', keys, bias)
            for keys in ('plus_minus_1e4', 'normal_30', 'climbing', 'last_at_200')
            for bias in ('plus_minus_80', 'within_50')
        ),
        *(('triton', 'aft_simple', (9, 5), '', keys, 'ordinary') for keys in NASTY_KEYS),
        *(
            ('triton', 'aft_conv', ((3, 5), 4, 3, 1), '', keys, 'ordinary')
            for keys in ('one_at_90', 'all_at_-120', 'plus_minus_1e4', 'climbing')
        ),
        ('triton', 'aft_conv', ((3, 5), 4, 3, 1), 'window alone', 'ordinary', 'plus_minus_80'),
        ('triton', 'aft_conv', ((3, 5), 4, 3, 1), 'window alone', 'one_at_90', 'within_50'),
        *(
            ('triton', 'aft_conv', ((7, 3), 2, 3, 2, 1), others, keys, bias)
            for others, keys, bias in (
                ('', 'plus_minus_1e4', 'ordinary'),
                ('', 'ordinary', 'plus_minus_80'),
                ('window alone', 'one_at_90', 'within_50'),
            )
        ),
        *(
            ('triton', 'aft_axial', ((2, 4), 4, (2, 4), 1, 1), '', keys, 'ordinary')
            for keys in ('one_at_90', 'plus_minus_1e4')
        ),
        # A third of the denominators underflow.
        ('triton', 'aft_axial', ((2, 3), 2, (3, 3)), '', 'ordinary', 'plus_minus_80'),
        *(
            ('triton', 'aft_local_causal', (40, 2, 4, None, 1), '', keys, 'ordinary')
            for keys in ('first_at_-120', 'plus_minus_1e4', 'climbing')
        ),
        *(('triton', 'aft_simple_causal', (19, 2, 0, None, 1), '', keys, 'ordinary') for keys in NASTY_KEYS),
    ],
)
def test_it_survives_nasty_inputs(
    form: str, name: str, sizes: Sizes, others: str, keys: str, bias: str | float, device: str
):
    inputs = change(name, make_nasty(make_inputs(name, *sizes), keys, bias), others)
    assert_matches_reference(
        op(form, name), getattr(reference, name), inputs, dtype_of(form), nasty=True, device=device
    )


# Those of the other compiled forms are next to the torch forms, in `test_aft.py` and `test_aft_causal.py`.
@rows(
    'form, name, sizes',
    [
        ('triton', 'aft_full', (9, 5)),
        ('triton products', 'aft_full', (9, 5)),
        ('triton', 'aft_simple', (9, 5)),
        ('triton', 'aft_conv', ((2, 3), 4, 3, 2)),
        ('triton', 'aft_conv', ((2, 3), 4, 3, 4)),
        ('triton products', 'aft_conv', ((2, 3), 4, 3, 4)),
        ('triton', 'aft_axial', ((2, 3), 4, (2, 3), 2)),
        ('triton', 'aft_local_causal', (9, 3, 3)),
        ('triton', 'aft_simple_causal', (18, 3)),
        ('cpp', 'aft_axial', ((5, 3), 60, (2, 9), 60)),
        ('cpp', 'aft_axial', ((5, 3), 60, (2, 9), 10)),
    ],
)
def test_a_sequence_of_keys_of_minus_infinity_is_one_without_tokens(form: str, name: str, sizes: Sizes, device: str):
    inputs = make_inputs(name, *sizes)
    assert_keys_of_minus_infinity_are_masked(op(form, name), getattr(reference, name), inputs, device=device)


@rows(
    'form, name, sizes, others, keys, bias, dtype',
    [
        *(
            ('cpp', name, sizes, '', 'ordinary', 'ordinary', dtype)
            for name, sizes in (
                *(('aft_conv', sizes) for sizes in HEADS[1:3]),
                *(('aft_full', (math.prod(grid), D)) for grid, D, *_ in HEADS[1:3]),
            )
            for dtype in DTYPES[:2]
        ),
        ('cpp', 'aft_full', (15, 6), '', 'normal_30', 'plus_minus_80', torch.float32),
        ('cpp tiles', 'aft_full', (35, 20), '', 'ordinary', 'ordinary', torch.bfloat16),
        ('conv tiles', 'aft_conv', ((3, 20), 12, 5, 3), '', 'ordinary', 'ordinary', torch.bfloat16),
        ('cpp tiles', 'aft_local_causal', (40, 9, 5), '', 'ordinary', 'ordinary', torch.bfloat16),
        ('cpp', 'aft_conv', ((5, 7), 66, 3), '', 'ordinary', 'ordinary', torch.float32),
        ('cpp', 'aft_onehot', ((5, 7), 66, 4), '', 'ordinary', 'ordinary', torch.float32),
        ('cpp', 'aft_axial', ((5, 3), 60, (2, 9), 60), '', 'ordinary', 'ordinary', torch.float32),
        ('cpp', 'aft_axial', ((5, 3), 60, (2, 9), 10), '', 'ordinary', 'ordinary', torch.float32),
        ('cpp', 'aft_local_causal', (40, 9, 5), '', 'ordinary', 'ordinary', torch.float32),
        ('cpp', 'aft_simple_causal', (40, 9), '', 'ordinary', 'ordinary', torch.float32),
        ('triton', 'aft_full', (9, 5), '', 'normal_30', 'plus_minus_80', torch.float32),
        ('triton products', 'aft_full', (9, 5), '', 'normal_30', 'plus_minus_80', torch.float32),
        ('triton', 'aft_simple', (9, 5), '', 'ordinary', 'ordinary', torch.float32),
        ('triton', 'aft_conv', ((2, 3), 2, 3, 1, 1), 'window alone', 'ordinary', 'plus_minus_80', torch.float32),
        ('triton', 'aft_axial', ((2, 3), 2, (2, 3), 1, 1), '', 'ordinary', 'plus_minus_80', torch.float32),
        ('triton', 'aft_local_causal', (20, 1, 3, None, 1), '', 'plus_minus_1e4', 'ordinary', torch.float32),
        ('triton', 'aft_simple_causal', (9, 2), '', 'ordinary', 'ordinary', torch.float32),
    ],
)
def test_masked_tokens_may_be_anything(
    form: str, name: str, sizes: Sizes, others: str, keys: str, bias: str, dtype: torch.dtype, device: str
):
    inputs = change(name, make_nasty(make_inputs(name, *sizes), keys, bias), f'masked {others}')
    mask = inputs.pop('mask')
    assert not mask[0].all()
    assert_masked_tokens_have_no_effect(op(form, name), inputs, mask, device, dtype)


LAYOUTS = [
    ('cpp', 'aft_full', (18, 20)),
    # Channels of neighbouring heads lie behind each other.
    ('cpp', 'aft_conv', ((3, 4), 70, 5, 7)),
    ('cpp', 'aft_conv', ((5, 7), 66, 3)),
    ('cpp', 'aft_onehot', ((5, 7), 66, 4)),
    ('cpp', 'aft_axial', ((5, 7), 66, (5, 7), 11)),
    ('cpp', 'aft_local_causal', (70, 9, 12)),
    ('cpp', 'aft_simple_causal', (70, 9)),
    ('triton', 'aft_simple', (9, 5)),
    ('triton', 'aft_conv', ((3, 5), 12, 3, 1)),
    ('triton', 'aft_axial', ((3, 5), 12, (3, 3), 1)),
    ('triton', 'aft_local_causal', (9, 5, 4, None, 1)),
]


@rows('form, name, sizes', LAYOUTS)
def test_parts_of_a_fused_projection_and_columns_are_read_where_they_are(
    form: str, name: str, sizes: Sizes, device: str
):
    inputs = single(make_inputs(name, *sizes), device=device)
    biases = [x for n, x in inputs.items() if n in BIASES]
    widths = [inputs[n].shape[-1] for n in 'qkv']
    projection = torch.cat([inputs[n].detach() for n in 'qkv'], -1).requires_grad_()
    for leaves in ([projection, *biases], [projection]):
        found = []
        for layout in (Tensor.contiguous, lambda x: x, lambda x: x.mT.contiguous().mT):
            parts = dict(zip('qkv', map(layout, projection.split(widths, -1)), strict=True))
            y = op(form, name)(**inputs | parts)
            grad = randn(*y.shape, seed=6, dtype=torch.float32).to(device)
            # A GPU adds in any order.
            found.append([y, *(torch.autograd.grad(y, leaves, grad) if form == 'cpp' else ())])
        for other in found[1:]:
            assert all(map(torch.equal, other, found[0]))
        for x in biases:
            x.requires_grad_(False)


@rows(
    'form, name, sizes',
    [
        *(x for x in LAYOUTS if x[0] == 'cpp' and x[1] != 'aft_simple_causal'),
        ('triton', 'aft_conv', ((2, 2), 4, 3, 2)),
        ('triton', 'aft_axial', ((2, 3), 4, (2, 3), 2)),
    ],
)
def test_biases_that_are_apart_in_memory_equal_float64(form: str, name: str, sizes: Sizes, device: str):
    def apart(name: str, x: Any) -> Any:
        if name not in BIASES:
            return x
        return x.mT.contiguous().mT if x.ndim > 1 else x.repeat_interleave(2)[::2]

    forms = [
        lambda f=f, **x: f(**{n: apart(n, y) for n, y in x.items()}) for f in (op(form, name), getattr(reference, name))
    ]
    assert_matches_reference(*forms, make_inputs(name, *sizes), device=device)


def both(forward: str, backward: str | None = None) -> set[str]:
    """The names of the kernels of a call and of its gradients. No sets in an id: their order is that of a process."""
    return {f'aft_vision::{forward}_forward', f'aft_vision::{backward or forward}_backward'}


def forbid_eager(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let a call fail that leaves anything to the torch form."""
    eager = OPERATIONS[name].forms[-1]
    modules = [x for key, x in sys.modules.items() if key.startswith('aft_vision.ops.')]
    for function in (eager.forward, eager.backward):
        # A kernel calls it by its name in a module.
        found = [(module, key) for module in modules for key, x in vars(module).items() if x is function]
        assert found
        for module, key in found:
            patch.setattr(module, key, lambda *_: pytest.fail('expected the kernels alone'))


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@rows(
    'form, name, sizes, expected',
    [
        ('cpp', 'aft_full', (20, 40), ['full']),
        ('cpp pairs', 'aft_full', (20, 40), ['full']),
        ('cpp tiles', 'aft_full', (20, 40), ['full']),
        ('wide', 'aft_conv', ((3, 4), 70, 5, 7), ['conv_wide', 'conv']),
        ('conv', 'aft_conv', ((3, 4), 70, 5, 7), ['conv']),
        ('conv pairs', 'aft_conv', ((2, 8), 70, 5, 7), ['conv']),
        ('conv tiles', 'aft_conv', ((2, 8), 70, 5, 7), ['conv']),
        ('cpp', 'aft_conv', ((5, 7), 66, 3), ['depthwise']),
        ('cpp', 'aft_onehot', ((5, 7), 66, 4), ['depthwise']),
        ('cpp', 'aft_axial', ((5, 7), 66, (5, 7), 11), ['axial']),
        ('cpp', 'aft_local_causal', (12, 9, 5), ['local']),
        ('cpp pairs', 'aft_local_causal', (12, 9, 5), ['local']),
        ('cpp tiles', 'aft_local_causal', (12, 9, 5), ['local']),
        ('cpp', 'aft_simple_causal', (12, 9), ['simple_causal']),
    ],
)
def test_it_runs_by_itself_and_nothing_of_it_in_torch_unless_eager_is_asked_for(
    form: str,
    name: str,
    sizes: Sizes,
    expected: list[str],
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
):
    inputs = single(make_inputs(name, *sizes), dtype)
    with monkeypatch.context() as patch:
        forbid_eager(patch, name)
        assert kernels_run(lambda: op(form, name)(**inputs).float().sum().backward()) == both(*expected)
    assert kernels_run(lambda: op('eager', name)(**inputs).float().sum().backward()) == set()


@pytest.mark.parametrize('dtype', DTYPES[:2], ids=str)
@rows(
    'form, name, sizes',
    [
        ('cpp', 'aft_full', (20, 40)),
        ('wide', 'aft_conv', ((3, 4), 70, 5, 7)),
        ('conv', 'aft_conv', ((3, 4), 70, 5, 7)),
        ('cpp', 'aft_conv', ((5, 7), 66, 3)),
        ('cpp', 'aft_onehot', ((5, 7), 66, 4)),
        ('cpp', 'aft_axial', ((5, 7), 66, (5, 7), 11)),
    ],
)
def test_a_sequence_without_tokens_is_zero_and_costs_torch_nothing(
    form: str, name: str, sizes: Sizes, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
):
    forbid_eager(monkeypatch, name)
    inputs = single(change(name, make_inputs(name, *sizes), 'masked'), dtype)
    y = op(form, name)(**inputs)
    assert not y[1].any()
    y.float().sum().backward()
    assert not any(inputs[n].grad[1].any() for n in 'qkv')
    assert all(inputs[n].grad[0].any() for n in 'qkv')


@rows(
    'form, name, model, expected',
    [
        ('cpp', 'aft_full_tiny', {}, ['full']),
        ('cpp', 'aft_conv_tiny_k11_h32', {}, ['conv_wide', 'conv']),
        ('cpp', 'aft_conv_small', {}, ['depthwise']),
        ('triton', 'aft_full_tiny', {'img_size': 32, 'embed_dim': 24}, ['full']),
        (
            'triton',
            'aft_conv_tiny_k11_h32',
            {'img_size': 32, 'embed_dim': 48, 'num_heads': 1, 'kernel_size': 3},
            ['conv'],
        ),
        ('triton', 'aft_axial_tiny', {'img_size': 32, 'embed_dim': 24, 'num_heads': 2}, ['conv']),
    ],
)
def test_a_registered_model_runs_it_forward_and_backward(
    form: str, name: str, model: dict[str, int], expected: list[str], device: str, monkeypatch: pytest.MonkeyPatch
):
    if form.startswith('triton'):
        # Kernels of the same names, which come first on a CPU.
        monkeypatch.setattr('aft_vision.ops.common.cpp.library', lambda: None)
    images = torch.randn(1, 3, *[model.get('img_size', 224)] * 2, device=device)
    built = timm.create_model(name, depth=1, num_classes=2, **model).to(device)
    assert kernels_run(lambda: built(images).sum().backward()) == both(*expected)


# Batches that are cut into unequal parts, groups of heads and of sequences of which the last are smaller, and the
# gradients of biases that each thread sums.
@pytest.mark.parametrize('count', [1, 3])
@rows(
    'form, name, sizes, others, dtype',
    [
        *(('cpp', 'aft_full', (35, 40, 0, None, 7), '', dtype) for dtype in DTYPES[:2]),
        *((f'cpp {kind}', 'aft_full', (35, 40, 0, None, 7), '', torch.bfloat16) for kind in ('pairs', 'tiles')),
        *(
            (f'cpp {kind}', 'aft_local_causal', (150, 37, 20, None, 3), '', torch.bfloat16)
            for kind in ('pairs', 'tiles')
        ),
        *(('cpp', 'aft_conv', ((5, 7), 42, 5, 7, 13), *x) for x in product(('', 'masked'), DTYPES[:2])),
        *(
            (f'conv {kind}', 'aft_conv', ((4, 9), 42, 5, 7, 13), 'masked', torch.bfloat16)
            for kind in ('pairs', 'tiles')
        ),
        ('cpp', 'aft_conv', ((5, 7), 66, 3, 66, 5), '', torch.float32),
        ('cpp', 'aft_onehot', ((5, 7), 66, 4, 66, 5), '', torch.float32),
        *(
            ('cpp', 'aft_axial', ((5, 7), 66, (5, 3), h, 5), x, torch.float32)
            for h in (66, 11)
            for x in ('', 'no gate')
        ),
    ],
)
def test_several_threads_equal_float64(
    form: str, name: str, sizes: Sizes, others: str, dtype: torch.dtype, count: int, device: str
):
    inputs = change(name, make_inputs(name, *sizes), others)
    with threads(count):
        assert_matches_reference(op(form, name), getattr(reference, name), inputs, dtype)


@rows('form, name, sizes', [*TILED, *PAIRED])
def test_pairs_and_tiles_give_what_vectors_give_in_other_bits(form: str, name: str, sizes: Sizes, device: str):
    inputs = plain(make_inputs(name, *sizes), torch.bfloat16)
    found = op(form, name)(**inputs)
    with cpp.multiply_bfloat16_as(cpp.SINGLE):
        expected = op(form, name)(**inputs)
    assert_close(found, expected, BOUNDS[torch.bfloat16][0])
    assert not torch.equal(found, expected)


@pytest.mark.parametrize('dtype', DTYPES[:2], ids=str)
@rows(
    'form, name, sizes',
    [
        ('cpp', 'aft_full', (20, 40)),
        *((f'cpp {kind}', 'aft_full', (20, 40)) for kind in ('pairs', 'tiles')),
        *((f'conv {kind}', 'aft_conv', ((2, 8), 70, 5, 7)) for kind in ('pairs', 'tiles')),
        ('cpp', 'aft_conv', ((3, 4), 70, 5, 7)),
        ('cpp', 'aft_conv', ((5, 7), 66, 3)),
        ('cpp', 'aft_axial', ((5, 7), 66, (5, 7), 11)),
    ],
)
def test_a_nan_stays_in_its_sequence_and_channel(form: str, name: str, sizes: Sizes, dtype: torch.dtype, device: str):
    inputs = plain(make_inputs(name, *sizes), dtype)
    clean = op(form, name)(**inputs)
    inputs['v'][0, 3, 5] = float('nan')
    y = op(form, name)(**inputs)
    assert y[0, :, 5].isnan().all()
    y[0, :, 5] = clean[0, :, 5]
    assert torch.equal(y, clean)


@rows(
    'form, name, sizes',
    [
        ('triton', 'aft_full', (6, 4)),
        ('triton products', 'aft_full', (6, 4)),
        ('triton', 'aft_conv', ((2, 3), 4, 3, 2)),
        ('triton', 'aft_axial', ((2, 3), 4, (2, 3), 2)),
    ],
)
def test_a_nan_key_makes_the_gradients_of_the_values_that_it_weights_nan(
    form: str, name: str, sizes: Sizes, device: str
):
    inputs = make_inputs(name, *sizes)
    inputs['k'][0, 3, 0] = float('nan')
    inputs = single(inputs, device=device)
    (found,) = torch.autograd.grad(op(form, name)(**inputs).sum(), inputs['v'])
    expected = torch.zeros_like(found, dtype=torch.bool)
    expected[0, :, : 4 // inputs['k'].shape[2]] = True
    assert torch.equal(found.isnan(), expected)


# Sums over thousands of nearly equal terms of one sign: one running sum would lose 2e-4 of the gradients. The torch
# forms in float64, which equal the reference elsewhere, need no (T, T, D) weights.
@rows(
    'form, name, sizes',
    [
        ('cpp', 'aft_full', (2000, 9, 0, None, 1)),
        ('cpp', 'aft_conv', ((40, 50), 9, 11, 3, 1)),
        # As many tokens as 1024 px have.
        ('cpp', 'aft_conv', ((64, 64), 66, 3, 66, 1)),
        ('cpp', 'aft_axial', ((64, 64), 66, (14, 14), 11, 1)),
    ],
)
def test_the_digits_of_many_tokens_are_kept(form: str, name: str, sizes: Sizes, device: str):
    inputs = make_inputs(name, *sizes)
    inputs |= {n: x / 100 for n, x in inputs.items() if n in ('k', *BIASES)} | {'v': inputs['v'].abs() + 1}
    assert_matches_reference(op(form, name), op('eager', name), inputs, bounds=(5e-6, 5e-5))
