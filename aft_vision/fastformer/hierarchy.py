"""Encoders of texts and of users, shared by news recommendation and conversion prediction.

Shapes: B users, M behaviours of a user (clicked news, say), N tokens of a text, C hidden size.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from .additive import AdditivePooling
from .config import FastformerConfig
from .encoder import as_mask, create_encoder, create_norm
from .modeling import FastformerModel, FastformerPreTrainedModel


class FastformerHierarchyConfig(FastformerConfig):
    """Configuration of a text encoder and a user encoder, as in `FastformerConfig`; all fields are keyword-only.

    Args:
        max_behaviors: maximal number of texts of a user, the last ones.
        text_config: the configuration of a language model of transformers that encodes the texts, whole or as a dict
            with `model_type`; None: a Fastformer does.
        kwargs: of `FastformerConfig`; `max_position_embeddings` is of a text.

    Raises:
        ValueError: a field out of its range.
    """

    model_type = 'fastformer_hierarchy'

    max_behaviors: int = 50
    text_config: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.text_config, dict):
            fields = dict(self.text_config)
            self.text_config = AutoConfig.for_model(fields.pop('model_type'), **fields)
        if self.max_behaviors < 1:
            raise ValueError(f'max_behaviors must be at least 1, got {self.max_behaviors}')
        super().__post_init__(**kwargs)


class LanguageModelEncoder(nn.Module):
    """A language model of transformers, additive pooling, and a projection to the hidden size.

    For a model with encoder and decoder, such as T5, only the encoder is used. Its attention stores its weights if that
    of the whole model does (`attn_implementation='eager'`).
    """

    def __init__(self, config: FastformerConfig, text_config: PreTrainedConfig) -> None:
        super().__init__()
        # None is the fused attention, where the language model has one.
        self.attention = 'eager' if config._attn_implementation == 'eager' else None
        # In the dtype of the rest of the model, not the dtype of the saved language model.
        model = AutoModel.from_config(text_config, dtype=torch.get_default_dtype(), attn_implementation=self.attention)
        self.model: Any = self._without_rest(model)
        self.pooling = AdditivePooling(config, text_config.hidden_size)
        self.projection = nn.Linear(text_config.hidden_size, config.hidden_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # (B, N) -> (B, C)
        states = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        return self.projection(self.pooling(states, None if attention_mask is None else attention_mask.bool()))

    def load(self, source: str | Path) -> None:
        """Take the weights of a saved language model, in the number format of this one.

        Args:
            source: A folder, or a name on the Hugging Face hub.
        """
        model = AutoModel.from_pretrained(
            source, dtype=self.projection.weight.dtype, attn_implementation=self.attention
        )
        self.model = self._without_rest(model)

    @staticmethod
    def _without_rest(model: Any) -> nn.Module:
        # A decoder, and the pooling of BERT or of a Fastformer, have no part in this; parameters without a gradient
        # would halt distributed training.
        if model.config.is_encoder_decoder:
            model = model.get_encoder()
        for name in ('pooler', 'pooling'):
            if getattr(model, name, None) is not None:
                setattr(model, name, None)
        return model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)


class FastformerTextEncoder(FastformerModel):
    """A Fastformer, or another encoder, that returns only the pooled text."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # (B, N) -> (B, C)
        return super().forward(input_ids, attention_mask, return_dict=True).pooler_output


def create_text_encoder(config: FastformerHierarchyConfig) -> LanguageModelEncoder | FastformerTextEncoder:
    """Create a text encoder, called with input_ids and attention_mask (B, N), that returns (B, C)."""
    if config.text_config is not None:
        return LanguageModelEncoder(config, config.text_config)
    return FastformerTextEncoder(config)


class UserEncoder(nn.Module):
    """A user encoder: the encoder of `config.encoder_mixer` over vectors of behaviours, and additive pooling.

    `config.use_position_embeddings` and `use_layer_norm` enable positions and normalisation of the input; dropout is
    always applied.
    """

    def __init__(self, config: FastformerHierarchyConfig) -> None:
        super().__init__()
        # Lengths, as of Linformer's projection, count the texts of a user, not the tokens of a text.
        config = copy.copy(config)
        config.max_position_embeddings = config.max_behaviors
        self.max_behaviors = config.max_behaviors
        self.embed_positions = None
        if config.use_position_embeddings:
            self.embed_positions = nn.Embedding(config.max_behaviors, config.hidden_size)
        self.norm = create_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.encoder = create_encoder(config)
        self.pooling = AdditivePooling(config)

    def forward(self, behaviors: Tensor, mask: Tensor | None = None) -> Tensor:
        """Encode users.

        Args:
            behaviors: (B, M, C), the oldest first, padding at the end.
            mask: (B, M) bool, True where a behaviour counts; None: all do.

        Returns:
            (B, C); zero for a user without a behaviour.

        Raises:
            ValueError: more behaviours than `config.max_behaviors`, or a mask of another shape.
        """
        length = behaviors.shape[1]
        if length > self.max_behaviors:
            raise ValueError(f'a user may have {self.max_behaviors} behaviours (max_behaviors), got {length}')
        mask = as_mask(mask, behaviors.shape[:2], 'mask')
        if length == 0:
            return behaviors.new_zeros(len(behaviors), behaviors.shape[2])
        if mask is not None:
            behaviors = behaviors.masked_fill(~mask[..., None], 0.0)
        if self.embed_positions is not None:
            behaviors = behaviors + self.embed_positions(torch.arange(length, device=behaviors.device))
        x = self.encoder(self.dropout(self.norm(behaviors)), mask).last_hidden_state
        return self.pooling(x, mask)


class FastformerHierarchyModel(FastformerPreTrainedModel):
    """Base of the user models; their token embedding belongs to the text encoder.

    A subclass creates the encoders: the order of creation determines the random initial weights for a seed.
    """

    config_class = FastformerHierarchyConfig
    config: FastformerHierarchyConfig
    text_encoder: LanguageModelEncoder | FastformerTextEncoder
    user_encoder: UserEncoder

    def get_input_embeddings(self) -> nn.Module:
        """Return the word embedding."""
        return self.text_encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the word embedding."""
        self.text_encoder.set_input_embeddings(value)


def gather_vectors(vectors: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Gather vectors by row, with -1 for padding.

    Args:
        vectors: (U, C)
        rows: (...,) int64, in [-1, U).

    Returns:
        The vectors (..., C), zero for padding, and a mask (...,), True where there is one.
    """
    mask = rows >= 0
    if len(vectors) == 0:
        return vectors.new_zeros(*rows.shape, vectors.shape[1]), mask
    return torch.where(mask[..., None], vectors[rows.clamp(min=0)], 0.0), mask
