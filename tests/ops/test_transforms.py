"""Forward mode, the transforms of torch.func and dual tensors, against the reference in float64."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from helpers import BOUNDS, assert_close, generator, make_inputs, make_qkv, randn
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, vjp, vmap

import aft_vision  # noqa: F401, the import registers the models
from aft_vision import ops
from aft_vision.ops import reference
from aft_vision.ops.declaration import OPERATIONS

# name -> (operation, inputs)
CASES = {name: (name, make_inputs(name, (3, 5), s=3, heads=3)) for name in OPERATIONS}
CASES['depthwise'] = 'aft_conv', make_inputs('aft_conv', (3, 5))
CASES['no global context'] = 'aft_conv', CASES['aft_conv'][1] | {'global_context': False}
each_case = pytest.mark.parametrize('case', CASES)


def split(inputs: dict[str, Any], dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the inputs that can be differentiated, in a dtype, and the others."""
    moving = {n: x.to(dtype) for n, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return moving, {n: x for n, x in inputs.items() if n not in moving}


def directions(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: randn(*x.shape, seed=50 + i).to(x.dtype) for i, (n, x) in enumerate(inputs.items())}


def assert_tangents_match(
    case: str, along: Callable[[str], bool], dtype: torch.dtype, bound: float, **others: Any
) -> Tensor:
    """The derivative along a direction of some inputs equals that of the reference in float64."""
    name, inputs = CASES[case]
    moving, fixed = split({n: x for n, x in inputs.items() if n not in others}, dtype)
    chosen = {n: x for n, x in moving.items() if along(n)}
    fixed |= {n: x for n, x in moving.items() if n not in chosen} | others
    tangents = directions(chosen)
    y, slope = jvp(lambda x: getattr(ops, name)(**x, **fixed), (chosen,), (tangents,))
    high = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in fixed.items()}
    wanted = jvp(
        lambda x: getattr(reference, name)(**x, **high),
        ({n: x.double() for n, x in chosen.items()},),
        ({n: x.double() for n, x in tangents.items()},),
    )
    assert slope.dtype == y.dtype == dtype
    assert_close(y, wanted[0], bound, 'output')
    assert_close(slope, wanted[1], bound, 'tangent')
    assert slope.any()
    return slope


@each_case
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_forward_mode_along_all_inputs_equals_float64(case: str, dtype: torch.dtype):
    assert_tangents_match(case, lambda name: True, dtype, BOUNDS[dtype][1])


@each_case
@pytest.mark.parametrize('gated', [True, False])
def test_forward_mode_with_a_mask_equals_float64(case: str, gated: bool):
    T = CASES[case][1]['k'].shape[1]
    mask = torch.rand(2, T, generator=generator(3)) > 0.4
    mask[0, 0], mask[1] = True, False
    others = {'mask': mask} if gated else {'mask': mask, 'q': None}
    for along in (lambda name: True, lambda name: name in 'qkv'):
        slope = assert_tangents_match(case, along, torch.float32, 1e-4, **others)
        assert not slope[1].any()


def test_what_stands_under_a_mask_reaches_no_tangent():
    inputs = CASES['aft_full'][1]
    mask = torch.ones(2, 15, dtype=torch.bool)
    mask[:, 4] = False
    tangents = directions(inputs)
    hidden = {n: x.masked_fill(~mask[..., None], float('nan')) if n in 'kv' else x for n, x in inputs.items()}
    filled = {n: x.masked_fill(~mask[..., None], float('nan')) if n in 'kv' else x for n, x in tangents.items()}
    slopes = [
        jvp(lambda x: ops.aft_full(**x, mask=mask), (x,), (dx,))[1]
        for x, dx in ((inputs, tangents), (hidden, filled), (inputs | {'bias': hidden['bias']}, filled))
    ]
    assert slopes[0].isfinite().all()
    assert all(torch.equal(slope, slopes[0]) for slope in slopes)


