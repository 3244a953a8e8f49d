"""Check of state dicts, and resampling of position parameters to another grid."""

import math
from collections.abc import Mapping
from typing import Any

from timm.layers import resample_abs_pos_embed
from timm.models._input import get_pretrained_grid_size
from torch import Tensor, nn


class StateDictError(ValueError, RuntimeError):
    """A state dict of another architecture. It is also a RuntimeError, which torch raises for it."""


def check_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Check that a state dict fits a model exactly.

    Raises:
        StateDictError: names or shapes differ; the message lists the first differing keys of each kind.
    """
    own = model.state_dict()
    missing = [name for name in own if name not in state_dict]
    unexpected = [name for name in state_dict if name not in own]
    shapes = [
        f'{name} {tuple(x.shape)} got {tuple(state_dict[name].shape)}'
        for name, x in own.items()
        if name in state_dict and state_dict[name].shape != x.shape
    ]
    differences = [
        f'{len(names)} {kind}: {", ".join(names[:3])}{", ..." if len(names) > 3 else ""}'
        for kind, names in (('missing', missing), ('unexpected', unexpected), ('of another shape', shapes))
        if names
    ]
    if differences:
        raise StateDictError(
            f'expected weights of {type(model).__name__}, got those of another architecture: {"; ".join(differences)}'
        )


def find_grid(model: Any, patches: Tensor | None, num_tokens: int) -> tuple[int, int] | None:
    """Find the token grid (H, W) of a checkpoint.

    Args:
        model: The model to load into; its `pretrained_cfg` may have the checkpoint's `input_size`.
        patches: The checkpoint's patch embedding, (C, channels, height, width) in pixels.
        num_tokens: Tokens of the grid.

    Returns:
        The first of these that has as many tokens: the grid of `pretrained_cfg` if that describes weights, the model's,
        that of any other `pretrained_cfg`, a square; else None.
    """
    height, width = model.patch_embed.grid_size
    told = get_pretrained_grid_size(model, patches, num_tokens)
    cfg = getattr(model, 'pretrained_cfg', {})
    described = any(cfg.get(key) for key in ('file', 'url', 'hf_hub_id'))
    if height * width == num_tokens and not (described and told):
        return height, width
    side = math.isqrt(num_tokens)
    return told or ((side, side) if side * side == num_tokens else None)


def resample_rows(
    x: Tensor, model: Any, patches: Tensor | None, prefix: int, grid: tuple[int, int] | None = None
) -> Tensor:
    """Resample rows (T, n), one per token of a checkpoint, to the model's grid.

    Args:
        x: The rows of `prefix` tokens, which are kept, then those of the grid.
        model: As in `find_grid`.
        patches: As in `find_grid`.
        prefix: Tokens before the grid.
        grid: (H, W) of the checkpoint if it is known; else that of `find_grid`.

    Raises:
        ValueError: the grid of the checkpoint is unknown.
    """
    tokens = x.shape[0] - prefix
    if grid is None or grid[0] * grid[1] != tokens:
        grid = find_grid(model, patches, tokens)
    if grid is None:
        raise unknown_grid(tokens)
    return resample_grid(x, model, grid, prefix)


def resample_grid(x: Tensor, model: Any, grid: tuple[int, int], prefix: int = 0) -> Tensor:
    """Resample rows (T, n) from a grid (H, W) to the model's grid, bicubically; the first `prefix` rows are kept."""
    return resample_abs_pos_embed(x.unsqueeze(0), list(model.patch_embed.grid_size), list(grid), prefix).squeeze(0)


def unknown_grid(num_tokens: int) -> ValueError:
    """Build the error for a grid that `find_grid` cannot find."""
    return ValueError(
        f"the checkpoint's {num_tokens} positions are no square grid; give its size by "
        'pretrained_cfg_overlay=dict(input_size=(3, H, W))'
    )
