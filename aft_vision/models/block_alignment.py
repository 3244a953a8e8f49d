"""Alignment of the blocks of an AFT model with the blocks of a pretrained ViT, whose inputs and outputs they learn.

Each block gets what the ViT's block gets, so that all blocks learn side by side, from images without labels.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = re.compile(r'blocks\.(\d+)\.')


def pair_models(model: nn.Module, vit: nn.Module) -> list[range]:
    """Pair the blocks of a model with the blocks of a ViT, by `pair_blocks`.

    Raises:
        ValueError: one of them is not a vision transformer, or the ViT has fewer blocks or other patches.
    """
    models: tuple[Any, Any] = model, vit
    blocks: list[Any] = [getattr(each, 'blocks', None) for each in models]
    for each, own, role in zip(models, blocks, ('model', 'teacher'), strict=True):
        if own is None or not hasattr(each, 'num_prefix_tokens') or not hasattr(each, 'patch_embed'):
            raise ValueError(f'expected a vision transformer as the {role}, got a {type(each).__name__}')
    sizes = [tuple(each.patch_embed.patch_size) for each in models]
    if sizes[0] != sizes[1]:
        raise ValueError(f'expected a teacher with the patch size of the model, {sizes[0]}, got {sizes[1]}')
    return pair_blocks(*map(len, blocks))


def pair_blocks(depth: int, teacher_depth: int) -> list[range]:
    """Pair each block of a model with the neighbouring blocks of a ViT that it replaces: one, or more of a deeper ViT.

    Args:
        depth: blocks of the model.
        teacher_depth: blocks of the ViT.

    Raises:
        ValueError: the ViT has fewer blocks.
    """
    if teacher_depth < depth:
        raise ValueError(f'expected a teacher of at least the {depth} blocks of the model, got {teacher_depth}')
    ends = [round(index * teacher_depth / depth) for index in range(depth + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]


def select_blocks(state_dict: Mapping[str, Tensor], pairs: Sequence[range]) -> dict[str, Tensor]:
    """Return the state dict of a ViT with one block for each pair: the last one of its blocks."""
    new_index = {blocks[-1]: index for index, blocks in enumerate(pairs)}
    selected = {}
    for name, value in state_dict.items():
        match = BLOCK.match(name)
        if match is None:
            selected[name] = value
        elif int(match[1]) in new_index:
            selected[f'blocks.{new_index[int(match[1])]}.{name[match.end() :]}'] = value
    return selected


@torch.no_grad()
def block_tokens(vit: nn.Module, images: Tensor) -> list[Tensor]:
    """Return the tokens of a ViT before its first block and after each, (B, T, C), prefix tokens first."""
    model: Any = vit
    tokens: list[Tensor] = []
    hooks = [model.blocks[0].register_forward_pre_hook(lambda block, inputs: tokens.append(inputs[0]))]
    hooks += [
        block.register_forward_hook(lambda block, inputs, output: tokens.append(output)) for block in model.blocks
    ]
    try:
        model.forward_features(images)
    finally:
        for hook in hooks:
            hook.remove()
    return tokens


def block_errors(model: nn.Module, tokens: Sequence[Tensor], pairs: Sequence[range], grid: tuple[int, int]) -> Tensor:
    """Compute the mean squared error of each block's output, relative to the mean square of what the ViT's blocks add.

    Args:
        model: an AFTVisionTransformer.
        tokens: from `block_tokens`, of as many images and of the same grid of patches.
        pairs: from `pair_blocks`.
        grid: (H, W) of the patches.

    Returns:
        (blocks,); 0 for equal outputs, 1 for a block that changes nothing.

    Raises:
        ValueError: the ViT has other tokens than the model, besides prefix tokens that only the ViT has.
    """
    own: Any = model
    errors = []
    for block, blocks in zip(own.blocks, pairs, strict=True):
        x, wanted = (_own_tokens(tokens[boundary], own, grid) for boundary in (blocks.start, blocks.stop))
        y = block(x, grid if own.passes_grid else None)
        scale = (wanted - x).float().square().mean().clamp_min(torch.finfo(torch.float32).tiny)
        errors.append((y - wanted).float().square().mean() / scale)
    return torch.stack(errors)


def _own_tokens(tokens: Tensor, model: Any, grid: tuple[int, int]) -> Tensor:
    # The tokens that the model has too: a mixer of a grid has no class token.
    count = grid[0] * grid[1] + model.num_prefix_tokens
    surplus = tokens.shape[1] - count
    if surplus < 0 or (surplus and model.num_prefix_tokens):
        raise ValueError(
            f'expected a teacher with the {count} tokens of the model, {grid[0]} x {grid[1]} of them patches, got '
            f'{tokens.shape[1]}: patch size and prefix tokens must be those of the model, which may lack the latter'
        )
    return tokens[:, surplus:]
