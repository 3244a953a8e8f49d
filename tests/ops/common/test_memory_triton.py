"""Memory of every kernel in the interpreter: each keeps to its own tensors and writes nothing of another program.

Memory that is not yet written holds NaN meanwhile, in outputs and in workspaces.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kernel_checks import KERNELS, assert_parts_agree, double, draw_inputs, find_operation, run_form
from torch import Tensor

from aft_vision.ops.declaration import Shape


class Checker:
    """The tensors of a launch, and which program wrote what."""

    def __init__(self) -> None:
        self.launches = 0

    def begin(self, args: Any) -> None:
        """Start a launch with these arguments."""
        self.launches += 1
        tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor) and x.numel()]
        # From the first element of each to behind its last; what lies between those of a view belongs to its base.
        spans = [sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1 for x in tensors]
        self.low = np.array([x.data_ptr() for x in tensors], dtype=np.uint64)
        self.high = self.low + np.array([n * x.element_size() for n, x in zip(spans, tensors, strict=True)], np.uint64)
        self.written: dict[int, tuple[Any, Any]] = {}

    def check_inside(self, pointers: Any, mask: Any) -> np.ndarray:
        """Return the addresses that are accessed; raise an IndexError if any is outside of all tensors."""
        addresses = np.asarray(pointers.data)[np.asarray(mask.data, bool)].ravel()
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        inside = (addresses[:, None] >= self.low) & (addresses[:, None] + size <= self.high)
        if not inside.any(1).all():
            raise IndexError('an access outside of all tensors')
        return addresses

    def load(self, pointers: Any, mask: Any, program: Any) -> None:
        """Check a load."""
        for address in self.check_inside(pointers, mask).tolist():
            if self.written.get(address, (program,))[0] != program:
                raise IndexError('a load of what another program writes')

    def store(self, pointers: Any, values: Any, mask: Any, program: Any) -> None:
        """Check a store; several programs may write the same value."""
        addresses = self.check_inside(pointers, mask)
        stored = np.broadcast_to(values.data, np.shape(mask.data))[np.asarray(mask.data, bool)].ravel()
        for address, value in zip(addresses.tolist(), stored.tolist(), strict=True):
            writer, before = self.written.setdefault(address, (program, value))
            if writer != program and before != value and not (before != before and value != value):
                raise IndexError('two programs write one place')
            self.written[address] = program, value


@pytest.fixture
def checker(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checker]:
    """A check of each access of each launch, while new tensors are full of NaN."""
    if triton_device != 'cpu':
        pytest.skip("needs Triton's interpreter, which a GPU is not used with")
    from triton.runtime import interpreter

    found = Checker()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    call, load, store = executor.__call__, builder.create_masked_load, builder.create_masked_store

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        found.begin((args, kwargs))
        call(self, *args, **kwargs)

    def checked_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        found.load(pointers, mask, self.grid_idx)
        return load(self, pointers, mask, *others)

    def checked_store(self: Any, pointers: Any, values: Any, mask: Any, *others: Any) -> Any:
        found.store(pointers, values, mask, self.grid_idx)
        return store(self, pointers, values, mask, *others)

    monkeypatch.setattr(executor, '__call__', run)
    monkeypatch.setattr(builder, 'create_masked_load', checked_load)
    monkeypatch.setattr(builder, 'create_masked_store', checked_store)
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield found
    torch.use_deterministic_algorithms(False)


def read_behind(X, n):
    from triton import language as tl

    tl.load(X + n)


def test_the_checker_finds_a_wrong_access(checker: Checker):
    import triton

    with pytest.raises(Exception, match='outside of all tensors'):
        triton.jit(read_behind)[(2,)](torch.zeros(2), 2)


@pytest.mark.parametrize('spread', [1.0, 30.0], ids=['ordinary', 'underflowing'])
@pytest.mark.parametrize('name', [*KERNELS, 'full whole', 'conv whole', 'conv lines', 'conv direct'])
def test_a_kernel_accesses_its_own_tensors_and_writes_all_of_its_results(name: str, spread: float, checker: Checker):
    # Tokens that fill more than one tile and not the next.
    grid, channels = {
        **{'conv': ((5, 7), 2), 'axial': ((3, 7), 2), 'local_causal': ((5, 7), 1)},
        **{'full whole': ((3, 5), 1), 'conv whole': ((3, 5), 4), 'conv lines': ((5, 7), 4), 'conv direct': ((5, 2), 1)},
    }.get(name, ((3, 7), 1))
    operation, kernels = find_operation(name.split()[0])
    B, D = (2, max(6, 2 * channels)) if spread == 1.0 else (1, max(2, channels))
    shape = Shape(B, grid, D, channels, window=4)
    inputs = draw_inputs(operation, shape, (torch.float32,), 'cpu', spread)
    found = run_form(kernels, inputs)
    assert_parts_agree(found, run_form(operation.forms[-1], double(inputs)), (torch.float32,), spread)
    assert checker.launches >= 2
