"""Floating-point operations as torch's counter and a traced graph see them."""

import pytest
import timm
import torch
from helpers import make_inputs, single
from torch.jit import TracerWarning, _get_trace_graph
from torch.utils.flop_counter import FlopCounterMode

import aft_vision  # noqa: F401, the import registers the models
from aft_vision import ops
from aft_vision.ops.declaration import OPERATIONS

# name -> (the window of `make_inputs`, forward, backward without and with the bias) of 12 tokens, 6 channels, and 3
# heads on a grid. By hand: 144 tokens and channels in all. A target weights 12 sources, in a band of 5 five, in a 3 x 3
# kernel nine, on the axes of the grid seven.
CASES = {
    'aft_full': (3, 2 * 144 * 12 * 2, (6912, 13824)),
    'aft_simple': (3, 2 * 144, (576, 576)),
    'aft_local': (3, 2 * 144 * (5 * 2 + 1), (2880 + 576, 5760 + 576)),
    'aft_conv': (3, 2 * 24 * 9 * (6 + 3) + 288, (3888 + 576, 7776 + 576)),
    'aft_onehot': (3, 2 * 24 * (6 + 3) + 288, (432 + 576, 864 + 576)),
    'aft_axial': ((3, 2), 2 * 24 * 7 * (6 + 3), (3024, 6048)),
    'aft_full_causal': (3, 6912, (6912, 13824)),
    'aft_local_causal': (3, 2 * 144 * (3 * 2 + 1), (1728 + 576, 3456 + 576)),
    'aft_simple_causal': (3, 288, (576, 576)),
}


def call(name: str, need_bias: bool, backend: str = 'auto') -> torch.Tensor:
    inputs = single(make_inputs(name, (3, 4), 6, CASES[name][0], 3))
    for bias in OPERATIONS[name].biases:
        inputs[bias].requires_grad_(need_bias)
    return getattr(ops, name)(**inputs, backend=backend)


@pytest.mark.parametrize('backend', ['auto', 'eager'])
@pytest.mark.parametrize('need_bias', [False, True])
@pytest.mark.parametrize('name', CASES)
def test_products_of_the_paper_are_counted(name: str, need_bias: bool, backend: str):
    with FlopCounterMode(display=False) as counter:
        y = call(name, need_bias, backend)
        forward = counter.get_total_flops()
        y.sum().backward()
    assert (forward, counter.get_total_flops() - forward) == (CASES[name][1], CASES[name][2][need_bias])


def test_a_window_longer_than_the_sequence_counts_its_tokens():
    inputs = make_inputs('aft_local', 12, 6, 12)
    with FlopCounterMode(display=False) as counter:
        ops.aft_local(**inputs)
    assert counter.get_total_flops() == 2 * 144 * (12 * 2 + 1)


def test_aft_conv_without_global_context_has_no_global_sum():
    inputs = make_inputs('aft_conv', (3, 4), 6, 3, 3)
    with FlopCounterMode(display=False) as counter:
        ops.aft_conv(**inputs, global_context=False)
    assert counter.get_total_flops() == 2 * 24 * 9 * 9


@pytest.mark.parametrize(
    ('name', 'layer'),
    [
        # Per token: numerators and denominators, and for AFT-conv the global sum.
        ('aft_conv_tiny', 2 * 196 * (11 * 11 * (192 + 192) + 192)),
        ('aft_full_tiny', 2 * 197 * 197 * (192 + 192)),
    ],
)
def test_a_model_is_counted_whole(name: str, layer: int):
    with torch.device('meta'), torch.no_grad():
        images = torch.empty(1, 3, 224, 224)
        model, aten = (timm.create_model(name, depth=2, exportable=exportable).eval() for exportable in (False, True))
        with FlopCounterMode(display=False) as counter:
            model(images)
        with FlopCounterMode(display=False) as plain:
            aten(images)
    operator = getattr(torch.ops.aft_vision, name.removesuffix('_tiny'))
    assert counter.get_flop_counts()['Global'][operator] == 2 * layer
    # torch counts the same in the exportable model, where the global sum adds products of single elements.
    extra = 2 * 2 * 196 * 192 if name == 'aft_conv_tiny' else 0
    assert counter.get_total_flops() == plain.get_total_flops() + extra


def test_handles_of_a_traced_graph_count_half_of_it():
    model = timm.create_model('aft_conv_tiny', depth=2, img_size=64).eval()
    images, handles = torch.randn(1, 3, 64, 64), ops.jit_handles()
    with pytest.warns(TracerWarning, match='Python integer'):
        graph, _ = _get_trace_graph(model, images)
    nodes = [node for node in graph.nodes() if node.kind() in handles]
    found = [handles[node.kind()](list(node.inputs()), list(node.outputs())) for node in nodes]
    assert found == 2 * [16 * (11 * 11 * (192 + 192) + 192)]


def test_every_operation_has_a_handle():
    assert set(ops.jit_handles()) == {f'aft_vision::{name}' for name in CASES}
