"""AFT-axial: a position bias that is a sum over rows and columns of a 2-d grid (AFT Eq. 2, structured; ours).

AFT adds the bias to the key, so it multiplies after the exponential: exp(a[y' - y] + b[x' - x]) is a Kronecker product
of two Toeplitz matrices for each head, A over rows and B over columns. Every source has a learned weight at the price
of H + W terms for each target, not of H W. No term is negative, so nothing cancels.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_vision.ops.common.inputs import empty_denominator, empty_output
from aft_vision.ops.common.mixing import CHUNK_ELEMENTS, Workspace, mix_backward, mix_forward
from aft_vision.ops.common.numerics import accumulate_dtype, product_dtype


class AxialInputs(NamedTuple):
    """Inputs of `ops.aft_axial`."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    row_bias: Tensor
    column_bias: Tensor
    grid: Sequence[int]
    mask: Tensor | None = None


class AxisWeights:
    """The weights exp(w) along one axis of L tokens, relative to the largest of each head, and their gradient.

    Args:
        bias: (h, 2s - 1) position bias; entry s - 1 + d is that of a source d after its target, 0 beyond.
        length: L.
        dtype: of the products.

    Attributes:
        offsets: (h, 2L - 1) position bias at all distances on this axis, in float32 or float64.
        exp: (h, L, L) its exponentials, of targets and sources.
    """

    def __init__(self, bias: Tensor, length: int, dtype: torch.dtype) -> None:
        self.bias, self.length, self.dtype = bias, length, dtype
        # The width of the zeros around the bias; negative where it reaches beyond the grid.
        self.margin = length - (bias.shape[1] + 1) // 2
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.offsets = self._offsets(bias.to(wide))
        # Finite, so that a head of minus infinity has no weights. The compiled form has the same reference, since its
        # backward may get denominators from here.
        reference = self.offsets.amax(dim=1, keepdim=True).clamp_min(torch.finfo(wide).min)
        # Row y is the window of the 2L - 1 offsets that begins at L - 1 - y.
        self.exp = torch.exp(self.offsets - reference).unfold(1, length, 1).flip(1)

    @cached_property
    def matrix(self) -> Tensor:
        """The exponentials in the type of the operands of a product."""
        return self.exp.to(self.dtype)

    @cached_property
    def grad_exp(self) -> Tensor:
        """Gradient of `exp`."""
        return torch.zeros_like(self.exp)

    @cached_property
    def grad_offsets(self) -> Tensor:
        """Gradient of the bias at all distances through repaired rows, (h, 2L - 1)."""
        return torch.zeros_like(self.offsets)

    def bias_rows(self, head: Tensor, target: Tensor) -> Tensor:
        """Return the biases of all sources for some targets, (N, L) in float64."""
        return self._offsets(self.bias.double())[head[:, None], self._sources(target)]

    def add_bias_rows_grad(self, head: Tensor, target: Tensor, grad: Tensor) -> None:
        """Add the gradient (N, L) of `bias_rows`."""
        self.grad_offsets.index_put_((head[:, None], self._sources(target)), grad, accumulate=True)

    def bias_grad(self) -> Tensor:
        """Return the gradient of the bias. The references cancel: no gradient runs through them."""
        pairs = (self.grad_exp * self.exp).flip(1)
        found = torch.ops.aten.unfold_backward(pairs, self.offsets.shape, 1, self.length, 1) + self.grad_offsets
        return F.pad(found, [-self.margin] * 2).to(self.bias.dtype)

    def _offsets(self, bias: Tensor) -> Tensor:
        # (h, 2L - 1), all distances on this axis.
        return F.pad(bias, [self.margin] * 2)

    def _sources(self, target: Tensor) -> Tensor:
        # (N, L): the places of all sources in the offsets.
        return self.length - 1 - target[:, None] + torch.arange(self.length, device=target.device)


