"""Activations that the backward pass of a block computes again."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from aft_vision.layers import AFTBlock


def make_block(dtype: torch.dtype = torch.float64, **kwargs: object) -> AFTBlock:
    torch.manual_seed(0)
    return AFTBlock(8, num_heads=2, kernel_size=3, **kwargs).to(dtype)


def make_tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def keep_all(block: AFTBlock) -> AFTBlock:
    """Return a copy whose tensors are all kept, since hooks handle them already."""
    plain = copy.deepcopy(block)

    def forward(x: Tensor, grid: tuple[int, int]) -> Tensor:
        with saved_tensors_hooks(lambda saved: saved.detach(), lambda saved: saved):
            return AFTBlock.forward(plain, x, grid)

    plain.forward = forward
    return plain


def gradients(block: nn.Module, x: Tensor, **options: bool) -> list[Tensor]:
    y = block(x, (3, 4))
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return list(torch.autograd.grad((y * weights).sum(), [x, *block.parameters()], **options))


@pytest.mark.parametrize('kwargs', [{}, {'act_layer': nn.ReLU}, {'norm_layer': nn.Identity}, {'init_values': 0.1}])
def test_gradients_are_those_of_tensors_that_are_kept(kwargs):
    if kwargs.get('norm_layer') is nn.Identity:
        kwargs = {'norm_layer': lambda dim, **dd: nn.Identity()}
    block, x = make_block(**kwargs), make_tokens()
    torch.testing.assert_close(gradients(block, x), gradients(keep_all(block), x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_gradients_under_autocast_are_those_of_tensors_that_are_kept(dtype):
    block, x = make_block(torch.float32), make_tokens(torch.float32)
    with torch.autocast('cpu', dtype, enabled=dtype is not torch.float32):
        torch.testing.assert_close(gradients(block, x), gradients(keep_all(block), x))


def test_the_second_derivative_is_that_of_tensors_that_are_kept():
    block, x = make_block(), make_tokens()

    def second(of: nn.Module) -> Tensor:
        y = of.mlp(of.norm2(x)) if of is not block else block._run_mlp(x)
        (first,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), x)[0]

    torch.testing.assert_close(second(block), second(copy.deepcopy(block)), rtol=1e-10, atol=1e-10)


def test_the_norm_is_computed_again_as_in_the_call():
    block, x = make_block(), make_tokens()
    other = {name: (p * 1.5 + 0.1).detach().requires_grad_() for name, p in block.named_parameters()}

    def of_call(of: AFTBlock) -> list[Tensor]:
        y = torch.func.functional_call(of, other, (x, (3, 4)))
        # After the call the module has its own parameters again.
        return list(torch.autograd.grad(y.pow(2).sum(), [x, *other.values()]))

    plain = copy.deepcopy(block)
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p.copy_(other[name])
    torch.testing.assert_close(of_call(block), gradients_of_squares(keep_all(plain), x), rtol=1e-12, atol=1e-12)

    def shift(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        return 2 * inputs[0] + 1

    for each in (block, hooked := copy.deepcopy(block)):
        each.norm2.register_forward_pre_hook(shift)
    torch.testing.assert_close(
        gradients_of_squares(block, x), gradients_of_squares(keep_all(hooked), x), rtol=1e-12, atol=1e-12
    )


def gradients_of_squares(block: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(block(x, (3, 4)).pow(2).sum(), [x, *block.parameters()]))


def test_a_block_keeps_neither_the_gelu_nor_the_norm_of_its_mlp():
    block, x, made = make_block(), make_tokens(), {}
    for name, module in (('gelu', block.mlp.act), ('norm', block.norm2)):
        # A tensor lives as long as a graph keeps it.
        module.register_forward_hook(lambda module, inputs, y, name=name: made.update({name: weakref.ref(y)}))
    y = block.mlp(block.norm2(x))
    assert all(tensor() is not None for tensor in made.values())
    y = block(x, (3, 4))
    assert y.requires_grad
    assert [name for name, tensor in made.items() if tensor() is not None] == []


def test_under_autocast_all_is_kept():
    block, x, made = make_block(torch.float32), make_tokens(torch.float32), []
    block.mlp.act.register_forward_hook(lambda module, inputs, y: made.append(weakref.ref(y)))
    with torch.autocast('cpu', torch.bfloat16):
        y = block(x, (3, 4))
    assert y.requires_grad
    assert made[0]() is not None


def test_a_tensor_written_before_the_backward_pass_is_an_error():
    block, x = make_block(), make_tokens()
    y = block(x, (3, 4))
    with torch.no_grad():
        block.mlp.fc2.weight.add_(1)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        y.sum().backward()


def test_transforms_and_checkpointing_have_the_same_gradients():
    block, x = make_block(), make_tokens()
    (expected, *_) = gradients(keep_all(block), x)
    weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)

    def loss(tokens: Tensor) -> Tensor:
        return (block(tokens, (3, 4)) * weights).sum()

    torch.testing.assert_close(torch.func.grad(loss)(x.detach()), expected, rtol=1e-10, atol=1e-10)
    y = torch.utils.checkpoint.checkpoint(block, x, (3, 4), use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad((y * weights).sum(), x)[0], expected, rtol=1e-10, atol=1e-10)


def test_the_approximation_of_a_gelu_is_kept():
    block, x = make_block(act_layer=lambda: nn.GELU(approximate='tanh')), make_tokens()
    hidden = F.gelu(block.mlp.fc1(block.norm2(x)), approximate='tanh')
    (expected,) = torch.autograd.grad(block.mlp.fc2(hidden).sum(), block.mlp.fc2.weight)
    (found,) = torch.autograd.grad(block._run_mlp(x).sum(), block.mlp.fc2.weight)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
