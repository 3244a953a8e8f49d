"""The compiled blocks of decoding: the values of their layers, and what they support."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, randn, threads
from torch import Tensor, nn

from aft_vision import ops
from aft_vision.ops import Dense
from aft_vision.ops.decode import step_cpp

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures('compiled')]


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


def make_decoder(
    layers: list[Dense | None], mixed: Tensor | None = None, head: Dense | None = None, **kwargs: Any
) -> tuple[Callable[[Tensor], Tensor] | None, list[Tensor]]:
    """A block whose mixer gives `mixed`, and what it is called with; the head is the identity."""
    seen: list[Tensor] = []
    dim, batch = layers[3].weight.shape[0], kwargs.pop('batch', 2 if mixed is None else len(mixed))

    def mix(projected: Tensor) -> Tensor:
        seen.append(projected.clone())
        return mixed

    parts = dict(gated=True, state=(torch.zeros(batch, dim),), factors=None, mix=mix) | kwargs
    return ops.compile_decoder([ops.Block(*layers, **parts)], head or Dense(torch.eye(dim), None), batch), seen


@pytest.mark.parametrize('batch', [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize(
    ('dim', 'hidden', 'projected'), [(64, 128, 192), (19, 53, 45), (3, 5, 2)], ids=['even', 'odd', 'few']
)
@pytest.mark.parametrize(('bias', 'proj'), [(True, True), (False, False)], ids=['with biases', 'without'])
def test_they_are_those_of_torch(batch: int, dim: int, hidden: int, projected: int, bias: bool, proj: bool):
    qkv, out, fc1, fc2 = layers = make_block(dim, hidden, projected, bias, proj)
    # Rows with a mean far from 0 and of different sizes.
    x = (randn(batch, dim) * torch.linspace(3, 30, batch).double()[:, None] + 5).float()
    y, head = randn(batch, dim, seed=1).float(), make_layer(dim, 7, 50, norm=True, bias=bias)
    step, seen = make_decoder(layers, y, head)
    found = step(x.clone())
    assert_close(seen[0], apply(qkv, x.double()), 1e-6)
    total = x.double() + (y.double() if out is None else apply(out, y.double()))
    assert_close(found, apply(head, total + apply(fc2, apply(fc1, total))), 1e-6)


def test_rows_and_threads_change_nothing():
    # 7 rows are computed as 4, 2 and 1, of layers that are worth three threads.
    layers, x, y = make_block(160, 400, 480), randn(7, 160).float(), randn(7, 160, seed=1).float()
    step, _ = make_decoder(layers, y)
    found = step(x.clone())
    for b in range(7):
        alone, _ = make_decoder(layers, y[b : b + 1])
        assert_close(alone(x[b : b + 1].clone()), found[b : b + 1].double(), 1e-6)
    with threads(3):
        assert torch.equal(step(x.clone()), found)


def test_the_gelu_keeps_digits_at_every_size():
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.tensor([1e-30, -1e-30, 1e-8, 1e4, -1e4, 3e38, -3e38])])
    one, gelu = Dense(torch.ones(1, 1), None), Dense(x[:, None], None, gelu=True)
    step, _ = make_decoder([one, None, one, one], torch.zeros(1, 1), gelu)
    # The blocks double a token of 1/2 to 1 before the head.
    y = step(torch.full((1, 1), 0.5))[0].double()
    expected = F.gelu(x.double())
    # 1 + erf is as exact as float32 has 1: nothing is lost where it is not small.
    assert ((y - expected).abs() <= 2e-7 * x.double().abs()).all()
    positive = x > 0
    assert ((y - expected).abs() <= 4e-7 * expected)[positive].all()


def is_supported(layers: list[Dense | None], **kwargs: Any) -> bool:
    return make_decoder(layers, **kwargs)[0] is not None


def test_few_rows_and_plain_float32_parameters_in_order_are_supported():
    layers = make_block(8, 16, 24)
    assert is_supported(layers, batch=step_cpp.MAX_ROWS)
    assert not is_supported(layers, batch=step_cpp.MAX_ROWS + 1)
    weight = layers[0].weight
    for other in (weight.double(), weight.bfloat16(), weight.mT.contiguous().mT, weight.to('meta')):
        assert not is_supported([layers[0]._replace(weight=other), *layers[1:]])
    assert is_supported([layers[0]._replace(bias=nn.Parameter(layers[0].bias)), *layers[1:]])


def test_each_layer_must_take_what_the_one_before_it_gives():
    layers = make_block(8, 16, 24)
    qkv, proj, fc1, _ = layers
    wrong: list[tuple[int, Dense]] = [
        (1, make_layer(8, 4, 20)),
        (1, make_layer(4, 8, 20)),
        (2, make_layer(4, 16, 30, norm=True)),
        (3, make_layer(12, 8, 40)),
        (0, qkv._replace(norm_weight=torch.ones(4))),
        (0, qkv._replace(norm_bias=torch.ones(12))),
        (0, qkv._replace(norm_bias=None)),
        (0, qkv._replace(bias=torch.ones(8))),
        (1, proj._replace(weight=torch.ones(64))),
        (2, fc1._replace(norm_weight=torch.ones(16))),
    ]
    assert is_supported(layers)
    for place, layer in wrong:
        assert not is_supported([*layers[:place], layer, *layers[place + 1 :]])
    assert not is_supported(layers, head=make_layer(9, 8, 40))


@pytest.mark.parametrize('gated', [True, False], ids=['gated', 'no gate'])
def test_a_compiled_mixer_needs_its_parts_and_its_state(gated: bool):
    simple, local, u = ops.aft_simple_state(2, 8), ops.aft_local_state(2, 8, 3), torch.zeros(5, 4)
    for projected in (16, 24, 32):
        layers = make_block(8, 16, projected)
        matches = projected == (24 if gated else 16)
        assert is_supported(layers, gated=gated, state=simple) == matches
        assert is_supported(layers, gated=gated, state=local, factors=(u, u)) == matches
    layers = make_block(8, 16, 24)
    for state in (
        ops.aft_local_state(3, 8, 3),
        ops.aft_local_state(2, 8, 6),
        ops.aft_local_state(2, 8, 3, torch.float64),
    ):
        assert not is_supported(layers, state=state, factors=(u, u))
    assert not is_supported(layers, state=local, factors=(u, u[:4]))
    assert not is_supported(layers, state=local, factors=(u.double(), u.double()))