class AxialWeights:
    """The Kronecker product of the weights along rows and along columns.

    Sources lie as (h, M, H, W), targets as (h, H, W, M), with M channels and keys of all sequences, and halfway through
    a product (h, W, M, H). So each half is one product a head of neighbours in memory, and nothing is moved in between.
    """

    writes_to_spare = True
    chunk_elements = CHUNK_ELEMENTS

    def __init__(self, inputs: AxialInputs, dtype: torch.dtype) -> None:
        self.height, self.width = inputs.grid
        self.channels = inputs.v.shape[2] // inputs.k.shape[2]
        self.rows = AxisWeights(inputs.row_bias, self.height, dtype)
        self.columns = AxisWeights(inputs.column_bias, self.width, dtype)
        self.halfway = self.rows.matrix.new_empty(0)

    def workspace(self, batch: int) -> Workspace:
        heads, tokens = len(self.rows.matrix), self.height * self.width
        buffer = self.rows.matrix.new_empty(heads, batch, self.channels + 1, tokens)
        by_source = buffer.permute(1, 3, 0, 2)  # (B, T, h, c + 1)
        by_target = buffer.view(heads, tokens, batch, self.channels + 1).permute(2, 1, 0, 3)
        return Workspace(buffer, *self._parts(by_source), targets=self._parts(by_target))

    def apply(self, x: Workspace, spare: Workspace) -> Workspace:
        self._apply_columns(x)
        spare = spare.of_targets()
        torch.bmm(self.rows.matrix, self._halfway_by_row().transpose(1, 2), out=self._targets(spare))
        return spare

    def apply_transpose(self, x: Workspace, spare: Workspace) -> Workspace:
        self._resize_halfway(x)
        torch.bmm(self._targets(x).transpose(1, 2), self.rows.matrix, out=self._halfway_by_row())
        torch.bmm(self._halfway_by_column().transpose(1, 2), self.columns.matrix, out=self._sources(spare))
        return spare

    def add_grad(self, grad: Workspace, x: Workspace) -> None:
        # The halfway result of `apply_transpose` is the gradient after the product along columns.
        self.columns.grad_exp += torch.bmm(self._halfway_by_column(), self._sources(x))
        self._apply_columns(x)
        self.rows.grad_exp += torch.bmm(self._targets(grad), self._halfway_by_row())

    def bias_rows(self, head: Tensor, target: Tensor) -> Tensor:
        rows = self.rows.bias_rows(head, target // self.width)
        columns = self.columns.bias_rows(head, target % self.width)
        return (rows[:, :, None] + columns[:, None, :]).flatten(1)

    def add_bias_rows_grad(self, head: Tensor, target: Tensor, grad: Tensor) -> None:
        by_axis = grad.unflatten(1, (self.height, self.width))
        self.rows.add_bias_rows_grad(head, target // self.width, by_axis.sum(2))
        self.columns.add_bias_rows_grad(head, target % self.width, by_axis.sum(1))

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., : self.channels], x[..., self.channels :]

    def _apply_columns(self, x: Workspace) -> None:
        self._resize_halfway(x)
        torch.bmm(self.columns.matrix, self._sources(x).transpose(1, 2), out=self._halfway_by_column())

    def _resize_halfway(self, x: Workspace) -> None:
        if self.halfway.numel() != x.buffer.numel():
            self.halfway = torch.empty_like(x.buffer)

    def _sources(self, x: Workspace) -> Tensor:
        return x.buffer.view(len(x.buffer), -1, self.width)  # (h, M H, W)

    def _targets(self, x: Workspace) -> Tensor:
        return x.buffer.view(len(x.buffer), self.height, -1)  # (h, H, W M)

    def _halfway_by_column(self) -> Tensor:
        return self.halfway.view(len(self.halfway), self.width, -1)  # (h, W, M H)

    def _halfway_by_row(self) -> Tensor:
        return self.halfway.view(len(self.halfway), -1, self.height)  # (h, W M, H)


def axial_forward(inputs: AxialInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators."""
    out, den = empty_output(inputs.q, inputs.v), empty_denominator(inputs.k, inputs.v, save)
    mix_forward(inputs, AxialWeights(inputs, product_dtype(inputs.v)), out, den)
    return out, den


def axial_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: AxialInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and both biases."""
    # The gradient of a bias sums over a whole axis, where it cancels: bfloat16 products would leave it too few digits.
    weights = AxialWeights(inputs, accumulate_dtype(inputs.v))
    found = mix_backward(grad, y, den, inputs, weights, need_bias)
    if not need_bias:
        return *found, inputs.k.new_empty(0), inputs.k.new_empty(0)
    return *found, weights.rows.bias_grad(), weights.columns.bias_grad()
