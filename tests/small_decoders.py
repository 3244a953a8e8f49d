"""Small autoregressive models of every mixer, and tokens for them."""

from typing import Any

import torch
from helpers import generator
from torch import Tensor, nn

from aft_vision.models import AFTDecoder

MIXERS: dict[str, dict[str, Any]] = {
    'local': dict(window=5, bias_dim=4),
    'local, not factorised': dict(window=5, factorize_bias=False),
    'simple': {},
    'full': dict(bias_dim=4),
    'attention': dict(num_heads=2),
}
NAMES = list(MIXERS)
# All but the ablation, which decodes as the factorised form does.
FORMS = ['local', 'simple', 'full', 'attention']


def create(name: str = 'local', context: int = 24, seed: int = 0, **kwargs: Any) -> AFTDecoder:
    """A small model in float64, with weights large enough to tell its parts from one another."""
    args = dict(dim=8, depth=2, vocab_size=11, mixer=name.partition(',')[0], dtype=torch.float64)
    return randomize(AFTDecoder(context, **(args | MIXERS[name] | kwargs)), seed)


def randomize(model: Any, seed: int = 0) -> Any:
    random = generator(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=random)
    return model.eval()


def draw_tokens(batch: int = 2, length: int = 24, vocab_size: int = 11) -> Tensor:
    return torch.randint(vocab_size, (batch, length), generator=generator(1))
