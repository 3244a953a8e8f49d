"""The contract of an operation, tested by its declaration alone, also of one from another package."""

import io
from collections.abc import Callable
from typing import Any

import torch
from helpers import (
    BOUNDS,
    assert_close,
    assert_keys_of_minus_infinity_are_masked,
    assert_masked_tokens_have_no_effect,
    assert_matches_reference,
    assert_passes_opcheck,
    make_inputs,
    make_mask,
    make_nasty,
    operands,
    plain,
    randn,
    single,
)
from torch import Tensor, nn
from torch.func import jvp
from torch.utils.flop_counter import FlopCounterMode

from aft_vision.ops import reference
from aft_vision.ops.declaration import OPERATIONS
from aft_vision.ops.flops import count_products


def compute(name: str, **inputs: Any) -> Tensor:
    """Compute an operation of inputs by name."""
    backend = inputs.pop('backend', 'auto')
    return OPERATIONS[name].operator(*operands(name, inputs), backend)


def function(name: str, **fixed: Any) -> Callable[..., Tensor]:
    return lambda **inputs: compute(name, **fixed, **inputs)


def inputs_of(name: str, grid: tuple[int, int] = (3, 5)) -> dict[str, Any]:
    return make_inputs(name, grid, s=3, heads=3)


def check_reference(name: str) -> None:
    """Each backend equals the reference in value and every gradient, in each type, masked or not gated."""
    graph = ['aten'] if OPERATIONS[name].operator.aten else []
    for backend in ('auto', 'eager', *graph):
        for dtype in BOUNDS:
            for others in ({'mask': make_mask(2, 15)}, {'q': None}):
                inputs = inputs_of(name) | others
                assert_matches_reference(function(name, backend=backend), OPERATIONS[name].reference, inputs, dtype)


def check_one_token(name: str) -> None:
    """One token gives its gated value."""
    inputs = inputs_of(name, (1, 1))
    assert_close(compute(name, **inputs), torch.sigmoid(inputs['q']) * inputs['v'], 1e-12)
    assert_matches_reference(function(name), OPERATIONS[name].reference, inputs, nasty=True)


def check_limits(name: str) -> None:
    """A sequence alone gives its row of the batch, shifted keys change nothing, and biases of 0 leave AFT-simple."""
    operation, inputs = OPERATIONS[name], inputs_of(name)
    y = compute(name, **inputs)
    assert_close(compute(name, **{n: x[1:] if n in 'qkv' else x for n, x in inputs.items()}), y[1:], 1e-12)
    assert_close(compute(name, **inputs | {'k': inputs['k'] + 50.0}), y, 1e-12)
    q, k, v = (inputs[n] for n in 'qkv')
    simple = reference.aft_simple_causal if operation.causal else reference.aft_simple
    expected = simple(q, k.repeat_interleave(v.shape[2] // k.shape[2], 2), v)
    zeros = {n: torch.zeros_like(inputs[n]) for n in operation.biases}
    assert_close(compute(name, **inputs | zeros), expected, 1e-12)


def check_hidden_tokens(name: str) -> None:
    """Nothing under a mask has an effect, and keys of minus infinity are as masked ones."""
    operation = OPERATIONS[name]
    graph = [('aten', torch.float32)] if operation.operator.aten else []
    # More than a block of targets in a causal operation; on a grid also a head per channel.
    for D, heads in ((6, 3), (66, None)) if operation.has_grid else ((6, None),):
        inputs = make_inputs(name, (7, 10), D, 5, heads)
        jump = torch.where(torch.arange(70) < 40, 0.0, 200.0)[:, None].double()
        mask = make_mask(2, 70)
        mask[0, :3] = False
        for backend, dtype in (('eager', torch.float64), ('eager', torch.bfloat16), ('auto', torch.float32), *graph):
            op = function(name, backend=backend)
            assert_masked_tokens_have_no_effect(op, inputs, mask, dtype=dtype)
            assert_masked_tokens_have_no_effect(op, inputs | {'k': inputs['k'] + jump}, mask, dtype=dtype)
            assert_keys_of_minus_infinity_are_masked(op, operation.reference, inputs, dtype)
        # Where elements underflow.
        nasty = make_nasty(inputs, 'normal_30', 'plus_minus_80')
        assert_masked_tokens_have_no_effect(function(name, backend='eager'), nasty, mask, dtype=torch.float64)


def check_autocast(name: str) -> None:
    """Autocast leaves the sums in float32."""
    inputs = plain(inputs_of(name))
    with torch.autocast('cpu', torch.bfloat16):
        y = compute(name, **inputs)
    assert torch.equal(y, compute(name, **inputs))


def check_opcheck(name: str) -> None:
    """torch's own checks of an operator pass."""
    assert_passes_opcheck(name, inputs_of(name))


def check_forward_mode(name: str) -> None:
    """Forward mode along all inputs equals that of the reference."""
    inputs = inputs_of(name)
    moving = {n: x for n, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    fixed = {n: x for n, x in inputs.items() if n not in moving}
    tangents = {n: randn(*x.shape, seed=50 + i) for i, (n, x) in enumerate(moving.items())}
    found, expected = (
        jvp(lambda x, f=f: f(**x, **fixed), (moving,), (tangents,))
        for f in (function(name), OPERATIONS[name].reference)
    )
    for got, wanted in zip(found, expected, strict=True):
        assert_close(got, wanted, 1e-9)


class Module(nn.Module):
    """An operation as a part of a model."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.others = {n: x for n, x in inputs_of(name).items() if n not in 'qkv'}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compute(self.name, q=q, k=k, v=v, **self.others)


def check_compiled(name: str) -> None:
    """A compiled model is one graph with the same result and gradients."""
    torch.compiler.reset()
    module, inputs = Module(name), [x for n, x in single(inputs_of(name), torch.float64).items() if n in 'qkv']
    results = []
    for call in (module, torch.compile(module, fullgraph=True, backend='aot_eager')):
        y = call(*inputs)
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    assert all(map(torch.equal, *results))


def check_exported(name: str) -> None:
    """An exported model is saved, loaded, and gives the same result."""
    module, inputs = Module(name), tuple(inputs_of(name)[n] for n in 'qkv')
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, inputs), file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert f'aft_vision.{name}.default' in {str(node.target) for node in loaded.graph.nodes}
    assert torch.equal(loaded.module()(*inputs), module(*inputs))


def check_counted(name: str) -> None:
    """torch counts the floating-point operations that are declared."""
    inputs = plain(inputs_of(name))
    with FlopCounterMode(display=False) as counter:
        compute(name, **inputs)
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else x for x in operands(name, inputs)]
    assert counter.get_total_flops() == 2 * sum(count_products(OPERATIONS[name], shapes)) > 0


CONTRACT = {key.removeprefix('check_'): check for key, check in list(globals().items()) if key.startswith('check_')}