@pytest.mark.parametrize('moving_bias', [True, False])
@pytest.mark.parametrize('case', ['aft_full', 'aft_local', 'aft_onehot', 'aft_axial'])
def test_forward_mode_survives_weights_that_underflow(case: str, moving_bias: bool):
    # The largest key and the largest bias of a target may not meet: a product of their exponentials is 0.
    name, inputs = CASES[case]
    bias = list(split(inputs, torch.float32)[0])[3]
    keys, w = 40 * inputs['k'], torch.where(inputs[bias] > 0, 80.0, -80.0).double()
    moving, fixed = split(inputs | {'k': keys, bias: w}, torch.float32)
    if not moving_bias:
        fixed[bias] = moving.pop(bias)
    tangents = directions(moving)
    slope = jvp(lambda x: getattr(ops, name)(**x, **fixed), (moving,), (tangents,))[1]
    high, along = ({n: x.double() for n, x in each.items()} for each in (moving, tangents))
    fixed |= {} if moving_bias else {bias: w}
    assert_close(slope, jvp(lambda x: getattr(reference, name)(**x, **fixed), (high,), (along,))[1], 1e-4)


@each_case
@pytest.mark.parametrize('shift', [1e4, 1e6])
def test_forward_mode_along_a_bias_keeps_the_digits_of_shifted_keys(case: str, shift: float):
    name, inputs = CASES[case]
    # Multiples of 1/16 lose no digit in the sum with the shift itself.
    moving, fixed = split(inputs | {'k': (16 * inputs['k']).round() / 16 + shift}, torch.float32)
    tangents = directions(moving)
    slope = jvp(lambda x: getattr(ops, name)(**x, **fixed), (moving,), (tangents,))[1]
    high, along = ({n: x.double() for n, x in each.items()} for each in (moving, tangents))
    # The reference takes exponentials of what it gets; a shift cancels.
    high['k'] = high['k'] - shift
    assert_close(slope, jvp(lambda x: getattr(reference, name)(**x, **fixed), (high,), (along,))[1], 1e-4)


@pytest.mark.parametrize('case', ['aft_full_causal', 'aft_local_causal'])
def test_forward_mode_along_a_bias_ignores_a_large_key_of_the_future(case: str):
    name, inputs = CASES[case]
    moving, _ = split(inputs, torch.float32)
    keys = moving['k'].clone()
    keys[:, -1] = 300
    tangents = directions(moving)
    slopes = [
        jvp(lambda x: getattr(ops, name)(**x), (moving | {'k': k},), (tangents,))[1][:, :-1]
        for k in (moving['k'], keys)
    ]
    assert_close(slopes[1], slopes[0].double(), 1e-6)


def test_forward_mode_along_a_bias_ignores_a_large_bias_under_the_mask():
    moving, _ = split(CASES['aft_full'][1], torch.float32)
    mask = torch.ones(2, 15, dtype=torch.bool)
    mask[:, 4] = False
    bias = moving['bias'].clone()
    bias[:, 4] = 300
    slopes = [
        jvp(lambda x: ops.aft_full(**x, mask=mask), (moving | {'bias': w},), (directions(moving),))[1]
        for w in (moving['bias'], bias)
    ]
    assert_close(slopes[1], slopes[0].double(), 1e-6)


def test_a_gradient_of_the_forward_derivative_is_finite_where_the_mask_hides_all():
    moving, _ = split(CASES['aft_full'][1], torch.float32)
    mask = torch.zeros(2, 15, dtype=torch.bool)

    def slope(x: dict[str, Tensor]) -> Tensor:
        return jvp(lambda x: ops.aft_full(**x, mask=mask), (x,), (directions(moving),))[1].square().sum()

    assert all(not x.any() for x in grad(slope)(moving).values())


