"""AFT-full and AFT-simple without a mask over the future (AFT Eq. 2, AFT Eq. 5)."""

from functools import cached_property

import torch
from torch import Tensor

from aft_vision.ops.common.mixing import Workspace, mix_backward, mix_forward
from aft_vision.ops.common.numerics import (
    accumulate_dtype,
    check_qkv,
    empty_denominator,
    empty_output,
    gate,
    masked_keys,
    masked_values,
    may_branch,
    product_dtype,
)

# Workspace elements of a batch chunk, at least, at most and for each thread: they stay in the caches, and the peak of
# memory near that of attention.
LEAST_ELEMENTS, CHUNK_ELEMENTS, THREAD_ELEMENTS = 1 << 19, 1 << 20, 1 << 18


class FullWeights:
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
        return min(CHUNK_ELEMENTS, max(LEAST_ELEMENTS, THREAD_ELEMENTS * torch.get_num_threads()))

    @cached_property
    def grad_exp(self) -> Tensor:
        """Gradient of `exp`."""
        return torch.zeros_like(self.exp)

    @cached_property
    def grad_rows(self) -> Tensor:
        """Gradient of the repaired rows of the bias."""
        return torch.zeros_like(self.exp)

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
        self.grad_rows.index_add_(0, target, grad.to(self.grad_rows.dtype))

    def bias_grad(self) -> Tensor:
        """Gradient of the bias, (T, T). The reference cancels: no gradient runs through it."""
        return torch.addcmul(self.grad_rows, self.grad_exp, self.exp).to(self.bias.dtype)

    def _product(self, matrix: Tensor, x: Workspace, spare: Workspace) -> Workspace:
        # A product for each sequence: torch would fold a 2-d matrix into a transposed copy.
        flat = x.buffer.flatten(0, 1)  # (2B, T, D)
        torch.bmm(matrix.expand(len(flat), -1, -1), flat, out=spare.buffer.flatten(0, 1))
        return spare

    def _views(self, buffer: Tensor) -> Workspace:
        return Workspace(buffer, buffer[0].unsqueeze(-1), buffer[1].unsqueeze(-1))


def check_full(q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> None:
    """Raise ValueError unless the shapes are those of `ops.aft_full`."""
    check_qkv(q, k, v, mask)
    if bias.shape != (v.shape[1], v.shape[1]):
        raise ValueError(f'bias must have shape {(v.shape[1], v.shape[1])} to match v, got {tuple(bias.shape)}')


def full_forward(
    q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, save: bool
) -> tuple[Tensor, Tensor]:
    """y and the denominators (AFT Eq. 2)."""
    out, den = empty_output(q, v), empty_denominator(k, v, save)
    mix_forward(q, k, v, mask, FullWeights(bias, v), out, den)
    return out, den


def full_backward(
    grad: Tensor,
    y: Tensor,
    den: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and bias."""
    weights = FullWeights(bias, v)
    dq, dk, dv = mix_backward(grad, y, den, q, k, v, mask, weights, need_bias)
    return dq, dk, dv, weights.bias_grad() if need_bias else bias.new_empty(0)


def check_simple(q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """Raise ValueError unless the shapes are those of `ops.aft_simple`."""
    check_qkv(q, k, v, mask)


def empty_context(k: Tensor, v: Tensor, save: bool) -> Tensor:
    """Room for the context (B, 1, D) that the backward reuses; empty when nothing will be differentiated."""
    return torch.empty((v.shape[0], 1, v.shape[2]) if save else (0,), dtype=accumulate_dtype(v), device=v.device)


def simple_forward(q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None, save: bool) -> tuple[Tensor, Tensor]:
    """y and the context (B, 1, D) that every target shares (AFT Eq. 5)."""
    context = (_token_softmax(k, mask) * masked_values(v, mask)).sum(1, keepdim=True)
    s = gate(q, context.dtype)
    y = context.expand(v.shape).clone() if s is None else s * context
    return y.to(v.dtype if q is None else q.dtype), context if save else empty_context(k, v, save)


def simple_backward(
    grad: Tensor,
    y: Tensor,
    context: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    p = _token_softmax(k, mask)
    g = grad.to(p.dtype)
    s = gate(q, p.dtype)
    dq = k.new_empty(0) if q is None or s is None else (g * context * s * (1 - s)).to(q.dtype)
    dcontext = (g if s is None else g * s).sum(1, keepdim=True)
    dv = p * dcontext
    dk = dv * (masked_values(v, mask) - context)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _token_softmax(k: Tensor, mask: Tensor | None) -> Tensor:
    # (B, T, D): zero where every key is minus infinity or masked.
    keys = masked_keys(k, mask)
    p = torch.softmax(keys, dim=1)
    if may_branch(p) and not bool(p[:, 0].isnan().any()):
        return p
    return p.masked_fill(keys.amax(dim=1, keepdim=True) == float('-inf'), 0.0)
