"""A kernel that shows whether Triton can compile at all."""

import triton
import triton.language as tl


@triton.jit
def trial_kernel(OUT):
    """Write 1."""
    tl.store(OUT, 1.0)
