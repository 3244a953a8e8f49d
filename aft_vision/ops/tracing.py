"""Arguments of the operators that differ in `torch.jit.trace`."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def keeps_sums() -> bool:
    """Tell an operator whether to return what its backward reuses.

    Not in a trace, which is checked, saved and run without gradients; a backward through it computes that again.
    """
    return torch.is_grad_enabled() and not torch.jit.is_tracing()


def fix_grid(k: Tensor, grid: tuple[int, int]) -> tuple[Tensor, list[int]]:
    """Return the keys and the grid (H, W) as an operator takes them.

    A trace turns sizes into tensors, which no operator takes in a list: it is for one grid, and its keys pass a check
    that raises an error for another.
    """
    if torch.jit.is_scripting() or not torch.jit.is_tracing():
        return k, [grid[0], grid[1]]
    return _fix_traced_grid(k, grid)


@torch.jit.unused
def _fix_traced_grid(k: Tensor, grid: tuple[int, int]) -> tuple[Tensor, list[int]]:
    sizes = [int(grid[0]), int(grid[1])]
    if any(isinstance(size, Tensor) for size in grid):
        k = _grid_check()(k, *(x if isinstance(x, Tensor) else torch.tensor(x) for x in grid), *sizes)
    return k, sizes


@functools.cache
def _grid_check() -> Callable[..., Tensor]:
    # Scripted, since a trace has no branches of its own. Compiled by the first trace that needs it.
    return torch.jit.script(_check_grid)


def _check_grid(k: Tensor, rows: Tensor, columns: Tensor, height: int, width: int) -> Tensor:
    if int(rows) != height or int(columns) != width:
        raise ValueError(
            f'this trace was made for a grid of ({height}, {width}) tokens, got ({int(rows)}, {int(columns)}); '
            'trace the model again at that size'
        )
    return k
