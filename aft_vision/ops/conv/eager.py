"""AFT-conv: one s x s bias per head, shared over a 2-d grid (AFT Eq. 6).

The product has two forms. The Toeplitz form multiplies by the expanded weights, which are one outside the window. All
terms are positive, so nothing cancels; it is fastest for few heads. The depthwise form is the paper's: a global sum
plus a convolution by exp(w) - 1. It loses digits if w is very negative at a dominating key. This is detected, and the
call is repeated in the Toeplitz form, a few heads at a time.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from aft_vision.ops.common.inputs import empty_denominator, empty_output
from aft_vision.ops.common.mixing import CHUNK_ELEMENTS, BiasGradient, Workspace, mix_backward, mix_forward
from aft_vision.ops.common.numerics import accumulate_dtype, may_branch, product_dtype, shifted_exp

# The Toeplitz form is used for up to this many heads, or if there are at most as many tokens as taps; it never has more
# matrix elements than this at once.
TOEPLITZ_HEADS = 64
TOEPLITZ_ELEMENTS = 5_000_000
# The depthwise form may lose at most this factor of a denominator by cancellation.
CANCELLATION = {torch.bfloat16: 2.0, torch.float32: 16.0, torch.float64: 16.0}


class ConvInputs(NamedTuple):
    """Inputs of `ops.aft_conv`."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    kernel: Tensor
    grid: Sequence[int]
    mask: Tensor | None = None
    global_context: bool = True

    @property
    def channels(self) -> int:
        """Return the number of channels per head."""
        return self.v.shape[2] // self.k.shape[2]

    def part(self, head: slice) -> 'ConvInputs':
        """Return the inputs of some heads."""
        channel = slice(head.start * self.channels, head.stop * self.channels)
        q = None if self.q is None else self.q[..., channel]
        return self._replace(q=q, k=self.k[..., head], v=self.v[..., channel], kernel=self.kernel[head])


class ConvWeights(BiasGradient):
    """The base of both forms: exp(w - reference) with one reference per head, and the bias of single rows."""

    def __init__(self, inputs: ConvInputs) -> None:
        dtype, global_context = accumulate_dtype(inputs.v), inputs.global_context
        self.bias, self.grid, self.channels = inputs.kernel, (inputs.grid[0], inputs.grid[1]), inputs.channels
        self.global_context, self.product_dtype = global_context, product_dtype(inputs.v)
        kernel = inputs.kernel.to(dtype)
        # Finite, so that a head of minus infinity has no weights.
        reference = kernel.amax(dim=(1, 2), keepdim=True).clamp_min(0.0 if global_context else torch.finfo(dtype).min)
        self.exp = torch.exp(kernel - reference)  # (h, s, s)
        self.outside = torch.exp(-reference) if global_context else torch.zeros_like(reference)  # (h, 1, 1)

    def bias_rows(self, head: Tensor, target: Tensor) -> Tensor:
        outside = self.bias.new_full((len(self.bias), 1, 1), 0.0 if self.global_context else float('-inf'))
        shifts = shifted_kernel(self.bias, self.grid, outside)
        return shifts.flatten(1)[head[:, None], self._shift_index(target)]

    def add_bias_rows_grad(self, head: Tensor, target: Tensor, grad: Tensor) -> None:
        shifts = shifted_kernel(torch.zeros_like(self.exp), self.grid, torch.zeros_like(self.outside))
        flat = head[:, None] * shifts[0].numel() + self._shift_index(target)
        shifts.view(-1).index_add_(0, flat.flatten(), grad.to(shifts.dtype).flatten())
        self.grad_repaired.add_(unshifted_kernel(shifts, self.bias.shape[-1]))

    def _shift_index(self, target: Tensor) -> Tensor:
        # (N, T): the place in the flattened (2H - 1, 2W - 1) shifts of every source, seen from each target.
        height, width = self.grid
        row = height - 1 - target // width
        column = width - 1 - target % width
        rows = row[:, None] + torch.arange(height, device=target.device)  # (N, H)
        columns = column[:, None] + torch.arange(width, device=target.device)  # (N, W)
        return (rows[:, :, None] * (2 * width - 1) + columns[:, None, :]).flatten(1)