@each_case
@pytest.mark.parametrize('requires_grad', [False, True])
def test_dual_tensors_equal_jvp(case: str, requires_grad: bool):
    name, inputs = CASES[case]
    moving, fixed = split(inputs, torch.float64)
    tangents = directions(moving)
    op = functools.partial(getattr(ops, name), **fixed)
    expected = jvp(lambda x: op(**x), (moving,), (tangents,))
    primals = {n: x.clone().requires_grad_(requires_grad) for n, x in moving.items()}
    with forward_ad.dual_level():
        duals = {n: forward_ad.make_dual(x, tangents[n]) for n, x in primals.items()}
        y, slope = forward_ad.unpack_dual(op(**duals))
        untouched = forward_ad.unpack_dual(op(**moving))
    assert_close(y, expected[0], 1e-12)
    assert_close(slope, expected[1], 1e-12)
    assert untouched.tangent is None
    if requires_grad:
        found, wanted = (torch.autograd.grad(each.sum(), primals['v'])[0] for each in (y, op(**primals)))
        assert_close(found, wanted, 1e-12)


@each_case
def test_the_transforms_of_torch_func_equal_autograd(case: str):
    name, inputs = CASES[case]
    moving, fixed = split(inputs, torch.float64)
    op = functools.partial(getattr(ops, name), **fixed)
    weight = randn(*inputs['v'].shape, seed=99)
    leaves = {n: x.clone().requires_grad_() for n, x in moving.items()}
    expected = dict(zip(leaves, torch.autograd.grad(op(**leaves), list(leaves.values()), weight), strict=True))
    found = {
        'grad': grad(lambda x: (op(**x) * weight).sum())(moving),
        'vjp': vjp(lambda x: op(**x), moving)[1](weight)[0],
    }
    for transform, each in found.items():
        for n, x in each.items():
            assert_close(x, expected[n], 1e-12, f'{transform} {n}')


@each_case
@pytest.mark.parametrize('batched', ['qkv', 'v', 'all'])
def test_vmap_equals_a_loop(case: str, batched: str):
    name, inputs = CASES[case]
    moving, fixed = split(inputs, torch.float64)
    fixed['mask'] = torch.rand(2, inputs['k'].shape[1], generator=generator(3)) > 0.4
    chosen = {n: torch.stack([x, 2 * x, x - 1], 1) for n, x in moving.items() if batched == 'all' or n in batched}
    rest = fixed | {n: x for n, x in moving.items() if n not in chosen}
    op = functools.partial(getattr(ops, name), **rest)
    y = vmap(lambda x: op(**x), in_dims=1)(chosen)
    expected = torch.stack([op(**{n: x[:, i] for n, x in chosen.items()}) for i in range(3)])
    assert_close(y, expected, 1e-12)


