"""The stack of layers between embeddings and heads, and the registry of encoders."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput

from .additive import FastformerAttention
from .config import FastformerConfig

# An encoder is built from a config and called as `encoder(hidden_states, attention_mask, output_hidden_states=False,
# output_attentions=False)`: hidden_states (B, N, C), attention_mask (B, N) bool, True where a token counts, or None.
# It returns a BaseModelOutput. Its values at padded tokens are ignored.
ENCODERS: dict[str, Callable[[FastformerConfig], nn.Module]] = {}


def register_encoder(name: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Return a decorator that registers an encoder class as `encoder_mixer=name`."""

    def register(encoder: type[nn.Module]) -> type[nn.Module]:
        ENCODERS[name] = encoder
        return encoder

    return register


def create_encoder(config: FastformerConfig) -> nn.Module:
    """Create the encoder of `config.encoder_mixer`.

    Raises:
        ValueError: the name is unknown.
    """
    if config.encoder_mixer not in ENCODERS:
        raise ValueError(
            f'encoder_mixer must be one of {sorted(ENCODERS)}, got {config.encoder_mixer!r}; import the module that '
            'registers it, in a command by --import MODULE_OR_FILE'
        )
    return ENCODERS[config.encoder_mixer](config)


def as_mask(mask: Tensor | None, shape: Sequence[int], name: str = 'attention_mask') -> Tensor | None:
    """Return a mask, 1 or True where a token counts, as booleans.

    Raises:
        ValueError: it has another shape.
    """
    if mask is not None and mask.shape != torch.Size(shape):
        raise ValueError(f'{name} must have shape {tuple(shape)}, got {tuple(mask.shape)}')
    return None if mask is None else mask.bool()


class FeedForward(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, config: FastformerConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.act = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, C) -> (B, N, C)
        return self.fc2(self.act(self.fc1(x)))


class FastformerLayer(GradientCheckpointingLayer):
    """Attention, then a feed-forward network; each with dropout, residual and post-normalisation, as configured."""

    def __init__(self, config: FastformerConfig) -> None:
        super().__init__()
        self.use_residual = config.use_residual
        self.attn = FastformerAttention(config)
        self.norm1 = create_norm(config)
        self.mlp = FeedForward(config) if config.use_ffn else None
        self.norm2 = create_norm(config) if config.use_ffn else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the output (B, N, C), and the weights alpha and beta (B, h, N)."""
        y, alpha, beta = self.attn(x, mask)
        x = self.norm1(self._add(x, y))
        if self.mlp is not None and self.norm2 is not None:
            x = self.norm2(self._add(x, self.mlp(x)))
        return x, alpha, beta

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        y = self.dropout(y)
        return x + y if self.use_residual else y


def create_norm(config: FastformerConfig) -> nn.Module:
    """Create a LayerNorm, or the identity if the config has none."""
    return nn.LayerNorm(config.hidden_size, config.layer_norm_eps) if config.use_layer_norm else nn.Identity()


@register_encoder('fastformer')
class FastformerEncoder(nn.Module):
    """Fastformer layers; with `share_layers` one layer, applied `num_hidden_layers` times."""

    def __init__(self, config: FastformerConfig) -> None:
        super().__init__()
        self.depth = config.num_hidden_layers
        self.layers = nn.ModuleList(FastformerLayer(config) for _ in range(1 if config.share_layers else self.depth))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> BaseModelOutput:
        """Encode embedded tokens.

        Args:
            hidden_states: (B, N, C)
            attention_mask: (B, N) bool, True where a token counts; None: all do.
            output_hidden_states: also return the input of every layer, and the last output.
            output_attentions: also return a pair (alpha, beta) for each layer, both (B, h, N): the weights of the
                queries and of the keys, which sum to 1 over the tokens that count.
        """
        x, states = hidden_states, [hidden_states]
        attentions: list[Any] = []
        for i in range(self.depth):
            x, alpha, beta = self.layers[i % len(self.layers)](x, attention_mask)
            # The states of all layers are most of the memory of inference.
            if output_hidden_states:
                states.append(x)
            if output_attentions:
                attentions.append((alpha, beta))
        return BaseModelOutput(
            last_hidden_state=x,
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )
