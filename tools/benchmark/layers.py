"""Layers of AFT against multi-head attention, projections included."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from timm.layers import Attention
from timm.utils import reparameterize_model
from torch import Tensor, nn

from aft_vision.layers import AFTConv, AFTFull, AFTSimple, CausalAttention, CausalLocal, CausalSimple
from tools.benchmark.compare import PAPER_BASELINE, Candidate, Prepared, compare, materialised
from tools.benchmark.operations import KERNEL_SIZE


class LayerGroup(NamedTuple):
    """Layers that take tokens of one shape.

    Args:
        layers: What makes each, by the name that is shown; the first is attention, which is compared to.
        shape: (B, T, C).
        grid: (H, W), which AFT-conv is given.
    """

    layers: dict[str, Callable[[], nn.Module]]
    shape: tuple[int, int, int]
    grid: tuple[int, int] | None = None


def make_layer_groups(
    batch_size: int | None = None, dim: int = 384, grid: tuple[int, int] = (14, 14), tokens: int = 3072
) -> list[LayerGroup]:
    """The layers that are compared: on a grid, and causal.

    Args:
        batch_size: B of both; None is 8 and 2.
        dim: C; two thirds of it in the causal group.
        tokens: T of the causal group.
    """
    area, few, narrow = grid[0] * grid[1], dim // 24, dim * 2 // 3
    window = min(256, tokens)
    planar: dict[str, Callable[[], nn.Module]] = {
        'attention': lambda: Attention(dim, dim // 64, qkv_bias=True),
        'AFT-full': lambda: AFTFull(dim, num_tokens=area),
        f'AFT-conv, h={few}': lambda: AFTConv(dim, num_heads=few, kernel_size=KERNEL_SIZE),
        f'AFT-conv, h=d={dim}': lambda: AFTConv(dim, num_heads=dim, kernel_size=KERNEL_SIZE),
        'AFT-simple': lambda: AFTSimple(dim),
    }
    causal: dict[str, Callable[[], nn.Module]] = {
        'causal attention': lambda: CausalAttention(narrow, tokens, 2),
        f'AFT-local causal, s={window}': lambda: CausalLocal(narrow, tokens, window, bias_dim=64),
        'AFT-simple causal': lambda: CausalSimple(narrow),
    }
    return [
        LayerGroup(planar, (batch_size or 8, area, dim), grid),
        LayerGroup(causal, (batch_size or 2, tokens, narrow)),
    ]


def measure_layers(
    groups: Sequence[LayerGroup],
    device: torch.device,
    dtype: str,
    rounds: int,
    compiled: bool = False,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Compare the layers of each group with attention: the forward of a fused layer, and a training step.

    Args:
        dtype: Key of PRECISIONS.

    Returns:
        The rows of `compare` with the `shape` (B, T, C) of the group. Gradients are those of the tokens and weights.
    """
    rows: list[dict[str, Any]] = []
    for group in groups:
        first, *others = group.layers
        candidates = [
            layer_candidate(group, first, device),
            layer_candidate(group, first, device, written_out=True),
            *(layer_candidate(group, name, device) for name in others),
        ]
        found = compare(candidates, device, rounds, dtype=dtype, compiled=compiled, progress=progress)
        rows += [{'shape': group.shape, **row} for row in found]
    return rows


def layer_candidate(group: LayerGroup, name: str, device: torch.device, written_out: bool = False) -> Candidate:
    """A layer of a group.

    Args:
        written_out: Attention forms its weights.
    """

    def prepare(training: bool) -> Prepared:
        layer = group.layers[name]().to(device).train(training)
        x = torch.randn(group.shape, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_(training)
        if not training:
            layer = reparameterize_model(layer, inplace=True)
        rest = (group.grid,) if isinstance(layer, AFTConv) else ()

        def forward() -> Tensor:
            return layer(x, *rest)

        return Prepared(materialised(forward) if written_out else forward, [x, *layer.parameters()])

    return Candidate(f'{name}, math, {PAPER_BASELINE}' if written_out else name, prepare, compiles=not written_out)
