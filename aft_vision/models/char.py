"""Models of text as bytes (AFT Sec. 5.2, Tables 4 to 6)."""

from typing import Any

from aft_vision.models.decoder import AFTDecoder


def aft_local_char(**kwargs: Any) -> AFTDecoder:
    """AFT-local-32, L = 24, d = 256, T = 1024: 1.154 bits per character (AFT Table 4)."""
    model_args = dict(context=1024, mixer='local', dim=256, depth=24, window=32, bias_dim=256, dropout=0.1)
    return AFTDecoder(**dict(model_args, **kwargs))


def aft_simple_char(**kwargs: Any) -> AFTDecoder:
    """AFT-simple, L = 24, d = 256, T = 1024: 1.209 bits per character (AFT Table 4)."""
    model_args = dict(context=1024, mixer='simple', dim=256, depth=24, dropout=0.1)
    return AFTDecoder(**dict(model_args, **kwargs))


def transformer_char(**kwargs: Any) -> AFTDecoder:
    """The Transformer, L = 24, d = 256, h = 4, T = 1024: 1.130 bits per character (AFT Table 4)."""
    model_args = dict(context=1024, mixer='attention', dim=256, depth=24, num_heads=4, dropout=0.1)
    return AFTDecoder(**dict(model_args, **kwargs))
