"""Arguments of the operators that differ in `torch.jit.trace`."""

import torch


def keeps_sums() -> bool:
    """Tell an operator whether to return what its backward reuses.

    Not in a trace, which is checked, saved and run without gradients; a backward through it computes that again.
    """
    return torch.is_grad_enabled() and not torch.jit.is_tracing()


def grid_sizes(grid: tuple[int, int]) -> list[int]:
    """Return the grid (H, W) as an operator takes it. A trace turns sizes into tensors, and is for one grid."""
    if torch.jit.is_tracing():
        return [int(grid[0]), int(grid[1])]
    return [grid[0], grid[1]]