class ToeplitzWeights(ConvWeights):
    """Expanded (h, T, T) weights; one product [(c + 1) * B, T] x [T, T] per head of c channels."""

    writes_to_spare = True
    chunk_elements = CHUNK_ELEMENTS

    def __init__(self, inputs: ConvInputs) -> None:
        super().__init__(inputs)
        grid, kernel = self.grid, self.bias
        height, width = grid
        shifts = shifted_kernel(self.exp, grid, self.outside).to(self.product_dtype)
        # Row (y, x) is the window of the shifts that starts at (H - 1 - y, W - 1 - x): windows along W, then along H.
        bands = torch.stack([shifts[:, :, width - 1 - x : 2 * width - 1 - x] for x in range(width)], 1)
        rows = [bands[:, :, height - 1 - y : 2 * height - 1 - y] for y in range(height)]  # (h, W, H, W) each
        self.matrix = torch.stack(rows, 1).view(len(kernel), height * width, height * width)
        self.grad_matrix: Tensor | None = None

    def workspace(self, batch: int) -> Workspace:
        heads, tokens, _ = self.matrix.shape
        return self._views(self.matrix.new_empty(heads, self.channels + 1, batch, tokens))

    def apply(self, x: Workspace, spare: Workspace) -> Workspace:
        torch.bmm(x.buffer.flatten(1, 2), self.matrix.transpose(1, 2), out=spare.buffer.flatten(1, 2))
        return spare

    def apply_transpose(self, x: Workspace, spare: Workspace) -> Workspace:
        torch.bmm(x.buffer.flatten(1, 2), self.matrix, out=spare.buffer.flatten(1, 2))
        return spare

    def add_grad(self, grad: Workspace, x: Workspace) -> None:
        product = torch.bmm(grad.buffer.flatten(1, 2).transpose(1, 2), x.buffer.flatten(1, 2)).to(self.exp.dtype)
        self.grad_matrix = product if self.grad_matrix is None else self.grad_matrix.add_(product)

    def bias_grad(self) -> Tensor:
        (height, width), heads = self.grid, len(self.matrix)
        assert self.grad_matrix is not None
        rows = self.grad_matrix.view(heads, height, width, height, width).flip(1, 2)
        rows = torch.ops.aten.unfold_backward(rows, [heads, height, 2 * width - 1, height], 2, width, 1)
        shifts = torch.ops.aten.unfold_backward(rows, [heads, 2 * height - 1, 2 * width - 1], 1, height, 1)
        self.grad_exp.add_(unshifted_kernel(shifts, self.bias.shape[-1]))
        return super().bias_grad()

    def _views(self, buffer: Tensor) -> Workspace:
        by_batch = buffer.permute(2, 3, 0, 1)  # (B, T, h, c + 1)
        return Workspace(buffer, by_batch[..., : self.channels], by_batch[..., self.channels :])


