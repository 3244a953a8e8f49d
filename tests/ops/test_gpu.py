"""Triton's kernels on a GPU, at the shapes of models: value and gradients in every type, and bits that stay the same.

pytest -m gpu                  # with further shapes, a CUDA graph and torch.compile; -n 8 compiles in parallel
pytest -m 'gpu and not slow'   # the shapes of models

Without a GPU, the comparisons themselves run once in Triton's interpreter.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from kernel_checks import KERNELS, PARTS, Types, assert_kernels_agree, draw_inputs, find_operation
from torch import Tensor

from aft_vision import ops
from aft_vision.ops.declaration import Shape

# (B, grid, D, channels of a head, window): vision models, text, and several tiles of tokens and of channels, where 16
# divides D and not T, as in models.
IMAGE, TEXT, SMALL = (8, (14, 14), 384), (2, (1, 3072), 256), (2, (7, 10), 48, 1, 17)
SHAPES: dict[str, list[tuple[Any, ...]]] = {
    'full': [(8, (1, 197), 384, 1, 1), (2, (1, 577), 384, 1, 1), SMALL, (2, (13, 20), 48, 1, 1)],
    'simple': [(*IMAGE, 1, 1), SMALL],
    # Also heads of several channels, on a long grid too, a small window, more sequences.
    'conv': [
        *((*IMAGE, 1, 11), (*IMAGE, 24, 11), (2, (14, 14), 384, 1, 11), (3, (11, 30), 24, 6, 5)),
        *(SMALL, (2, (7, 10), 48, 6, 17), (2, (7, 10), 48, 1, 3), (9, (7, 10), 48, 1, 17)),
    ],
    # Also more sequences, heads of several channels, larger grids.
    'axial': [
        *((*IMAGE, 1, 14), (*IMAGE, 24, 14), (2, (32, 32), 384, 24, 14)),
        *(SMALL, (9, (7, 10), 48, 1, 17), (2, (7, 10), 48, 4, 17), (2, (7, 20), 48, 4, 17)),
    ],
    'local_causal': [(*TEXT, 1, 32), (*TEXT, 1, 256), SMALL],
    'simple_causal': [(*TEXT, 1, 1), SMALL],
}
# One sequence, sizes that nothing divides, and long sequences.
FURTHER_SHAPES: dict[str, list[tuple[Any, ...]]] = {
    'full': [(1, (1, 197), 192, 1, 1), (3, (1, 131), 50, 1, 1), (2, (1, 2048), 64, 1, 1)],
    'simple': [(1, (14, 14), 192, 1, 1), (3, (9, 15), 50, 1, 1), (2, (128, 256), 64, 1, 1)],
    'conv': [(1, (14, 14), 192, 1, 11), (3, (9, 15), 50, 5, 7), (2, (48, 64), 32, 1, 11), (9, (48, 64), 32, 1, 11)],
    'axial': [(1, (14, 14), 192, 6, 14), (3, (9, 15), 50, 5, 7), (2, (32, 32), 64, 1, 14)],
    'local_causal': [(1, (1, 1024), 256, 1, 32), (3, (1, 333), 50, 1, 77), (2, (1, 16384), 64, 1, 256)],
    'simple_causal': [(1, (1, 1024), 256, 1, 1), (3, (1, 333), 50, 1, 1), (2, (1, 65536), 64, 1, 1)],
}


def every_type() -> list[Any]:
    """Each operation and type, and the halves with the float32 bias of autocast."""
    found = []
    for name, dtype in product(KERNELS, (torch.float32, torch.bfloat16, torch.float16)):
        biases = len(find_operation(name)[0].biases)
        for bias in (dtype, torch.float32)[: 2 if biases and dtype != torch.float32 else 1]:
            types = (dtype,) if bias == dtype else (*[dtype] * 3, *[bias] * biases)
            found.append(pytest.param(name, types, id=f'{name}-{dtype}-{bias} bias'.replace('torch.', '')))
    return found


of_every_type = pytest.mark.parametrize(('name', 'types'), every_type())


@pytest.mark.gpu
@of_every_type
def test_the_kernels_agree_with_float64_at_the_shapes_of_models(name: str, types: Types, triton_device: str):
    assert_kernels_agree(name, types, triton_device, *(Shape(*x) for x in SHAPES[name]))


@pytest.mark.gpu
@pytest.mark.parametrize('stationary', [True, False])
@pytest.mark.parametrize('name', ['full', 'conv'])
def test_kernels_with_weights_in_shared_memory_and_without_agree_with_float64(
    name: str, stationary: bool, triton_device: str, monkeypatch: pytest.MonkeyPatch
):
    from aft_vision.ops.common import launch
    from aft_vision.ops.conv import triton as conv
    from aft_vision.ops.full import triton as full

    if not launch.keeps_weights():
        pytest.skip('this GPU has too little shared memory')
    for module in (full, conv):
        monkeypatch.setattr(module, 'run_fastest', lambda _, *ways: ways[0 if stationary else -1]())
    assert_kernels_agree(name, (torch.bfloat16,), triton_device, *(Shape(*x) for x in SHAPES[name]))


@pytest.mark.gpu
@pytest.mark.slow
@of_every_type
def test_the_kernels_agree_with_float64_at_further_shapes(name: str, types: Types, triton_device: str):
    assert_kernels_agree(name, types, triton_device, *(Shape(*x) for x in FURTHER_SHAPES[name]), most=1)


def step(operate: Callable[..., Tensor], leaves: list[Any]) -> list[Tensor]:
    """The result of an operation, and the gradients of what it has gradients of."""
    y = operate(*leaves)
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, wanted, torch.ones_like(y))]


def step_compiled(operate: Callable[..., Tensor], leaves: list[Any]) -> list[Tensor]:
    """Compute the same under torch.compile, whole; on a CPU without generated code, which takes a compiler."""
    torch.compiler.reset()
    backend = 'inductor' if leaves[1].is_cuda else 'aot_eager'
    return step(torch.compile(operate, fullgraph=True, dynamic=False, backend=backend), leaves)


def step_replayed(operate: Callable[..., Tensor], leaves: list[Any]) -> list[Tensor]:
    """Compute the same from a CUDA graph, whose results are overwritten before it is replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(operate, leaves)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(operate, leaves)
    for x in found:
        x.fill_(float('nan'))
    graph.replay()
    torch.cuda.synchronize()
    return found


def changed_parts(name: str, types: Types, device: str, shape: Shape, again: Callable[..., list[Tensor]]) -> list[str]:
    """The parts of an operation that have other bits when it runs again."""
    inputs = draw_inputs(find_operation(name)[0], shape, types, device)
    leaves = [x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]

    def operate(*values: Any) -> Tensor:
        return getattr(ops, f'aft_{name}')(**dict(zip(inputs._fields, values, strict=True)), backend='triton')

    pairs = zip(PARTS, step(operate, leaves), again(operate, leaves), strict=False)
    return [part for part, x, other in pairs if not torch.equal(x, other)]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize('again', [step, step_compiled, step_replayed])
@of_every_type
def test_a_second_call_a_compiled_one_and_a_graph_give_the_same_bits(
    name: str, types: Types, again: Callable[..., list[Tensor]], triton_device: str
):
    assert changed_parts(name, types, triton_device, Shape(*SHAPES[name][0]), again) == []


def test_the_comparisons_run_in_the_interpreter(triton_device: str):
    arguments = 'simple', (torch.float32,), triton_device, Shape(1, (2, 3), 2, 1, 3)
    assert_kernels_agree(*arguments)
    assert changed_parts(*arguments, step_compiled) == []
