"""One forward and one backward for every operator y = sigmoid(q) * (W (e^k v)) / (W e^k).

`Weights` represents W = exp(w - reference). The operators differ only in how W is applied.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from aft_vision.ops.common.inputs import Inputs, Qkv, empty_denominator, empty_output
from aft_vision.ops.common.numerics import (
    UNDERFLOW,
    accumulate_dtype,
    by_head,
    chunks,
    gate,
    masked_values,
    may_branch,
    shifted_exp,
)
from aft_vision.ops.common.repair import joint_softmax, underflowed_elements

# Workspace of one batch chunk, in elements of (token, batch, value and key); fits into the caches.
CHUNK_ELEMENTS = 1 << 21


class Workspace(NamedTuple):
    """A buffer in the layout that an operator multiplies fastest, and two views into it.

    values: (B, T, h, D / h), key-weighted values; keys: (B, T, h, 1), key weights.
    targets: the values and keys of targets in the same buffer; None where they lie as those of sources.
    """

    buffer: Tensor
    values: Tensor
    keys: Tensor
    targets: tuple[Tensor, Tensor] | None = None

    def of_targets(self) -> 'Workspace':
        """Return the same buffer with the views of targets."""
        return self if self.targets is None else Workspace(self.buffer, *self.targets)


class Weights(Protocol):
    """The non-negative position weights exp(w - reference) of one operator.

    Attributes:
        writes_to_spare: whether its products use the spare workspace; if not, none is allocated.
        chunk_elements: workspace elements of one chunk on a CPU.
    """

    writes_to_spare: bool

    @property
    def chunk_elements(self) -> int: ...

    def workspace(self, batch: int) -> Workspace:
        """Return an uninitialised workspace for `batch` sequences."""

    def apply(self, x: Workspace, spare: Workspace) -> Workspace:
        """Return W x, the sums over sources. `spare` may be overwritten and may be the result."""

    def apply_transpose(self, x: Workspace, spare: Workspace) -> Workspace:
        """Return W^T x, the sums over targets. `spare` may be overwritten and may be the result."""

    def add_grad(self, grad: Workspace, x: Workspace) -> None:
        """Add the gradient of sum(grad * W x) to the weights' own; W^T grad was the last product."""

    def bias_rows(self, head: Tensor, target: Tensor) -> Tensor:
        """Return rows w[target, :] of the bias, (N, T); minus infinity for sources that the target must not see."""

    def add_bias_rows_grad(self, head: Tensor, target: Tensor, grad: Tensor) -> None:
        """Add the gradient (N, T) of `bias_rows`."""


class BiasGradient:
    """The gradient of a bias, through its exponentials relative to a reference and through repaired rows.

    Attributes:
        bias: the bias.
        exp: its exponentials, of the same shape.
    """

    bias: Tensor
    exp: Tensor

    @cached_property
    def grad_exp(self) -> Tensor:
        """Return the gradient of `exp`."""
        return torch.zeros_like(self.exp)

    @cached_property
    def grad_repaired(self) -> Tensor:
        """Return the gradient of the bias through repaired rows."""
        return torch.zeros_like(self.exp)

    def bias_grad(self) -> Tensor:
        """Return the gradient of the bias, of its shape. The reference cancels and has no gradient."""
        return torch.addcmul(self.grad_repaired, self.grad_exp, self.exp).to(self.bias.dtype)


