"""Capture of the inputs of a model's token mixers in one forward pass."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from timm.layers import Attention
from torch import Tensor, nn

from aft_vision.layers import TokenMixer, token_mixers
from aft_vision.modes import in_evaluation


class MixerInputs(NamedTuple):
    """Queries, keys and values of one mixer.

    Attributes:
        mixer: The module.
        q: (B, T, D), before the sigmoid; None without a query.
        k: (B, T, D), or (B, T, h) for AFT-conv.
        v: (B, T, D).
        grid: (H, W) of the tokens after the prefix.
        num_prefix_tokens: Number of class and register tokens, T - H * W.
        layer: Index of its block, as in `mixer_layers`.
    """

    mixer: TokenMixer
    q: Tensor | None
    k: Tensor
    v: Tensor
    grid: tuple[int, int]
    num_prefix_tokens: int
    layer: int = 0


def capture_mixers(model: nn.Module, images: Tensor) -> tuple[Tensor, list[MixerInputs]]:
    """Run a model once, in evaluation mode and without gradients, and return the inputs of its mixers with keys.

    Args:
        model: Any `AFTVisionTransformer`, also a fused one.
        images: (B, 3, H, W), normalised, of a size that the model supports.

    Returns:
        The model's output, and one entry per mixer with keys, in order.

    Raises:
        ValueError: the model has no such mixer.
    """
    captured, layers = [], keyed_layers(model)

    def keep(mixer: Any, x: Tensor, grid: tuple[int, int], prefix: int) -> None:
        q, k, v = mixer.project_qkv(x)
        captured.append(MixerInputs(mixer, q, k, v, grid, prefix, layers[mixer]))

    return run_with_hooks(model, images, layers, keep), captured


@torch.no_grad()
def run_with_hooks(
    model: nn.Module,
    images: Tensor,
    mixers: Iterable[nn.Module],
    callback: Callable[[Any, Tensor, tuple[int, int], int], None],
) -> Tensor:
    """Run a model once in evaluation mode, with a callback before each of these token mixers.

    Args:
        callback: Called with the mixer, its tokens (B, T, C), their grid (H, W) and the number of prefix tokens.

    Returns:
        The model's output.

    Raises:
        ValueError: the tokens of the model are not a prefix and a grid.
    """
    grid = token_grid(model, (images.shape[2], images.shape[3]))

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        prefix = args[0].shape[1] - grid[0] * grid[1]
        if prefix != getattr(model, 'num_prefix_tokens', 0):
            raise ValueError(f'expected a token for each place of the grid {grid}, got {args[0].shape[1]} tokens')
        callback(module, args[0], grid, prefix)

    handles = [mixer.register_forward_pre_hook(hook) for mixer in mixers]
    try:
        with in_evaluation(model):
            return model(images)
    finally:
        for handle in handles:
            handle.remove()


def token_grid(model: nn.Module, size: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns of tokens of images of size (H, W) in pixels.

    Raises:
        ValueError: the model has no single grid of tokens.
    """
    if not has_token_grid(model):
        raise ValueError(f"expected a model with timm's patch_embed, got {type(model).__name__}")
    patch_embed: Any = model.patch_embed
    return patch_embed.dynamic_feat_size(size)


def has_token_grid(model: nn.Module) -> bool:
    """Return whether a model has a single grid of tokens."""
    return hasattr(getattr(model, 'patch_embed', None), 'dynamic_feat_size')


def has_keys(model: nn.Module) -> bool:
    """Return whether the keys and the attention of mixers of a model can be drawn."""
    return has_token_grid(model) and any(mixer.key_dim for mixer in token_mixers(model))


def mixer_layers(model: nn.Module) -> dict[TokenMixer, int]:
    """Return the mixers of a model with the indices of their blocks; those with softmax attention count too."""
    return {mixer: layer for mixer, layer in _all_layers(model).items() if not isinstance(mixer, Attention)}


def keyed_layers(model: nn.Module, attention: bool = False) -> dict[Any, int]:
    """Return the mixers with keys, which pictures of keys and attention can show, with the indices of their blocks.

    Args:
        attention: Return timm's attention too.

    Raises:
        ValueError: there is none.
    """
    layers = _all_layers(model).items()
    found = {each: layer for each, layer in layers if (attention if isinstance(each, Attention) else each.key_dim)}
    if not found:
        names = 'timm.layers.Attention or AFTMixer' if attention else 'AFTMixer'
        raise ValueError(f'expected a model with token mixers of {names}, got {type(model).__name__}, which has none')
    return found


def _all_layers(model: nn.Module) -> dict[Any, int]:
    mixers = [module for module in model.modules() if isinstance(module, Attention | TokenMixer)]
    return {mixer: layer for layer, mixer in enumerate(mixers)}
