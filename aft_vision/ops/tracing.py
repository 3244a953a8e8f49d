"""Arguments of the operators under `torch.jit.trace`."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def saves_for_backward() -> bool:
    """Return whether an operator saves tensors for its backward.

    A trace does not save them: it is checked, saved and run without gradients. A backward through it recomputes them.
    """
    return torch.is_grad_enabled() and not torch.jit.is_tracing()


def grid_arguments(k: Tensor, grid: tuple[int, int]) -> tuple[Tensor, list[int]]:
    """Return the keys and the grid (H, W) as arguments of an operator.

    A trace turns sizes into tensors, which an operator does not accept in a list. So a trace is for one grid, and its
    keys pass a check that raises an error for any other.
    """
    if torch.jit.is_scripting() or not torch.jit.is_tracing():
        return k, [grid[0], grid[1]]
    return _traced_grid(k, grid)


@torch.jit.unused
def _traced_grid(k: Tensor, grid: tuple[int, int]) -> tuple[Tensor, list[int]]:
    sizes = [int(grid[0]), int(grid[1])]
    if any(isinstance(size, Tensor) for size in grid):
        k = _grid_check()(k, *(x if isinstance(x, Tensor) else torch.tensor(x) for x in grid), *sizes)
    return k, sizes


@functools.cache
def _grid_check() -> Callable[..., Tensor]:
    # Scripted, because a trace has no branches. Compiled by the first trace that needs it.
    return torch.jit.script(_check_grid)


def _check_grid(k: Tensor, rows: Tensor, columns: Tensor, height: int, width: int) -> Tensor:
    if int(rows) != height or int(columns) != width:
        raise ValueError(
            f'this trace was made for a grid of ({height}, {width}) tokens, got ({int(rows)}, {int(columns)}); '
            'trace the model again at that size'
        )
    return k
