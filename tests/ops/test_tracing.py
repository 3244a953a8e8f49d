"""torch.jit.trace of the operations, and what a trace gives."""

import io

import pytest
import torch
from helpers import make_qkv, randn
from torch import Tensor, nn
from torch.jit import TracerWarning

from aft_vision import ops

Q, K, V = make_qkv(T=15, D=6)
OFFSET = torch.tensor([[0, 1], [-1, 0], [9, 9]])
SQUARE, BAND, PAST, KERNEL, WEIGHT = randn(15, 15), randn(15, 5), randn(15, 3), randn(3, 3, 3), randn(3)
AXIS = randn(3, 5)


class Grid(nn.Module):
    """An operation on maps (B, D, H, W), whose sizes a trace sees as tensors."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.bias = nn.Parameter({'aft_conv': KERNEL, 'aft_onehot': WEIGHT, 'aft_axial': AXIS}[name])

    def forward(self, maps: Tensor) -> Tensor:
        v = maps.flatten(2).transpose(1, 2)
        k, grid = v[..., :3], (maps.shape[2], maps.shape[3])
        if self.name == 'aft_conv':
            return ops.aft_conv(v, k, v, self.bias, grid)
        if self.name == 'aft_axial':
            return ops.aft_axial(v, k, v, self.bias, self.bias, grid)
        return ops.aft_onehot(v, k, v, OFFSET, self.bias, grid)


CALLS = {
    'aft_full': lambda q, k, v: ops.aft_full(q, k, v, SQUARE),
    'aft_simple': ops.aft_simple,
    'aft_local': lambda q, k, v: ops.aft_local(q, k, v, BAND),
    'aft_conv': lambda q, k, v: ops.aft_conv(q, k[..., :3], v, KERNEL, (3, 5)),
    'aft_onehot': lambda q, k, v: ops.aft_onehot(q, k[..., :3], v, OFFSET, WEIGHT, (3, 5)),
    'aft_axial': lambda q, k, v: ops.aft_axial(q, k[..., :3], v, AXIS, AXIS, (3, 5)),
    'aft_full_causal': lambda q, k, v: ops.aft_full_causal(q, k, v, SQUARE),
    'aft_local_causal': lambda q, k, v: ops.aft_local_causal(q, k, v, PAST),
    'aft_simple_causal': ops.aft_simple_causal,
}


def nodes(traced: torch.jit.ScriptFunction) -> list[str]:
    return [node.kind() for node in traced.graph.nodes() if node.kind().startswith('aft_vision')]


@pytest.mark.parametrize('gradients', [True, False])
@pytest.mark.parametrize('name', CALLS)
def test_a_trace_is_one_node_with_the_result_and_the_gradient(name: str, gradients: bool):
    # torch checks the trace against another, made without gradients.
    with torch.set_grad_enabled(gradients):
        traced = torch.jit.trace(CALLS[name], (Q, K, V))
    assert nodes(traced) == [f'aft_vision::{name}']
    inputs = [x.clone().requires_grad_() for x in (Q + 1, K - 1, V)]
    y, expected = traced(*inputs), CALLS[name](*inputs)
    assert torch.equal(y, expected)
    for got, wanted in zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (y, expected)), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize('name', ['aft_conv', 'aft_onehot', 'aft_axial'])
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
