"""The token mixer that a Gumbel-trained AFT-conv becomes (AFT Eq. 10)."""

from typing import Any

import torch
from torch import Tensor, nn

from aft_vision import ops
from aft_vision.layers.base import GridMixer
from aft_vision.layers.position_bias import check_kernel_size


class AFTOnehot(GridMixer):
    """AFT-conv with one biased offset per head: a global sum and one token of the grid (AFT Eq. 10).

    `aft_vision.models.harden` builds it from a trained AFT-conv. `weight` (h,), the bias w at the offset, is a
    parameter. `offset` (h, 2) int64, (dy, dx) in tokens from target to source, is a buffer. Both start at zero, which
    makes the mixer an AFT-simple with one key per head.

    Args:
        dim: channels C.
        num_heads: h, which divides dim; keys have one channel per head. None means one head per channel.
        kernel_size: s of the original AFT-conv, in tokens, odd; the size of `kernel()`, without effect on the output.
        kwargs: of `GridMixer`.
    """

    offset: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        kernel_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        if kernel_size is not None:
            check_kernel_size(kernel_size)
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        self.kernel_size, num_heads = kernel_size, self.split_sizes[-2]
        self.weight = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.register_buffer('offset', torch.empty(num_heads, 2, device=device, dtype=torch.int64))
        self.reset_parameters()

    def init_weights(self) -> None:
        super().init_weights()
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.offset)

    @torch.jit.ignore
    def kernel(self) -> Tensor:
        """Return the position bias as a kernel (h, s, s), zero except at the offsets; s grows to include them all."""
        radius = max(int(self.offset.abs().max()), (self.kernel_size or 1) // 2)
        heads, size = len(self.weight), 2 * radius + 1
        place = (self.offset[:, :1] + radius) * size + self.offset[:, 1:] + radius
        flat = self.weight.new_zeros(heads, size * size).scatter(1, place, self.weight[:, None])
        return flat.view(heads, size, size)

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        if grid is None:
            raise ValueError('AFTOnehot needs the token grid (H, W), got None')
        q, k, v = self._project(x)
        y = ops.aft_onehot(q, k, v, self.offset, self.weight, grid, mask, self._backend())
        return self._output(y, v, grid, mask)
