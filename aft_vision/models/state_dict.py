"""Loading of state dicts, and resampling of position parameters to another grid."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models._input import get_pretrained_grid_size
from torch import Tensor, nn

from aft_vision.errors import shorten
from aft_vision.ops.common.numerics import accumulate_dtype


class StateDictError(ValueError, RuntimeError):
    """A state dict that is not of a ViT. It is also a RuntimeError, which torch raises for another architecture."""


def load_matching_state_dict(model: nn.Module, state_dict: Mapping[str, Any], source: str | Path) -> None:
    """Load weights that must match exactly.

    Raises:
        ValueError: names or shapes differ.
    """
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as error:
        raise ValueError(f'{source}: {shorten(str(error), 500)}') from error


def find_grid(model: Any, patches: Tensor | None, num_tokens: int) -> tuple[int, int] | None:
    """Find the token grid (H, W) of a checkpoint.

    Args:
        model: The model to load into; its `pretrained_cfg` may have the checkpoint's `input_size`.
        patches: The checkpoint's patch embedding, (C, channels, height, width) in pixels.
        num_tokens: Tokens of the grid.

    Returns:
        The grid of `pretrained_cfg` if it fits, else the model's grid if it fits, else a square, else None.
    """
    stated = get_pretrained_grid_size(model, patches, num_tokens)
    height, width = stated or model.patch_embed.grid_size
    side = math.isqrt(num_tokens)
    if height * width == num_tokens:
        return height, width
    return (side, side) if side * side == num_tokens else None


def describes_weights(model: Any) -> bool:
    """Return whether the `input_size` of a model's `pretrained_cfg` came with weights, and is not only a default."""
    cfg = getattr(model, 'pretrained_cfg', {})
    name = '.'.join(filter(None, (cfg.get('architecture'), cfg.get('tag'))))
    registered = timm.get_pretrained_cfg(name) if timm.is_model(cfg.get('architecture') or '') else None
    if cfg.get('source') in ('hf-hub', 'local-dir') or registered is None:
        return bool(cfg.get('source'))
    own_file = cfg.get('file') is not None and cfg.get('file') == registered.file
    return own_file or cfg.get('input_size') != registered.input_size


def resample_rows(
    x: Tensor, model: Any, patches: Tensor | None, prefix: int, grid: tuple[int, int] | None = None
) -> Tensor:
    """Resample rows (T, n), one per token of a checkpoint, to the model's grid.

    Args:
        x: The rows of `prefix` tokens, which are kept, then the rows of the grid.
        model: As in `find_grid`.
        patches: As in `find_grid`.
        prefix: Tokens before the grid.
        grid: (H, W) of the checkpoint if it is known; else the model's own if it fits and nothing is said of the
            weights, else what `find_grid` returns.

    Raises:
        ValueError: the grid of the checkpoint is unknown.
    """
    tokens, own = x.shape[0] - prefix, tuple(model.patch_embed.grid_size)
    if grid is None or grid[0] * grid[1] != tokens:
        is_own = own[0] * own[1] == tokens and not describes_weights(model)
        grid = own if is_own else find_grid(model, patches, tokens)
    if grid is None:
        raise unknown_grid(tokens)
    return resample_grid(x, model, grid, prefix)


def resample_grid(x: Tensor, model: Any, grid: tuple[int, int], prefix: int = 0) -> Tensor:
    """Resample rows (T, n) from a grid (H, W) to the model's grid, bicubically; the first `prefix` rows are kept."""
    own = list(model.patch_embed.grid_size)
    if own == list(grid):
        return x
    # timm rounds the result to the type of x, which a file may have in half precision.
    return resample_abs_pos_embed(x.to(accumulate_dtype(x)).unsqueeze(0), own, list(grid), prefix).squeeze(0)


def resample_patches(weight: Tensor, size: list[int]) -> Tensor:
    """Resample the weight of a patch embedding, (C, channels, H, W), to another patch size."""
    return resample_patch_embed(weight.to(accumulate_dtype(weight)), size)


def unknown_grid(num_tokens: int) -> ValueError:
    """Build the error for a grid that `find_grid` cannot find."""
    return ValueError(
        f"the checkpoint's {num_tokens} positions are no square grid; give its size by "
        'pretrained_cfg_overlay=dict(input_size=(3, H, W))'
    )
