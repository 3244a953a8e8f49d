"""The biases of the causal operators, in blocks of targets."""

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from aft_vision.ops.common.numerics import accumulate_dtype
from aft_vision.ops.local.band import block_length, skew, unskew


class CausalBias(Protocol):
    """The bias of one causal operator, read and differentiated in blocks of targets."""

    step: int

    def low(self, start: int) -> int:
        """Return the first source with an individual weight for the block of targets from `start`."""

    def span(self) -> float:
        """Return the range of the biases, including 0 for older sources; reads them on the host."""

    def logits(self, start: int, stop: int) -> Tensor:
        """Return the bias, (stop - start, stop - low), minus infinity in the future."""

    def add_grad(self, start: int, stop: int, grad: Tensor) -> None:
        """Add the gradient of `logits`."""

    def rows(self, target: Tensor) -> Tensor:
        """Return the bias (N, T) of single targets, minus infinity in the future."""

    def add_rows_grad(self, target: Tensor, grad: Tensor) -> None:
        """Add the gradient of `rows`."""

    def grads(self, need_bias: bool) -> list[Tensor]:
        """Return the gradient of the bias in its dtype, an empty tensor without `need_bias`; none without a bias."""


class _LearnedBias:
    # A bias with a row per target, and its gradient.
    def __init__(self, bias: Tensor) -> None:
        self.bias = bias

    @cached_property
    def grad(self) -> Tensor:
        """Return the gradient of the bias, of its shape."""
        return torch.zeros(self.bias.shape, dtype=accumulate_dtype(self.bias), device=self.bias.device)

    def grads(self, need_bias: bool) -> list[Tensor]:
        return [self.grad.to(self.bias.dtype) if need_bias else self.bias.new_empty(0)]

    def span(self) -> float:
        low, high = (float(x) for x in self.bias.aminmax())
        return max(high, 0.0) - min(low, 0.0)


class FullBias(_LearnedBias):
    """A whole (T, T) bias; only the lower triangle is read."""

    step = 128

    def low(self, start: int) -> int:
        return 0

    def logits(self, start: int, stop: int) -> Tensor:
        return _hide_future(self.bias[start:stop, :stop], start)

    def add_grad(self, start: int, stop: int, grad: Tensor) -> None:
        self.grad[start:stop, :stop] += grad

    def rows(self, target: Tensor) -> Tensor:
        future = torch.arange(len(self.bias), device=target.device) > target[:, None]
        return self.bias[target].masked_fill(future, float('-inf'))

    def add_rows_grad(self, target: Tensor, grad: Tensor) -> None:
        self.grad.index_add_(0, target, grad.to(self.grad.dtype))


class BandBias(_LearnedBias):
    """A band (T, s): the token itself and the s - 1 before it; 0 for older sources."""

    def __init__(self, band: Tensor) -> None:
        super().__init__(band)
        self.step = block_length(band.shape[1])

    def low(self, start: int) -> int:
        return max(0, start - self.bias.shape[1] + 1)

    def logits(self, start: int, stop: int) -> Tensor:
        rows = skew(self.bias[start:stop])[:, self.low(start) - (start - self.bias.shape[1] + 1) :]
        return _hide_future(rows, start - self.low(start))

    def add_grad(self, start: int, stop: int, grad: Tensor) -> None:
        width = self.bias.shape[1] + stop - start - 1
        wide = grad.new_zeros(stop - start, width)
        wide[:, width - grad.shape[1] :] = grad
        self.grad[start:stop] += unskew(wide)

    def rows(self, target: Tensor) -> Tensor:
        place = self._places(target)
        rows = self.bias[target].gather(1, place.clamp(0, self.bias.shape[1] - 1)).masked_fill(place < 0, 0.0)
        return rows.masked_fill(place >= self.bias.shape[1], float('-inf'))

    def add_rows_grad(self, target: Tensor, grad: Tensor) -> None:
        place = self._places(target)
        rows = self.grad.new_zeros(len(target), self.bias.shape[1])
        rows.scatter_add_(1, place.clamp(0, self.bias.shape[1] - 1), grad.to(rows.dtype).masked_fill(place < 0, 0.0))
        self.grad.index_add_(0, target, rows)

    def _places(self, target: Tensor) -> Tensor:
        # (N, T): the place of every source in the band of each target.
        return torch.arange(len(self.bias), device=target.device) - target[:, None] + self.bias.shape[1] - 1


class NoBias:
    """No bias, for AFT-simple: every visible source has the weight exp(k)."""

    step = 64

    def __init__(self, v: Tensor) -> None:
        self.tokens = v.shape[1]
        self.zero = torch.zeros((), dtype=accumulate_dtype(v), device=v.device)

    def low(self, start: int) -> int:
        return start

    def span(self) -> float:
        return 0.0

    def grads(self, need_bias: bool) -> list[Tensor]:
        return []

    def logits(self, start: int, stop: int) -> Tensor:
        return _hide_future(self.zero.expand(stop - start, stop - start), 0)

    def add_grad(self, start: int, stop: int, grad: Tensor) -> None:
        """Do nothing: there is no bias."""

    def rows(self, target: Tensor) -> Tensor:
        future = torch.arange(self.tokens, device=target.device) > target[:, None]
        return self.zero.expand(future.shape).masked_fill(future, float('-inf'))

    def add_rows_grad(self, target: Tensor, grad: Tensor) -> None:
        """Do nothing: there is no bias."""


def _hide_future(rows: Tensor, diagonal: int) -> Tensor:
    # Row i sees the columns up to i + diagonal.
    row = torch.arange(rows.shape[0], device=rows.device)[:, None]
    column = torch.arange(rows.shape[1], device=rows.device)
    return rows.masked_fill(column > row + diagonal, float('-inf'))