def double_backward(op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(op(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(first.pow(3).sum(), x)[0]


def dual_backward(op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(), x.cos())
        return forward_ad.unpack_dual(torch.autograd.grad(op(dual).square().sum(), dual)[0]).tangent


SECOND_DERIVATIVES = {
    'double backward': double_backward,
    'dual tensors in a backward': dual_backward,
    'hessian': lambda op, x: hessian(lambda x: op(x).square().sum())(x)[0, :3, 0, 0],
    'grad of grad': lambda op, x: grad(lambda x: grad(lambda x: op(x).square().sum())(x).pow(3).sum())(x),
    'jvp of jvp': lambda op, x: jvp(lambda x: jvp(op, (x,), (x,))[1], (x,), (x.cos(),))[1],
}


@each_case
@pytest.mark.parametrize('way', SECOND_DERIVATIVES)
def test_a_second_derivative_equals_that_of_the_reference(case: str, way: str):
    name, inputs = CASES[case]
    rest = {n: x for n, x in inputs.items() if n != 'k'}
    found, expected = (
        SECOND_DERIVATIVES[way](lambda k, form=form: getattr(form, name)(k=k, **rest), inputs['k'])
        for form in (ops, reference)
    )
    assert expected.any()
    assert_close(found, expected, 1e-9)


def test_a_second_derivative_of_one_tensor_as_several_inputs_counts_each_once():
    x, bias = randn(2, 5, 3), randn(5, 5, seed=1)
    found, expected = (
        double_backward(lambda x, form=form: form.aft_full(x, x, x, bias), x) for form in (ops, reference)
    )
    assert_close(found, expected, 1e-9)


@each_case
def test_a_batch_of_gradients_of_one_call_equals_a_loop(case: str):
    name, inputs = CASES[case]
    moving, fixed = split(inputs, torch.float64)
    leaves = [x.clone().requires_grad_() for x in moving.values()]
    y = getattr(ops, name)(**dict(zip(moving, leaves, strict=True)), **fixed)
    several = randn(3, *y.shape, seed=7)
    found = torch.autograd.grad(y, leaves, several, is_grads_batched=True, retain_graph=True)
    for i, each in enumerate(several):
        for got, wanted in zip(found, torch.autograd.grad(y, leaves, each, retain_graph=True), strict=True):
            assert_close(got[i], wanted, 1e-12)


def test_an_operator_in_a_graph_has_no_forward_mode():
    q, k, v = make_qkv()
    graph = torch.fx.symbolic_trace(lambda v: ops.aft_simple(q, k, v))
    assert torch.equal(graph(v), ops.aft_simple(q, k, v))
    with pytest.raises(RuntimeError, match=r'aft_vision::aft_simple in a graph has no forward mode'):
        jvp(graph, (v,), (v,))


def test_functionalize_leaves_the_result():
    q, k, v = make_qkv()
    assert_close(torch.func.functionalize(ops.aft_simple)(q, k, v), ops.aft_simple(q, k, v), 1e-12)


def test_transforms_compile_into_one_graph():
    moving, fixed = split(CASES['aft_conv'][1], torch.float32)
    values = torch.stack([moving.pop('v')] * 2)

    def run(values: Tensor) -> tuple[Tensor, ...]:
        op = functools.partial(ops.aft_conv, **moving, **fixed)
        slope = jvp(lambda v: op(v=v), (values[0],), (values[1],))[1]
        return slope, vmap(lambda v: op(v=v))(values), grad(lambda v: op(v=v).square().sum())(values[0])

    compiled = torch.compile(run, fullgraph=True, backend='aot_eager')
    for got, expected in zip(compiled(values), run(values), strict=True):
        assert_close(got, expected, 1e-6)


@pytest.mark.parametrize('name', ['aft_conv_tiny', 'aft_full_tiny'])
def test_forward_mode_through_a_model_equals_differences(name: str):
    model = timm.create_model(name, depth=2, img_size=64, num_classes=5).double().eval()
    parameters = {
        n: x.detach() + randn(*x.shape, seed=i, scale=0.1) for i, (n, x) in enumerate(model.named_parameters())
    }
    images = randn(2, 3, 64, 64, seed=1)
    tangents = {n: randn(*x.shape, seed=500 + i, scale=0.1) for i, (n, x) in enumerate(parameters.items())}

    def logits(step: float) -> Tensor:
        return functional_call(model, {n: x + step * tangents[n] for n, x in parameters.items()}, (images,))

    slope = jvp(lambda x: functional_call(model, x, (images,)), (parameters,), (tangents,))[1]
    step = 1e-4
    # Of fourth order in the step.
    differences = (8 * (logits(step) - logits(-step)) - (logits(2 * step) - logits(-2 * step))) / (12 * step)
    assert_close(slope, differences, 1e-8)
    low = {n: x.float() for n, x in parameters.items()}
    slope32 = jvp(
        lambda x: functional_call(model.float(), x, (images.float(),)),
        (low,),
        ({n: x.float() for n, x in tangents.items()},),
    )[1]
    assert_close(slope32, slope, 1e-4)
