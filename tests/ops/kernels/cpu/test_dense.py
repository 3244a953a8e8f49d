"""The compiled linear layers of decoding: their values, and what they cover."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, randn
from torch import Tensor, nn

from aft_vision import ops
from aft_vision.ops import Dense
from aft_vision.ops.decode import dense_cpp as dense


def make_layer(n: int, outputs: int, seed: int, norm: bool = False, bias: bool = True, gelu: bool = False) -> Dense:
    weight = randn(outputs, n, seed=seed, scale=n**-0.5).float()
    norms = (*randn(2, n, seed=seed + 1).float(), 1e-6) if norm else (None, None, 0.0)
    return Dense(weight, randn(outputs, seed=seed + 2).float() if bias else None, *norms, gelu=gelu)


def apply(layer: Dense, x: Tensor) -> Tensor:
    """The layer by torch, in float64."""
    weight, bias, scale, shift = (None if y is None else y.double() for y in layer[:4])
    if scale is not None:
        x = F.layer_norm(x, x.shape[1:], scale, shift, layer.eps)
    x = F.linear(x, weight, bias)
    return F.gelu(x) if layer.gelu else x


def make_block(dim: int, hidden: int, projected: int, bias: bool = True, proj: bool = True) -> list[Dense | None]:
    return [
        make_layer(dim, projected, 10, norm=True, bias=bias),
        make_layer(dim, dim, 20, bias=bias) if proj else None,
        make_layer(dim, hidden, 30, norm=True, bias=bias, gelu=True),
        make_layer(hidden, dim, 40, bias=bias),
    ]


@pytest.mark.parametrize('batch', [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize(
    ('dim', 'hidden', 'projected'), [(64, 128, 192), (19, 53, 45), (3, 5, 2)], ids=['even', 'odd', 'few']
)
@pytest.mark.parametrize('bias', [True, False], ids=['bias', 'no bias'])
@pytest.mark.parametrize('proj', [True, False], ids=['proj', 'no proj'])
def test_they_are_those_of_torch(batch: int, dim: int, hidden: int, projected: int, bias: bool, proj: bool):
    qkv, out, fc1, fc2 = layers = make_block(dim, hidden, projected, bias, proj)
    # Rows with a mean far from 0 and of different sizes.
    x = randn(batch, dim) * torch.linspace(3, 30, batch).double()[:, None] + 5
    y = randn(batch, dim, seed=1)
    block = ops.dense_block(*layers)
    assert_close(block.project(x.float()), apply(qkv, x.float().double()), 1e-6)
    total = x.float().double() + (y if out is None else apply(out, y.float().double()))
    assert_close(block.finish(x.float(), y.float()), total + apply(fc2, apply(fc1, total)), 1e-6)


def test_rows_and_threads_change_nothing():
    # 7 rows are computed as 4, 2 and 1.
    # Layers that are worth three threads.
    block, x, y = ops.dense_block(*make_block(160, 400, 480)), randn(7, 160).float(), randn(7, 160, seed=1).float()
    projected, finished = block.project(x), block.finish(x, y)
    for b in range(7):
        assert_close(block.project(x[b : b + 1]), projected[b : b + 1].double(), 1e-6)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(block.project(x), projected)
        assert torch.equal(block.finish(x, y), finished)
    finally:
        torch.set_num_threads(threads)


def test_the_gelu_keeps_digits_at_every_size():
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.tensor([1e-30, -1e-30, 1e-8, 1e4, -1e4, 3e38, -3e38])])
    one = Dense(torch.ones(1, 1), None)
    y = ops.dense_block(Dense(x[:, None], None, gelu=True), None, one, one).project(torch.ones(1, 1))[0].double()
    expected = F.gelu(x.double())
    # 1 + erf is as exact as float32 has 1: nothing is lost where it is not small.
    assert ((y - expected).abs() <= 2e-7 * x.double().abs()).all()
    positive = x > 0
    assert ((y - expected).abs() <= 4e-7 * expected)[positive].all()


def test_it_covers_plain_float32_parameters_in_order():
    layers = make_block(8, 16, 24)
    assert isinstance(ops.dense_block(*layers), dense.DenseBlock)
    weight = layers[0].weight
    for other in (weight.double(), weight.bfloat16(), weight.mT.contiguous().mT, weight.to('meta')):
        assert ops.dense_block(layers[0]._replace(weight=other), *layers[1:]) is None
    assert ops.dense_block(layers[0]._replace(bias=nn.Parameter(layers[0].bias)), *layers[1:]) is not None


def test_it_covers_few_float32_rows_in_order():
    block = ops.dense_block(*make_block(8, 16, 24))
    assert block.covers(torch.zeros(dense.MOST_ROWS, 8))
    for x in (torch.zeros(dense.MOST_ROWS + 1, 8), torch.zeros(2, 8).double(), torch.zeros(8, 2).mT):
        assert not block.covers(x)
    for shape in ((2, 7), (2, 9), (8,), (2, 1, 8), (1, 2, 8)):
        assert not block.covers(torch.zeros(shape))


def test_it_covers_layers_of_which_each_takes_what_that_before_it_gives():
    layers = make_block(8, 16, 24)
    qkv, proj, fc1, _ = layers
    wrong: list[tuple[int, Dense]] = [
        (1, make_layer(8, 4, 20)),
        (1, make_layer(4, 8, 20)),
        (2, make_layer(4, 16, 30, norm=True)),
        (3, make_layer(12, 8, 40)),
        (3, make_layer(16, 12, 40)),
        (0, qkv._replace(norm_weight=torch.ones(4))),
        (0, qkv._replace(norm_bias=torch.ones(12))),
        (0, qkv._replace(bias=torch.ones(8))),
        (1, proj._replace(weight=torch.ones(64))),
        (2, fc1._replace(norm_weight=torch.ones(16))),
    ]
    assert ops.dense_block(*layers) is not None
    for place, layer in wrong:
        assert ops.dense_block(*layers[:place], layer, *layers[place + 1 :]) is None


@pytest.mark.parametrize('gated', [True, False], ids=['gated', 'no gate'])
def test_a_block_in_one_call_needs_the_parts_that_its_mixer_takes(gated: bool):
    simple, local, bias = ops.aft_simple_state(2, 8), ops.aft_local_state(2, 8, 3), torch.zeros(5, 4)
    for projected in (16, 24, 32):
        block, x = ops.dense_block(*make_block(8, 16, projected)), torch.zeros(2, 8)
        fits = projected == (24 if gated else 16)
        assert (ops.simple_block(block, x, gated, simple) is not None) == fits
        assert (ops.local_block(block, x, gated, bias, bias, local) is not None) == fits
