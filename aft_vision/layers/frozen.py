"""Token mixers with constant position weights, for files that other runtimes load.

Eq. 8 and the exponentials of the bias are computed once, in float64, and stored as constants. AFT-axial stores its
biases, whose exponentials depend on the grid.
"""

import torch
from torch import Tensor, nn

from aft_vision.layers.mixers import AFTAxial, AFTConv, AFTFull, AFTLocal, AFTMixer, tokens_to_maps
from aft_vision.layers.position_bias import resample_axis
from aft_vision.ops import aten

FORMS = ('conv', 'matmul')


class FrozenMixer(nn.Module):
    """A mixer's projections around an aten form with constant position weights.

    Args:
        mixer: the mixer whose projections are shared.
    """

    def __init__(self, mixer: AFTMixer) -> None:
        super().__init__()
        self.split_sizes, self.qkv, self.proj = mixer.split_sizes, mixer.qkv, mixer.proj
        self.local_conv = getattr(mixer, 'local_conv', None)

    def _keep(self, name: str, weights: Tensor) -> None:
        dtype = torch.float64 if self.qkv.weight.dtype == torch.float64 else torch.float32
        self.register_buffer(name, weights.to(dtype).contiguous())

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        parts = self.qkv(x).split(self.split_sizes, dim=-1)
        q, v = parts[0] if len(parts) == 3 else None, parts[-1]
        y = self.mix(q, parts[-2], v, grid, mask)
        if self.local_conv is not None:
            assert grid is not None
            y = y + self.local_conv(tokens_to_maps(v, grid, mask)).flatten(2).transpose(1, 2)
        return self.proj(y)

    def mix(self, q: Tensor | None, k: Tensor, v: Tensor, grid: tuple[int, int] | None, mask: Tensor | None) -> Tensor:
        """Return the result of the operation between the projections, (B, T, C)."""
        raise TypeError(f'{type(self).__name__} must define mix()')


class FrozenConv(FrozenMixer):
    """AFT-conv as a global sum plus a depthwise convolution, for any grid (AFT Eq. 6)."""

    taps: Tensor
    outside: Tensor

    def __init__(self, mixer: AFTConv) -> None:
        super().__init__(mixer)
        taps, outside = aten.conv_taps(_kernel(mixer), mixer.global_context)
        self._keep('taps', taps)
        self._keep('outside', outside)

    def mix(self, q: Tensor | None, k: Tensor, v: Tensor, grid: tuple[int, int] | None, mask: Tensor | None) -> Tensor:
        assert grid is not None
        return aten.mix_conv(q, k, v, self.taps, self.outside, grid, mask)


class FrozenMatmul(FrozenMixer):
    """AFT-conv as one product with a (T, T) matrix per head, for one grid (AFT Eq. 6)."""

    matrix: Tensor

    def __init__(self, mixer: AFTConv, grid: tuple[int, int]) -> None:
        super().__init__(mixer)
        self._keep('matrix', aten.conv_matrix(_kernel(mixer), grid, mixer.global_context))

    def mix(self, q: Tensor | None, k: Tensor, v: Tensor, grid: tuple[int, int] | None, mask: Tensor | None) -> Tensor:
        return aten.mix_matmul(q, k, v, self.matrix, mask)


class FrozenAxial(FrozenMixer):
    """AFT-axial as one product along columns and one along rows, for every grid."""

    rows: Tensor
    columns: Tensor

    def __init__(self, mixer: AFTAxial) -> None:
        super().__init__(mixer)
        self.resample = mixer.row_bias.resample
        self._keep('rows', mixer.row_bias.double().compute())
        self._keep('columns', mixer.column_bias.double().compute())

    def mix(self, q: Tensor | None, k: Tensor, v: Tensor, grid: tuple[int, int] | None, mask: Tensor | None) -> Tensor:
        assert grid is not None
        rows, columns = self.rows, self.columns
        if self.resample:
            rows, columns = resample_axis(rows, grid[0]), resample_axis(columns, grid[1])
        return aten.aft_axial(q, k, v, rows, columns, grid, mask)


class FrozenFull(FrozenMixer):
    """AFT-full or AFT-local as a product with one (T, T) matrix (AFT Eq. 2, AFT Eq. 4)."""

    weights: Tensor

    def __init__(self, mixer: AFTFull | AFTLocal, grid: tuple[int, int] | None) -> None:
        super().__init__(mixer)
        bias = mixer.position_bias.double()(grid)
        self._keep('weights', aten.full_weights(aten.unbanded(bias) if isinstance(mixer, AFTLocal) else bias))

    def mix(self, q: Tensor | None, k: Tensor, v: Tensor, grid: tuple[int, int] | None, mask: Tensor | None) -> Tensor:
        return aten.mix_full(q, k, v, self.weights, mask)


@torch.no_grad()
def freeze(mixer: AFTMixer, grid: tuple[int, int] | None, form: str = 'conv') -> nn.Module:
    """Build the exportable form of a mixer for evaluation, with constant position weights.

    Do not use the mixer afterwards: its projections are shared, and its position bias is converted to float64.

    Args:
        grid: (H, W) in tokens, for the forms that depend on it; None means the mixer's own grid, if it has one.
        form: for AFT-conv, 'conv' for any grid or 'matmul' for this grid.

    Raises:
        ValueError: the form is unknown, the mixer is causal, or 'matmul' has no grid.
    """
    if form not in FORMS:
        raise ValueError(f'form must be one of {", ".join(FORMS)}, got {form!r}')
    if getattr(mixer, 'causal', False):
        raise ValueError(f'expected a mixer over an image, got a causal {type(mixer).__name__}, which has no aten form')
    if isinstance(mixer, AFTConv):
        if form == 'conv':
            return FrozenConv(mixer)
        if grid is None:
            raise ValueError("form='matmul' needs the token grid (H, W), got None")
        return FrozenMatmul(mixer, grid)
    if isinstance(mixer, AFTAxial):
        return FrozenAxial(mixer)
    if isinstance(mixer, AFTFull | AFTLocal):
        return FrozenFull(mixer, grid)
    # AFT-simple has no position weights.
    mixer.exportable = True
    return mixer


def _kernel(mixer: AFTConv) -> Tensor:
    mixer.kernel.double()
    return mixer.evaluated_kernel()
