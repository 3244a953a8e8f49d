"""AFT-full, not causal (AFT Eq. 2)."""

from typing import NamedTuple

import torch
from torch import Tensor

from aft_vision.ops.common.mixing import BiasGradient, Workspace, mix_operator
from aft_vision.ops.common.numerics import accumulate_dtype, may_branch, product_dtype

# Workspace elements of a batch chunk, minimum, maximum and per thread: they fit into the caches, and the peak of memory
# is near that of attention.
MIN_ELEMENTS, CHUNK_ELEMENTS, THREAD_ELEMENTS = 1 << 19, 1 << 20, 1 << 18


class FullInputs(NamedTuple):
    """Inputs of `ops.aft_full` and `ops.aft_full_causal`."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    bias: Tensor
    mask: Tensor | None = None


class FullWeights(BiasGradient):
    """One (T, T) matrix over all channels, applied to the values and to the keys of each sequence."""

    writes_to_spare = True

    def __init__(self, bias: Tensor, v: Tensor) -> None:
        self.bias = bias
        self.channels = v.shape[2]
        dtype = accumulate_dtype(v)
        bias = bias.to(dtype)
        # Finite, so that a row of minus infinity has no weights.
        self.exp = (bias - bias.amax(dim=1, keepdim=True).clamp_min(torch.finfo(dtype).min)).exp_()
        self.matrix = self.exp.to(product_dtype(v))

    @property
    def chunk_elements(self) -> int:
        return min(CHUNK_ELEMENTS, max(MIN_ELEMENTS, THREAD_ELEMENTS * torch.get_num_threads()))

    def workspace(self, batch: int) -> Workspace:
        return self._views(self.matrix.new_empty(2, batch, len(self.matrix), self.channels))

    def apply(self, x: Workspace, spare: Workspace) -> Workspace:
        return self._product(self.matrix, x, spare)

    def apply_transpose(self, x: Workspace, spare: Workspace) -> Workspace:
        return self._product(self.matrix.t(), x, spare)

    def add_grad(self, grad: Workspace, x: Workspace) -> None:
        if may_branch(self.exp):  # a CPU works in chunks of a few sequences
            products = torch.bmm(grad.buffer.flatten(0, 1), x.buffer.flatten(0, 1).transpose(1, 2))  # (2b, T, T)
            self.grad_exp.add_(products.sum(0, dtype=self.exp.dtype))
        else:
            left, right = (y.buffer.permute(2, 0, 1, 3).flatten(1) for y in (grad, x))  # (T, 2B * D)
            self.grad_exp.add_(left @ right.t())

    def bias_rows(self, head: Tensor, target: Tensor) -> Tensor:
        return self.bias[target]

    def add_bias_rows_grad(self, head: Tensor, target: Tensor, grad: Tensor) -> None:
        self.grad_repaired.index_add_(0, target, grad.to(self.grad_repaired.dtype))

    def _product(self, matrix: Tensor, x: Workspace, spare: Workspace) -> Workspace:
        # One product per sequence: torch would fold a 2-d matrix into a transposed copy.
        flat = x.buffer.flatten(0, 1)  # (2B, T, D)
        torch.bmm(matrix.expand(len(flat), -1, -1), flat, out=spare.buffer.flatten(0, 1))
        return spare

    def _views(self, buffer: Tensor) -> Workspace:
        return Workspace(buffer, buffer[0].unsqueeze(-1), buffer[1].unsqueeze(-1))


# AFT Eq. 2.
full_forward, full_backward = mix_operator(lambda inputs: FullWeights(inputs.bias, inputs.v))