def mix_operator(weigh: Callable[[Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the forward and the backward of an operator with one bias.

    Args:
        weigh: returns from the inputs `Weights` that are a `BiasGradient`.
    """

    def forward(inputs: Any, save: bool) -> tuple[Tensor, Tensor]:
        out, den = empty_output(inputs.q, inputs.v), empty_denominator(inputs.k, inputs.v, save)
        mix_forward(inputs, weigh(inputs), out, den)
        return out, den

    def backward(grad: Tensor, y: Tensor, den: Tensor, inputs: Any, need_bias: bool) -> tuple[Tensor, ...]:
        weights = weigh(inputs)
        found = mix_backward(grad, y, den, inputs, weights, need_bias)
        return *found, weights.bias_grad() if need_bias else weights.bias.new_empty(0)

    return forward, backward


def mix_forward(inputs: Inputs, weights: Weights, out: Tensor, den: Tensor) -> None:
    """Write y (B, T, D) into out and, unless den is empty, the denominators (B, T, h) into den."""
    buffers = _Buffers(weights)
    for part in chunks(inputs.v, weights.chunk_elements // 2):
        chunk, spaces = _slice_inputs(inputs, part), buffers.take(len(inputs.k[part]))
        _forward_chunk(chunk, weights, spaces, out[part], den[part] if den.numel() else den)


def mix_backward(
    grad: Tensor,
    y: Tensor,
    den: Tensor,
    inputs: Inputs,
    weights: Weights,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, empty for q = None; `weights` accumulates the gradient of the bias."""
    q, k, v = inputs.q, inputs.k, inputs.v
    found = Qkv(None if q is None else q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), None)
    buffers = _Buffers(weights, count=3)
    for part in chunks(v, weights.chunk_elements // 2):
        results, spaces = (grad[part], y[part], den[part]), buffers.take(len(k[part]))
        chunk, into = _slice_inputs(inputs, part), _slice_inputs(found, part)
        _backward_chunk(*results, chunk, weights, need_bias, spaces, into)
    return k.new_empty(0) if found.q is None else found.q, found.k, found.v


def _forward_chunk(inputs: Qkv, weights: Weights, spaces: list[Workspace], out: Tensor, den: Tensor) -> None:
    # Compute y and, unless den is empty, the denominators of b sequences, with two workspaces of that size.
    q, k, v, mask = inputs
    x, spare = spaces
    v = by_head(masked_values(v, mask), k.shape[2])
    _fill_exponentials(x, k, v, mask)
    sums = weights.apply(x, spare)
    dtype, denominator = accumulate_dtype(v), sums.keys.to(accumulate_dtype(v))
    underflowed = _underflowed(denominator)
    if den.numel():
        den.copy_(sums.keys.squeeze(-1))
    ratio = sums.values.to(dtype).div_(denominator if underflowed is None else denominator.clamp_min(UNDERFLOW[dtype]))
    if underflowed is not None and may_branch(k):
        _repair_forward(ratio, k, v, mask, weights, underflowed)  # ratio is (b, T, h, c)
    _write_gated(out, q, ratio)


def _backward_chunk(
    grad: Tensor,
    y: Tensor,
    den: Tensor,
    inputs: Qkv,
    weights: Weights,
    need_bias: bool,
    spaces: list[Workspace],
    into: Qkv,
) -> None:
    # Compute the gradients of q, k and v of b sequences with three workspaces; add to the gradient of the weights.
    q, k, v, mask = inputs
    dq, dk, dv, _ = into
    dtype, heads = accumulate_dtype(v), k.shape[2]
    v_ = by_head(masked_values(v, mask), heads)
    g, out = grad.to(dtype), y.to(dtype)
    go = g * out
    s = gate(q, dtype)
    if s is not None and dq is not None:
        dq.copy_(torch.addcmul(go, go, s, value=-1))
    denominator = den.to(dtype).unsqueeze(-1)  # (b, T, h, 1)
    underflowed = _underflowed(denominator)
    a = by_head(g if s is None else g * s, heads)  # (b, T, h, c)
    r, x, spare = spaces
    r = r.of_targets()
    inverse_denominator = 1 / (denominator if underflowed is None else denominator.clamp_min(UNDERFLOW[dtype]))
    if underflowed is not None:
        inverse_denominator = inverse_denominator.masked_fill(underflowed, 0.0)
    torch.mul(a, inverse_denominator, out=r.values)
    r.keys.copy_(by_head(go, heads).sum(-1, keepdim=True).mul_(inverse_denominator).neg_())
    _fill_exponentials(x, k, v_, mask)
    z = weights.apply_transpose(r, spare)
    wide = [d if d.dtype == dtype else torch.empty(d.shape, dtype=dtype, device=d.device) for d in (dk, dv)]
    dk_, dv_ = wide[0].unsqueeze(-1), by_head(wide[1], heads)
    torch.mul(z.values, x.keys, out=dv_)
    torch.mul((z.values * v_).sum(-1, keepdim=True).add_(z.keys), x.keys, out=dk_)
    if need_bias:
        weights.add_grad(r, x)
    if underflowed is not None and may_branch(k):
        _repair_backward(a, k, v_, mask, weights, underflowed, dk_, dv_, need_bias)
    for found, d in zip(wide, (dk, dv), strict=True):
        if found is not d:
            d.copy_(found)


def _repair_forward(
    ratio: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, weights: Weights, underflowed: Tensor
) -> None:
    for index in underflowed_elements(underflowed.squeeze(-1), v.shape[1] * (v.shape[3] + 1)):
        batch, target, head = index
        p = joint_softmax(k, mask, batch, head, weights.bias_rows(head, target))
        ratio[index] = torch.bmm(p.unsqueeze(1), v.transpose(1, 2)[batch, head].double()).squeeze(1).to(ratio.dtype)


def _repair_backward(
    a: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    weights: Weights,
    underflowed: Tensor,
    dk: Tensor,
    dv: Tensor,
    need_bias: bool,
) -> None:
    for index in underflowed_elements(underflowed.squeeze(-1), v.shape[1] * (v.shape[3] + 1)):
        batch, target, head = index
        p = joint_softmax(k, mask, batch, head, weights.bias_rows(head, target))  # (N, T)
        values = v.transpose(1, 2)[batch, head].double()  # (N, T, c)
        grad = a[index].double()  # (N, c)
        mean = torch.bmm(p.unsqueeze(1), values).squeeze(1)  # (N, c)
        dp = torch.bmm(values, grad.unsqueeze(-1)).squeeze(-1) - (mean * grad).sum(-1, keepdim=True)
        dlogits = (p * dp).to(dk.dtype)
        dk.squeeze(-1).transpose(1, 2).index_put_((batch, head), dlogits, accumulate=True)
        spread = (p.unsqueeze(-1) * grad.unsqueeze(1)).to(dv.dtype)  # (N, T, c)
        dv.transpose(1, 2).index_put_((batch, head), spread, accumulate=True)
        if need_bias:
            weights.add_bias_rows_grad(head, target, dlogits)


def _underflowed(denominator: Tensor) -> Tensor | None:
    # On a CPU None if nothing underflowed, so that the common path costs only one minimum.
    limit = UNDERFLOW[denominator.dtype]
    if may_branch(denominator) and bool(denominator.amin() >= limit):
        return None
    return denominator < limit


class _Buffers:
    # Workspaces reused for every chunk of the same length: new memory costs more than the sums.
    def __init__(self, weights: Weights, count: int = 2) -> None:
        self.weights, self.count = weights, count
        self.length, self.spaces = 0, list[Workspace]()

    def take(self, length: int) -> list[Workspace]:
        if length != self.length:
            own = self.count if self.weights.writes_to_spare else self.count - 1
            self.length, self.spaces = length, []  # free the old ones first
            self.spaces = [self.weights.workspace(length) for _ in range(own)]
            # Instead of a spare workspace that is never written.
            self.spaces += self.spaces[: self.count - own]
        return self.spaces


def _fill_exponentials(x: Workspace, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    ek = shifted_exp(k, mask, x.keys.squeeze(-1)).unsqueeze(-1)  # (b, T, h, 1)
    torch.mul(ek, v, out=x.values)


def _write_gated(out: Tensor, q: Tensor | None, ratio: Tensor) -> None:
    result = by_head(out, ratio.shape[2])
    if q is None:
        result.copy_(ratio)
    elif out.dtype == ratio.dtype:
        torch.sigmoid(q, out=out)
        result.mul_(ratio)
    else:
        torch.mul(by_head(torch.sigmoid(q.to(ratio.dtype)), ratio.shape[2]), ratio, out=result)


def _slice_inputs(inputs: Inputs, part: slice) -> Qkv:
    q, mask = (None if x is None else x[part] for x in (inputs.q, inputs.mask))
    return Qkv(q, inputs.k[part], inputs.v[part], mask)
