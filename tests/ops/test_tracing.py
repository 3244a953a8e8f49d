"""torch.jit.trace of the operations, and what a trace gives."""

import io

import pytest
import torch
from helpers import make_inputs, randn
from torch import Tensor, nn
from torch.jit import TracerWarning

from aft_vision import ops
from aft_vision.ops.declaration import OPERATIONS

INPUTS = {name: make_inputs(name, (3, 5), s=3, heads=3) for name in OPERATIONS}


class Grid(nn.Module):
    """An operation on maps (B, D, H, W), whose sizes a trace sees as tensors."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.others = {key: x for key, x in INPUTS[name].items() if key not in ('q', 'k', 'v', 'grid')}

    def forward(self, maps: Tensor) -> Tensor:
        v = maps.flatten(2).transpose(1, 2)
        return getattr(ops, self.name)(v, v[..., :3], v, **self.others, grid=(maps.shape[2], maps.shape[3]))


def nodes(traced: torch.jit.ScriptFunction) -> list[str]:
    return [node.kind() for node in traced.graph.nodes() if node.kind().startswith('aft_vision')]


@pytest.mark.parametrize('gradients', [True, False])
@pytest.mark.parametrize('name', OPERATIONS)
def test_a_trace_is_one_node_with_the_result_and_the_gradient(name: str, gradients: bool):
    q, k, v, *others = INPUTS[name].values()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return getattr(ops, name)(q, k, v, *others)

    # torch checks the trace against another, made without gradients.
    with torch.set_grad_enabled(gradients):
        traced = torch.jit.trace(call, (q, k, v))
    assert nodes(traced) == [f'aft_vision::{name}']
    inputs = [x.clone().requires_grad_() for x in (q + 1, k - 1, v)]
    y, expected = traced(*inputs), call(*inputs)
    assert torch.equal(y, expected)
    for got, wanted in zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (y, expected)), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize('name', [name for name, operation in OPERATIONS.items() if operation.has_grid])
def test_a_trace_that_was_saved_has_the_grid_it_was_made_for(name: str):
    module, maps = Grid(name), randn(2, 6, 3, 5)
    with pytest.warns(TracerWarning, match='Python integer'):
        traced = torch.jit.trace(module, maps)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert torch.equal(loaded(maps + 1), module(maps + 1))
    # The second has as many tokens, and a result of its own.
    for sizes in ((4, 6), (5, 3)):
        message = rf'made for a grid of \(3, 5\) tokens, got \({sizes[0]}, {sizes[1]}\)'
        for each in (traced, loaded):
            with pytest.raises(torch.jit.Error, match=message):
                each(randn(2, 6, *sizes))
