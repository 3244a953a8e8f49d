"""AFT-local, not causal (AFT Eq. 2 with the bias of AFT Eq. 4).

A block of targets multiplies the sources in the windows of its targets. All older and newer sources, where w = 0, enter
through running sums from both ends, so nothing is subtracted and no (T, T) matrix is formed.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from aft_vision.ops.common.mixing import CHUNK_ELEMENTS, BiasGradient, Workspace, mix_operator
from aft_vision.ops.common.numerics import accumulate_dtype, product_dtype
from aft_vision.ops.local.band import block_length, skew, unskew


class LocalInputs(NamedTuple):
    """Inputs of `ops.aft_local` and `ops.aft_local_causal`."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    band: Tensor
    mask: Tensor | None = None


class _Block(NamedTuple):
    # Targets [start, stop) and the sources [low, high) in the window of any of them.
    start: int
    stop: int
    low: int
    high: int


class LocalWeights(BiasGradient):
    """A band of 2s - 1 weights per target, and weight one outside it (before the row's reference is subtracted)."""

    writes_to_spare = False
    chunk_elements = CHUNK_ELEMENTS

    def __init__(self, band: Tensor, v: Tensor) -> None:
        self.bias, self.channels = band, v.shape[2]
        tokens, width = band.shape
        self.window = (width + 1) // 2
        dtype = accumulate_dtype(v)
        self.product_dtype = product_dtype(v)
        target = torch.arange(tokens, device=band.device)
        source = target[:, None] + torch.arange(width, device=band.device) - (self.window - 1)
        logits = band.to(dtype).masked_fill((source < 0) | (source >= tokens), float('-inf'))
        # Finite, so that a row of minus infinity has no weights.
        reference = logits.amax(dim=1, keepdim=True).clamp_min(torch.finfo(dtype).min)
        has_outside = (target >= self.window) | (target + self.window < tokens)
        self.reference = torch.where(has_outside[:, None], reference.clamp_min(0.0), reference)  # (T, 1)
        self.exp = torch.exp(logits - self.reference)  # (T, 2s - 1)
        self.outside = torch.exp(-self.reference).masked_fill(~has_outside[:, None], 0.0)  # (T, 1)

    def workspace(self, batch: int) -> Workspace:
        shape = (len(self.bias), batch, 2, self.channels)
        return self._views(torch.empty(shape, dtype=self.product_dtype, device=self.bias.device))

    def apply(self, x: Workspace, spare: Workspace) -> Workspace:
        flat = x.buffer.flatten(1)
        out = torch.empty(flat.shape, dtype=self.exp.dtype, device=flat.device)
        for block in self._blocks():
            out[block.start : block.stop] = self._weight(block) @ flat[block.low : block.high]
        older = _running_sums(flat, [block.low for block in self._blocks()])
        newer = _running_sums(flat.flip(0), [len(flat) - block.high for block in self._blocks()][::-1])[::-1]
        for block, before, after in zip(self._blocks(), older, newer, strict=True):
            rows = slice(block.start, block.stop)
            out[rows].addcmul_(self.outside[rows], before + after)
        return self._views(out.view(x.buffer.shape))

    def apply_transpose(self, x: Workspace, spare: Workspace) -> Workspace:
        flat = x.buffer.flatten(1)
        out = torch.zeros(flat.shape, dtype=self.exp.dtype, device=flat.device)
        totals = []
        for block in self._blocks():
            rows = flat[block.start : block.stop]
            out[block.low : block.high] += self._weight(block).t() @ rows
            totals.append((self.outside[block.start : block.stop] * rows).sum(0))
        blocks = list(self._blocks())
        passed = torch.zeros_like(totals[0])  # by targets whose window ends before a source
        for block, following, total in zip(blocks[:-1], blocks[1:], totals[:-1], strict=True):
            passed = passed + total
            out[block.high : following.high] += passed
        ahead = torch.zeros_like(totals[0])  # by targets whose window begins after a source
        for block, previous, total in zip(blocks[:0:-1], blocks[-2::-1], totals[:0:-1], strict=True):
            ahead = ahead + total
            out[previous.low : block.low] += ahead
        return self._views(out.view(x.buffer.shape))

    def add_grad(self, grad: Workspace, x: Workspace) -> None:
        left, right = grad.buffer.flatten(1), x.buffer.flatten(1)
        for block in self._blocks():
            product = (left[block.start : block.stop] @ right[block.low : block.high].t()).to(self.exp.dtype)
            wide = product.new_zeros(len(product), block.stop - block.start + 2 * self.window - 2)
            offset = block.low - (block.start - self.window + 1)
            wide[:, offset : offset + product.shape[1]] = product
            self.grad_exp[block.start : block.stop] += unskew(wide)

    def bias_rows(self, head: Tensor, target: Tensor) -> Tensor:
        inside, place = self._places(target)
        return self.bias[target].gather(1, place).masked_fill(~inside, 0.0)

    def add_bias_rows_grad(self, head: Tensor, target: Tensor, grad: Tensor) -> None:
        inside, place = self._places(target)
        rows = self.grad_repaired.new_zeros(len(target), self.bias.shape[1])
        rows.scatter_add_(1, place, grad.to(rows.dtype).masked_fill(~inside, 0.0))
        self.grad_repaired.index_add_(0, target, rows)

    def _blocks(self) -> Iterator[_Block]:
        tokens, reach = len(self.bias), self.window - 1
        step = block_length(self.window)
        for start in range(0, tokens, step):
            stop = min(start + step, tokens)
            yield _Block(start, stop, max(0, start - reach), min(tokens, stop + reach))

    def _weight(self, block: _Block) -> Tensor:
        # (C, high - low): exp(w - reference) in the window, exp(-reference) between it and the edges of the block.
        rows = slice(block.start, block.stop)
        columns = slice(block.low - (block.start - self.window + 1), block.high - (block.start - self.window + 1))
        inside = skew(torch.ones_like(self.exp[rows]))[:, columns]
        weight = skew(self.exp[rows])[:, columns] + (1 - inside) * self.outside[rows]
        return weight.to(self.product_dtype)

    def _places(self, target: Tensor) -> tuple[Tensor, Tensor]:
        # (N, T): whether a source is in the window of each target, and its place in the band.
        place = torch.arange(len(self.bias), device=target.device) - target[:, None] + self.window - 1
        width = self.bias.shape[1]
        return (place >= 0) & (place < width), place.clamp(0, width - 1)

    def _views(self, buffer: Tensor) -> Workspace:
        by_batch = buffer.transpose(0, 1).unsqueeze(-1)  # (B, T, 2, D, 1)
        return Workspace(buffer, by_batch[:, :, 0], by_batch[:, :, 1])


def _running_sums(x: Tensor, stops: list[int]) -> list[Tensor]:
    # The sums of x[:stop] for ascending stops, each computed from the one before.
    total, start, sums = torch.zeros(x.shape[1:], dtype=accumulate_dtype(x), device=x.device), 0, []
    for stop in stops:
        total = total + x[start:stop].sum(0, dtype=total.dtype)
        start = stop
        sums.append(total)
    return sums


# AFT Eq. 4.
local_forward, local_backward = mix_operator(lambda inputs: LocalWeights(inputs.band, inputs.v))