class DepthwiseWeights(ConvWeights):
    """The paper's form: the global sum plus a depthwise convolution by exp(w) - 1 on channels-last maps."""

    writes_to_spare = False
    chunk_elements = CHUNK_ELEMENTS

    def __init__(self, inputs: ConvInputs) -> None:
        super().__init__(inputs)
        self.taps = (self.exp - self.outside).to(self.product_dtype)
        self.reliable = True

    def workspace(self, batch: int) -> Workspace:
        heads, tokens = len(self.exp), self.grid[0] * self.grid[1]
        shape = (2, batch, tokens, heads) if self.channels == 1 else (batch, tokens, heads, self.channels + 1)
        return self._views(torch.empty(shape, dtype=self.product_dtype, device=self.exp.device))

    def apply(self, x: Workspace, spare: Workspace) -> Workspace:
        y = self._convolve(x, self.taps)
        self.reliable &= self.keeps_digits(y.keys.squeeze(-1), x.keys.squeeze(-1).sum(1, keepdim=True))
        return y

    def keeps_digits(self, den: Tensor, total: Tensor) -> bool:
        """Return whether no denominator (B, T, h) is so far below the global sum (B, 1, h) that digits are lost."""
        return bool((den * CANCELLATION[self.product_dtype] >= total * self.outside.flatten()).all())

    def apply_transpose(self, x: Workspace, spare: Workspace) -> Workspace:
        return self._convolve(x, self.taps.flip(1, 2))

    def add_grad(self, grad: Workspace, x: Workspace) -> None:
        size = self.bias.shape[-1]
        maps = self._maps(x)
        shape = (maps.shape[1], 1, size, size)
        d_weight = conv2d_weight(maps, shape, self._maps(grad), padding=size // 2, groups=maps.shape[1])
        d_weight = d_weight.squeeze(1).to(self.exp.dtype)
        d_heads = d_weight if self.channels == 1 else d_weight.unflatten(0, (-1, self.channels + 1)).sum(1)
        self.grad_exp.add_(d_heads)

    def _convolve(self, x: Workspace, taps: Tensor) -> Workspace:
        size = self.bias.shape[-1]
        maps = self._maps(x)
        weight = taps if self.channels == 1 else taps.repeat_interleave(self.channels + 1, dim=0)
        y = F.conv2d(maps, weight.unsqueeze(1), padding=size // 2, groups=maps.shape[1])
        y = y.permute(0, 2, 3, 1).reshape(x.buffer.shape).to(self.exp.dtype)
        if self.global_context:
            outside = self.outside.flatten() if self.channels == 1 else self.outside.flatten()[:, None]
            tokens = 2 if self.channels == 1 else 1
            y += x.buffer.sum(tokens, keepdim=True, dtype=y.dtype) * outside
        return self._views(y)

    def _maps(self, x: Workspace) -> Tensor:
        # (B, h (c + 1), H, W) in channels-last memory; with one channel a head (2B, h, H, W), values before keys.
        buffer = x.buffer.flatten(0, 1) if self.channels == 1 else x.buffer
        return buffer.view(len(buffer), *self.grid, -1).permute(0, 3, 1, 2)

    def _views(self, buffer: Tensor) -> Workspace:
        if self.channels == 1:
            return Workspace(buffer, buffer[0].unsqueeze(-1), buffer[1].unsqueeze(-1))
        return Workspace(buffer, buffer[..., :-1], buffer[..., -1:])


def conv_forward(inputs: ConvInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators (AFT Eq. 6)."""
    out, den = empty_output(inputs.q, inputs.v), empty_denominator(inputs.k, inputs.v, save)
    if prefers_depthwise(inputs.k, inputs.kernel):
        depthwise = DepthwiseWeights(inputs)
        mix_forward(inputs, depthwise, out, den)
        if depthwise.reliable:
            return out, den
    for head, channel in _head_groups(inputs):
        part = inputs.part(head)
        mix_forward(part, ToeplitzWeights(part), out[..., channel], den[..., head] if save else den)
    return out, den


def conv_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: ConvInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and kernel."""
    kernel = inputs.kernel
    if prefers_depthwise(inputs.k, kernel):
        depthwise = DepthwiseWeights(inputs)
        if depthwise.keeps_digits(den, shifted_exp(inputs.k, inputs.mask).sum(1, keepdim=True)):
            dq, dk, dv = mix_backward(grad, y, den, inputs, depthwise, need_bias)
            return dq, dk, dv, depthwise.bias_grad() if need_bias else kernel.new_empty(0)
    groups = []
    for head, channel in _head_groups(inputs):
        part = inputs.part(head)
        weights, results = ToeplitzWeights(part), (grad[..., channel], y[..., channel], den[..., head])
        dqkv = mix_backward(*results, part, weights, need_bias)
        groups.append((*dqkv, weights.bias_grad() if need_bias else kernel.new_empty(0)))
    dqs, dks, dvs, dkernels = (list(parts) for parts in zip(*groups, strict=True))
    return torch.cat(dqs, -1), torch.cat(dks, -1), torch.cat(dvs, -1), torch.cat(dkernels)


def shifted_kernel(kernel: Tensor, grid: tuple[int, int], outside: Tensor) -> Tensor:
    """Expand (h, s, s) to (h, 2H - 1, 2W - 1); entry (H - 1 + dy, W - 1 + dx) is for a source at offset dy, dx.

    Args:
        kernel: one entry per offset of the window.
        grid: H, W.
        outside: (h, 1, 1), the entries of all other offsets.
    """
    # The margins of the window in the shifts; negative where it reaches beyond the grid.
    y, x = (length - 1 - kernel.shape[-1] // 2 for length in grid)
    top, left = max(y, 0), max(x, 0)
    shifts = outside.expand(-1, 2 * grid[0] - 1, 2 * grid[1] - 1).clone()
    middle = shifts[:, top : shifts.shape[1] - top, left : shifts.shape[2] - left]
    middle.copy_(F.pad(kernel, [x - left] * 2 + [y - top] * 2))
    return shifts


def unshifted_kernel(shifts: Tensor, size: int) -> Tensor:
    """Reduce (h, 2H - 1, 2W - 1) to (h, size, size); a tap beyond the grid is 0."""
    y, x = ((size - length) // 2 for length in shifts.shape[1:])
    return F.pad(shifts, [x, x, y, y])


def prefers_depthwise(k: Tensor, kernel: Tensor) -> bool:
    """Return whether the depthwise form is tried first."""
    # Measured on a CPU (docs/reference/kernels.md). An accelerator always uses the form that cannot cancel.
    tokens, heads = k.shape[1:]
    many_heads = heads > TOEPLITZ_HEADS and tokens > kernel[0].numel()
    return may_branch(k) and (many_heads or heads * tokens * tokens > TOEPLITZ_ELEMENTS)


def _head_groups(inputs: ConvInputs) -> Iterator[tuple[slice, slice]]:
    # Yield slices of heads and of their channels, so that the Toeplitz matrices of a group stay small.
    tokens, heads = inputs.k.shape[1:]
    channels = inputs.channels
    step = min(heads, max(1, TOEPLITZ_ELEMENTS // (tokens * tokens)))
    for start in range(0, heads, step):
        stop = min(start + step, heads)
        yield slice(start, stop), slice(start * channels, stop * channels)
