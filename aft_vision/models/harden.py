"""Conversion of a Gumbel-trained AFT-conv to a one-hot model: one learned offset per head (AFT Eq. 10)."""

import copy
from typing import Any

import torch
from timm.utils import unwrap_model
from torch import nn

from aft_vision.layers import AFTConv, AFTOnehot, token_mixers
from aft_vision.layers.base import flat_arguments
from aft_vision.models.aft_vit import AFTVisionTransformer


@torch.no_grad()
def harden(model: nn.Module) -> AFTVisionTransformer:
    """Build the one-hot model of one trained with gumbel=True (AFT Eq. 10).

    The kernel of each block, h * s * s + 2 h parameters, becomes h biases and an int64 buffer of h offsets. Everything
    else is copied. In evaluation the outputs equal the given model's at every resolution. Save the result with
    `timm.models.save_for_hf` and load it with `timm.create_model('local-dir:DIR', pretrained=True)`.

    Args:
        model: Not modified.

    Raises:
        ValueError: the model is not an AFT-conv trained with gumbel=True; the message says what is missing.
    """
    model = unwrap_model(model)
    wanted = 'a model trained with gumbel=True (AFT Eq. 10), which learns one offset per head'
    if not isinstance(model, AFTVisionTransformer):
        raise ValueError(f'expected {wanted}, got {type(model).__name__}, which is no AFT model')
    mixers = token_mixers(model)
    others = [mixer.name for mixer in mixers if not (isinstance(mixer, AFTConv) and mixer.gumbel)]
    if others or not mixers:
        raise ValueError(f'expected {wanted}, got one of mixer={others[0] if others else None!r} without it')
    copied: Any = copy.deepcopy(model)
    for block in copied.blocks:
        if isinstance(block.attn, AFTConv):
            block.attn = block.attn.onehot()
    # The arguments from which timm rebuilds it, without those that only AFT-conv has.
    left_out = AFTConv.arguments().keys() - AFTOnehot.arguments().keys()
    arguments = flat_arguments(getattr(model, '_model_args', {}))
    copied._model_args = {name: x for name, x in arguments.items() if name not in left_out} | {'mixer': 'onehot'}
    return copied
