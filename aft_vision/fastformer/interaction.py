"""Interactions of a global vector with the token vectors, head by head (Fastformer Eq. 5, Fastformer Fig. 3).

Given the global vector g, each interaction is affine in the token's vector t, and so is t in the token's hidden state.
`FastformerAttention` uses this to move the interaction from the tokens to the weights, so that only the last vector of
a token is computed. So an interaction has three methods. B batch, h heads, d channels of a head, C hidden size.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from .config import FastformerConfig
from .initialization import draw_weights


class Interaction(nn.Module, ABC):
    """Base of the three interactions."""

    @abstractmethod
    def forward(self, g: Tensor, t: Tensor) -> Tensor:
        """Compute the interaction; g and t (..., h, d) broadcast."""

    @abstractmethod
    def pull_back(self, weight: Tensor, g: Tensor) -> Tensor:
        """Return the vector whose product with t is weight's product with the interaction, up to terms without t.

        Args:
            weight: (..., h, d)
            g: (..., h, d), broadcast with weight.
        """

    @abstractmethod
    def compose(self, g: Tensor, weight: Tensor) -> Tensor:
        """Return the linear part of the interaction with t = weight @ x.

        Args:
            g: (B, h, d)
            weight: (h, d, C)

        Returns:
            (B, h, d, C), or (1, h, d, C) where it does not depend on g.
        """


class Multiply(Interaction):
    """The interaction g * t, channel by channel: the paper's choice."""

    def forward(self, g: Tensor, t: Tensor) -> Tensor:
        return g * t

    def pull_back(self, weight: Tensor, g: Tensor) -> Tensor:
        return weight * g

    def compose(self, g: Tensor, weight: Tensor) -> Tensor:
        return g[..., None] * weight


class Add(Interaction):
    """The interaction g + t."""

    def forward(self, g: Tensor, t: Tensor) -> Tensor:
        return g + t

    def pull_back(self, weight: Tensor, g: Tensor) -> Tensor:
        return weight.expand(torch.broadcast_shapes(weight.shape, g.shape))

    def compose(self, g: Tensor, weight: Tensor) -> Tensor:
        return weight[None]


class Concat(Interaction):
    """The interaction W [g; t], with one matrix (d, 2d) per head, which the paper omits but the widths require."""

    def __init__(self, config: FastformerConfig) -> None:
        super().__init__()
        heads = 1 if config.share_heads else config.num_attention_heads
        width = config.hidden_size // config.num_attention_heads
        self.num_heads = config.num_attention_heads
        self.std = config.initializer_range
        self.weight = nn.Parameter(torch.empty(heads, width, 2 * width))  # (h, d, [g; t])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        width = self.weight.shape[1]
        draw_weights(self.weight, self.std, 2 * width, width)

    def _halves(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        weight = self.weight.to(dtype).expand(self.num_heads, -1, -1)
        return weight[..., : weight.shape[1]], weight[..., weight.shape[1] :]

    def forward(self, g: Tensor, t: Tensor) -> Tensor:
        of_g, of_t = self._halves(t.dtype)
        return _per_head(of_g, g) + _per_head(of_t, t)

    def pull_back(self, weight: Tensor, g: Tensor) -> Tensor:
        pulled = _per_head(self._halves(weight.dtype)[1].mT, weight)
        return pulled.expand(torch.broadcast_shapes(weight.shape, g.shape))

    def compose(self, g: Tensor, weight: Tensor) -> Tensor:
        return (self._halves(weight.dtype)[1] @ weight)[None]


def _per_head(matrix: Tensor, t: Tensor) -> Tensor:
    """Multiply each head's matrix (h, d, d) and vector (..., h, d)."""
    return torch.einsum('hde,...he->...hd', matrix, t)


def create_interaction(config: FastformerConfig) -> Interaction:
    """Create the interaction of `config.interaction`."""
    if config.interaction == 'concat':
        return Concat(config)
    return Multiply() if config.interaction == 'multiply' else Add()
