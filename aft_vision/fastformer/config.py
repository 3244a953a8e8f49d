"""The configuration of the Fastformer text models, and the hyper-parameters of the paper (Fastformer Table 9)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

CHOICES = {
    'score': ('per_head', 'dense'),
    'interaction': ('multiply', 'add', 'concat'),
    'causal': ('streaming', 'exact'),
    'cross_attention': ('dot_product', 'additive'),
}
ATTENTION_FIELDS = ('score', 'interaction', 'share_query_value', 'share_layers', 'share_heads', 'use_output_proj')
POSITIVE = (
    'vocab_size embedding_size hidden_size num_hidden_layers num_attention_heads intermediate_size '
    'max_position_embeddings pooling_hidden_size decoder_layers max_target_positions'
).split()
# Fields that only one `encoder_mixer` or the decoder reads.
FIELDS_OF = {
    'fastformer': (*ATTENTION_FIELDS, 'use_residual', 'use_ffn'),
    'transformer': (),
    'longformer': ('attention_window', 'num_global_tokens'),
    'bigbird': ('block_size', 'num_global_tokens', 'num_random_tokens'),
    'linformer': ('linformer_dim',),
    'linear_transformer': (),
    'poolingformer': tuple(f'poolingformer_{name}' for name in ('window', 'second_window', 'kernel', 'stride')),
    'decoder': (*ATTENTION_FIELDS, 'decoder_layers', 'causal', 'cross_attention', 'max_target_positions'),
}


class FastformerConfig(PreTrainedConfig):
    """Configuration of the Fastformer models; all fields are keyword-only and have working defaults.

    A field with default None takes the value in parentheses. `FIELDS_OF` lists fields that only some encoders, or the
    decoder, read; the feed-forward network, norms and residuals of a baseline are BERT's.

    Args:
        vocab_size: V, rows of the embedding.
        embedding_size: width of the embedding (hidden_size); another width adds a projection to hidden_size.
        hidden_size: C, a multiple of num_attention_heads.
        num_hidden_layers: depth.
        num_attention_heads: h.
        intermediate_size: width of the feed-forward network (hidden_size).
        max_position_embeddings: the longest text in tokens, with position embeddings.
        hidden_act: activation of the feed-forward network, by its name in transformers.
        hidden_dropout_prob: dropout of embeddings and of every sub-layer's output, in [0, 1).
        layer_norm_eps: added to the variance.
        initializer_range: standard deviation of the initial weights. None uses Glorot's initialisation by width for
            linear layers and scores, and 0.02 for embeddings, so that the global vectors contribute to the output at
            any width; with a small deviation, a product of three maps would almost vanish.
        pooling_hidden_size: width of the tanh layer in the additive pooling of a text.
        score: input of a head's scores: 'per_head' its own channels (Fastformer Eq. 3, Eq. 5), 'dense' the channels of
            all heads (the authors' code).
        interaction: interaction of a global vector with a token: 'multiply' (the paper), 'add' or 'concat' (Fastformer
            Fig. 3).
        share_query_value: use the queries as values.
        share_layers: one layer, applied num_hidden_layers times.
        share_heads: every head has the same parameters, hence the same values (Fastformer Fig. 4).
        use_output_proj: a linear layer after the attention.
        use_residual: add the input to the output of attention and of the feed-forward network.
        use_layer_norm: normalise the embeddings and the outputs of attention and of the feed-forward network.
        use_ffn: a feed-forward network after the attention.
        use_position_embeddings: learned, absolute.
        encoder_mixer: the encoder: 'fastformer' or another name in `encoder.ENCODERS`.
        attention_window: tokens that one token attends to in Longformer. (In BigBird it is three blocks.)
        num_global_tokens: first tokens that attend to all and are attended by all, in Longformer and BigBird.
        num_random_tokens: random tokens that one token attends to, in BigBird.
        block_size: tokens in a block of BigBird.
        linformer_dim: k, the rows that Linformer projects keys and values to.
        poolingformer_window: other tokens that one token attends to in Poolingformer's first level.
        poolingformer_second_window: tokens before pooling that it attends to in the second (4 * poolingformer_window).
        poolingformer_kernel: tokens pooled into one in the second level.
        poolingformer_stride: tokens between two pooled ones.
        decoder_layers: depth of the decoder, in models with a decoder (num_hidden_layers).
        causal: causal attention of a decoder: 'streaming', in linear time, where each key interacts with the global
            query up to itself, or 'exact', in quadratic time, equal to the encoder's layer on the prefix.
        cross_attention: attention to the source: 'dot_product', or 'additive' by global vectors.
        max_target_positions: the longest generated text in tokens, including its start (max_position_embeddings).
        use_cache: keep the state of the tokens so far, in models that generate.
        pad_token_id: padding; its initial embedding is zero.
        bos_token_id: start of a generated text.
        eos_token_id: end of a generated text.
        decoder_start_token_id: (bos_token_id)
        tie_word_embeddings: tie the embeddings of input and output, in models with both.
        kwargs: passed to `PreTrainedConfig`, such as `num_labels` and `problem_type`.

    Raises:
        ValueError: a field is out of range, or two fields contradict each other.
    """

    model_type = 'fastformer'

    # __post_init__ replaces None by the value of another field.
    vocab_size: int = 50_000
    embedding_size: int = None  # type: ignore[assignment]
    hidden_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 16
    intermediate_size: int = None  # type: ignore[assignment]
    max_position_embeddings: int = 512
    hidden_act: str = 'gelu'
    hidden_dropout_prob: float = 0.2
    layer_norm_eps: float = 1e-12
    initializer_range: float | None = None
    pooling_hidden_size: int = 256
    score: str = 'per_head'
    interaction: str = 'multiply'
    share_query_value: bool = True
    share_layers: bool = True
    share_heads: bool = False
    use_output_proj: bool = True
    use_residual: bool = True
    use_layer_norm: bool = True
    use_ffn: bool = True
    use_position_embeddings: bool = True
    encoder_mixer: str = 'fastformer'
    attention_window: int = 8
    num_global_tokens: int = 8
    num_random_tokens: int = 8
    block_size: int = 4
    linformer_dim: int = 16
    poolingformer_window: int = 64
    poolingformer_second_window: int = None  # type: ignore[assignment]
    poolingformer_kernel: int = 5
    poolingformer_stride: int = 4
    decoder_layers: int = None  # type: ignore[assignment]
    causal: str = 'streaming'
    cross_attention: str = 'dot_product'
    max_target_positions: int = None  # type: ignore[assignment]
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    decoder_start_token_id: int | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        defaults = {
            'embedding_size': self.hidden_size,
            'intermediate_size': self.hidden_size,
            'poolingformer_second_window': 4 * self.poolingformer_window,
            'decoder_layers': self.num_hidden_layers,
            'max_target_positions': self.max_position_embeddings,
            'decoder_start_token_id': self.bos_token_id,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self.check()
        super().__post_init__(**kwargs)
        if self.output_attentions and self.encoder_mixer == 'transformer' and self._attn_implementation is None:
            self._attn_implementation = 'eager'

    @property
    def output_attentions(self) -> bool:
        """Return whether models return attention weights; the Transformer then stores them (`eager`)."""
        return bool(self._output_attentions)

    @output_attentions.setter
    def output_attentions(self, value: bool) -> None:
        if self.encoder_mixer == 'transformer':
            PreTrainedConfig.output_attentions.fset(self, value)  # type: ignore[attr-defined]
        else:
            self._output_attentions = value

    def validate(self) -> None:
        """Check the fields as transformers does, which allows output_attentions only with `eager` attention.

        Of the encoders, only the Transformer has several attention implementations.
        """
        attention = self._attn_implementation
        try:
            self._attn_implementation = attention if self.encoder_mixer == 'transformer' else None
            super().validate()  # type: ignore[misc]
        finally:
            self._attn_implementation = attention

    def check(self) -> None:
        """Check the fields; models do so too, as `from_pretrained` sets its arguments after the configuration is made.

        Raises:
            ValueError: a field is out of range, or two fields contradict each other.
        """
        for name in POSITIVE:
            if (value := getattr(self, name)) < 1:
                raise ValueError(f'{name} must be at least 1, got {value}')
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f'hidden_size must be a multiple of num_attention_heads ({self.num_attention_heads}), '
                f'got {self.hidden_size}'
            )
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f'{name} must be one of {allowed}, got {getattr(self, name)!r}')
        if self.cross_attention == 'additive' and self.interaction != 'multiply':
            raise ValueError(
                "cross_attention='additive' needs interaction='multiply': with another, the weights of the source do "
                'not depend on the target'
            )
        for name in FIELDS_OF.get(self.encoder_mixer, ()):
            minimum = 0 if name in ('num_global_tokens', 'num_random_tokens') else 1
            if type(value := getattr(self, name)) is int and value < minimum:
                raise ValueError(f'{name} of {self.encoder_mixer} must be at least {minimum}, got {value}')
        if self.encoder_mixer == 'longformer' and self.attention_window % 2:
            raise ValueError(f'attention_window must be even, got {self.attention_window}')
        if self.share_heads and self.score == 'dense':
            raise ValueError("share_heads needs score='per_head': a dense score has no parameters of a single head")
        if not 0 <= self.hidden_dropout_prob < 1:
            raise ValueError(f'hidden_dropout_prob must lie in [0, 1), got {self.hidden_dropout_prob}')
        if self.initializer_range is not None and not 0 < self.initializer_range < math.inf:
            raise ValueError(
                f'initializer_range must be above 0 and finite, or None for Glorot, got {self.initializer_range}'
            )


@dataclass(frozen=True)
class Preset:
    """One column of Fastformer Table 9. Optimizer: Adam; loss: cross-entropy; five seeds.

    Args:
        model: keyword arguments of `FastformerConfig`.
        max_length: tokens of a text.
        batch_size: examples in an update.
        lr: learning rate.
        epochs: maximal number of epochs.
        transformer_max_length: tokens of a text for the Transformer.
        max_behaviors: clicked news of a user.
        lr_plm: learning rate if the news encoder is a pre-trained language model.
        num_beams: beams of the beam search.
    """

    model: Mapping[str, Any]
    max_length: int
    batch_size: int
    lr: float
    epochs: int
    transformer_max_length: int = 512
    max_behaviors: int | None = None
    lr_plm: float | None = None
    num_beams: int | None = None

    def create_config(self, kind: type[FastformerConfig] = FastformerConfig, **kwargs: Any) -> Any:
        """Create the configuration of this column.

        Args:
            kind: Its class, such as `FastformerNewsConfig`; a class with `max_behaviors` gets the number of the column.
            kwargs: Fields, at least `vocab_size`, that complete and override the column.
        """
        fields = {**self.model}
        if self.max_behaviors is not None and hasattr(kind, 'max_behaviors'):
            fields['max_behaviors'] = self.max_behaviors
        length = self.max_length
        if kwargs.get('encoder_mixer') == 'transformer':
            length = min(length, self.transformer_max_length)
        return kind(**{**fields, 'max_position_embeddings': length, **kwargs})


def _model(layers: int, tokens: int, window: int, block: int, linformer_dim: int, **kwargs: Any) -> dict[str, Any]:
    """Build a column, with one number for global tokens, random tokens and the window of Longformer."""
    common = dict(embedding_size=300, hidden_size=256, num_attention_heads=16, hidden_dropout_prob=0.2)
    baselines = dict(
        attention_window=tokens,
        num_global_tokens=tokens,
        num_random_tokens=tokens,
        poolingformer_window=window,
        block_size=block,
        linformer_dim=linformer_dim,
    )
    return {'num_hidden_layers': layers, **common, **baselines, **kwargs}


# The paper does not state the width of the feed-forward network (256 in the authors' code). Their notes: recommending
# news works better without layer normalisation and position embeddings. The longest summary is our choice: the paper's
# average of 56 (CNN/DailyMail) and 203 (PubMed) tokens fits.
PRESETS = {
    'amazon': Preset(_model(2, 8, 64, 4, 16), 512, 64, 1e-3, 3),
    'imdb': Preset(_model(2, 8, 64, 4, 16), 1024, 64, 1e-3, 3),
    'mind_topic': Preset(_model(2, 16, 256, 8, 16), 2048, 64, 1e-3, 3),
    'mind_recommendation': Preset(
        _model(1, 8, 64, 4, 16, use_layer_norm=False, use_position_embeddings=False),
        *(48, 64, 1e-4, 3),
        max_behaviors=50,
        lr_plm=3e-6,
    ),
    'cnn_dailymail': Preset(
        _model(4, 64, 256, 32, 64, decoder_layers=4, max_target_positions=128), 2048, 32, 1e-4, 12, num_beams=5
    ),
    'pubmed': Preset(
        _model(2, 64, 256, 32, 64, decoder_layers=4, max_target_positions=256), 4096, 32, 1e-4, 15, num_beams=5
    ),
}
