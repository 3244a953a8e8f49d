"""The stack of layers between embeddings and heads, and the table of those to choose from."""

from collections.abc import Callable

from torch import nn

from .config import FastformerConfig

# An encoder is made with a config and called as `encoder(hidden_states, attention_mask, output_hidden_states=False,
# output_attentions=False)`: hidden_states (B, N, C), attention_mask (B, N) bool, True where a token counts, or None.
# It returns a BaseModelOutput. What padded tokens hold in it is of no account.
ENCODERS: dict[str, Callable[[FastformerConfig], nn.Module]] = {}


def register_encoder(name: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """A decorator that makes an encoder's class known as `encoder_mixer=name`."""

    def register(encoder: type[nn.Module]) -> type[nn.Module]:
        ENCODERS[name] = encoder
        return encoder

    return register


def create_encoder(config: FastformerConfig) -> nn.Module:
    """The encoder that `config.encoder_mixer` names.

    Raises:
        ValueError: no encoder has that name.
    """
    if config.encoder_mixer not in ENCODERS:
        raise ValueError(f'encoder_mixer must be one of {sorted(ENCODERS)}, got {config.encoder_mixer!r}')
    return ENCODERS[config.encoder_mixer](config)
