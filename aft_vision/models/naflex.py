"""Batches of timm's NaFlex loader, in which every image keeps its own size and shape."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The most tokens of a padded grid for each patch of its images. Fewer on a CPU, where an image alone costs as much as
# one among others; other devices want large batches.
MAX_TOKEN_RATIO_CPU, MAX_TOKEN_RATIO = 1.1, 1.5


class Patches(NamedTuple):
    """The patches of B images, padded to N.

    Attributes:
        values: (B, N, height * width * channels), in the order (height, width, channels).
        coord: (B, N, 2) int64, (row, column) in the image's own grid.
        valid: (B, N) bool, False for padding.
    """

    values: Tensor
    coord: Tensor
    valid: Tensor


def read_patches(batch: Mapping[str, Any], patch_size: tuple[int, int], channels: int) -> Patches:
    """Return the patches of a dict of timm's NaFlex collator.

    Args:
        batch: `patches` (B, N, height * width * channels) or (B, N, height, width, channels), `patch_coord` and
            `patch_valid`.
        patch_size: (height, width) in pixels, of the model.

    Raises:
        ValueError: an entry is missing or has another shape, such as patches of another size.
    """
    missing = [name for name in ('patches', 'patch_coord', 'patch_valid') if batch.get(name) is None]
    if missing:
        raise ValueError(f'a batch of patches must have patches, patch_coord and patch_valid, got no {missing[0]}')
    values, coord, valid = batch['patches'], batch['patch_coord'], batch['patch_valid']
    height, width = patch_size
    shape, size = list(values.shape), [height, width, channels]
    if shape[2:] != size and shape[2:] != [height * width * channels]:
        raise ValueError(
            f'patches must have shape (B, N, {height * width * channels}), {height} x {width} pixels of {channels} '
            f'channels, got {shape}: give the patch size of the model to the loader'
        )
    if coord.shape != (*shape[:2], 2) or valid.shape != values.shape[:2] or valid.dtype != torch.bool:
        raise ValueError(
            f'patch_coord and a bool patch_valid must have shapes {[*shape[:2], 2]} and {shape[:2]}, got '
            f'{list(coord.shape)} and {list(valid.shape)} of {valid.dtype}'
        )
    return Patches(values.flatten(2), coord, valid)


def compute_on_patches(
    compute: Callable[[Tensor, Tensor | None], list[Tensor]],
    patches: Patches,
    patch_size: tuple[int, int],
    pads: bool,
) -> list[Tensor]:
    """Compute tokens of patches by a function of whole images.

    Args:
        compute: takes images (b, C, H, W) and a mask (b, H / height, W / width) or None, and returns lists of tokens
            (b, P + T, D) with P prefix tokens.
        pads: pad images of similar grids to one, for models that are exact with a mask at any size. Otherwise only
            images of the same grid are computed together.

    Returns:
        Tokens (B, P + N, D) in the order of the patches, 0 where they are padding.
    """
    # (B, 2); an image without patches has one token, which does not count.
    grids = torch.where(patches.valid.unsqueeze(-1), patches.coord + 1, 1).amax(1).tolist()
    max_ratio = MAX_TOKEN_RATIO_CPU if patches.values.is_cpu else MAX_TOKEN_RATIO
    # A batch without images is one group.
    parts, groups = [], _group(grids, max_ratio if pads else 1.0) or [[]]
    for members in groups:
        rows, columns = (max((grids[index][axis] for index in members), default=1) for axis in (0, 1))
        parts.append(_compute_group(compute, Patches(*(x[members] for x in patches)), patch_size, (rows, columns)))
    order = torch.tensor([index for members in groups for index in members], device=patches.coord.device)
    return [torch.cat(tokens)[order.argsort()] for tokens in zip(*parts, strict=True)]


def _group(grids: list[list[int]], max_ratio: float) -> list[list[int]]:
    # Indices of images that share a grid, which has at most `max_ratio` for each of theirs.
    groups: list[list[int]] = []
    rows = columns = tokens = 0
    for index in sorted(range(len(grids)), key=lambda index: grids[index]):
        height, width = grids[index]
        rows, columns, tokens = max(rows, height), max(columns, width), tokens + height * width
        if not groups or rows * columns * (len(groups[-1]) + 1) > max_ratio * tokens:
            groups.append([])
            rows, columns, tokens = height, width, height * width
        groups[-1].append(index)
    return groups


def _compute_group(
    compute: Callable[[Tensor, Tensor | None], list[Tensor]],
    patches: Patches,
    patch_size: tuple[int, int],
    grid: tuple[int, int],
) -> list[Tensor]:
    values, coord, valid = patches
    (rows, columns), (height, width), count = grid, patch_size, len(values)
    # Padding is written to and read from a token after the last one.
    index = torch.where(valid, coord[..., 0] * columns + coord[..., 1], rows * columns)  # (b, N)
    expanded = index.unsqueeze(-1)
    pixels = values.new_zeros(count, rows * columns + 1, values.shape[2])
    pixels = pixels.scatter(1, expanded.expand_as(values), values)[:, :-1]
    channels = values.shape[2] // (height * width)
    pixels = pixels.view(count, rows, columns, height, width, channels)
    images = pixels.permute(0, 5, 1, 3, 2, 4).reshape(count, channels, rows * height, columns * width)
    mask = valid.new_zeros(count, rows * columns + 1).scatter(1, index, valid)[:, :-1]
    outputs = compute(images, None if bool(mask.all()) else mask.view(count, rows, columns))
    return [_gather(tokens, index, tokens.shape[1] - rows * columns) for tokens in outputs]


def _gather(tokens: Tensor, index: Tensor, prefix: int) -> Tensor:
    # (b, P + T, D) -> (b, P + N, D)
    padding = tokens.new_zeros(len(tokens), 1, tokens.shape[2])
    spatial = torch.cat([tokens[:, prefix:], padding], dim=1)
    taken = spatial.gather(1, index.unsqueeze(-1).expand(-1, -1, tokens.shape[2]))
    return torch.cat([tokens[:, :prefix], taken], dim=1)
