"""The baseline Transformers (Fastformer Tables 4 to 7), as encoders of the same model.

All have the layer of transformers' BERT and differ only in its attention. The attentions of the Transformer and of
Longformer are those of transformers. BigBird's is our own, with the parameter names of transformers: there the last
block of the padded batch is global, so that results depend on padding, evaluation has no random blocks, and every call
allocates an N x N tensor of weights. Linformer, Linear Transformer and Poolingformer are our own too.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.bert.modeling_bert import BertAttention, BertIntermediate, BertOutput

from .baseline_attention import (
    Attended,
    BigBirdAttention,
    FullAttention,
    LinearAttention,
    LinformerAttention,
    LongformerAttention,
    PoolingformerAttention,
    bert_config,
    pooled_window,
)
from .config import FastformerConfig
from .encoder import register_encoder


class BaselineLayer(GradientCheckpointingLayer):
    """The layer of BERT around an attention."""

    def __init__(self, config: FastformerConfig, attention: type[nn.Module], index: int) -> None:
        super().__init__()
        bert = bert_config(config)
        self.attention = BertAttention(bert, layer_idx=index)
        self.attention.self = attention(config, index)
        self.intermediate, self.output = BertIntermediate(bert), BertOutput(bert)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Attended:
        attended, weights = self.attention(hidden_states, attention_mask)
        return self.output(self.intermediate(attended), attended), weights


class BaselineEncoder(nn.Module):
    """Layers with one kind of attention; the base of the encoders below.

    Rows are padded to a whole number of windows or blocks for the layers, and cut afterwards. Padding must be at the
    end of a row. Options of Fastformer's layer (sharing, interaction, ...) have no effect.
    """

    attention_type: ClassVar[type[nn.Module]]

    def __init__(self, config: FastformerConfig) -> None:
        super().__init__()
        self.config = config
        self.layer = nn.ModuleList(
            BaselineLayer(config, self.attention_type, index) for index in range(config.num_hidden_layers)
        )

    @classmethod
    def multiple(cls, config: FastformerConfig) -> int:
        """Return the number to whose multiples tokens are padded inside the layers."""
        return 1

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> BaseModelOutput:
        """Encode rows of tokens.

        Args:
            hidden_states: (B, N, C).
            attention_mask: (B, N), True where a token counts; None where all do.

        Raises:
            ValueError: attention weights are requested from an attention without them.
        """
        rows, tokens = hidden_states.shape[:2]
        # Replace an empty batch by one text of padding, because some attentions divide by the batch size.
        empty, multiple = int(rows == 0), self.multiple(self.config)
        more = -tokens % multiple if tokens else multiple
        if more or empty:
            if attention_mask is None:
                attention_mask = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
            hidden_states = F.pad(hidden_states, (0, 0, 0, more, 0, empty))
            attention_mask = F.pad(attention_mask, (0, more, 0, empty))
        states, weights = [hidden_states], []
        for layer in self.layer:
            hidden_states, layer_weights = layer(hidden_states, attention_mask)
            if output_hidden_states:
                states.append(hidden_states)
            if output_attentions:
                weights.append(layer_weights)
        if any(layer_weights is None for layer_weights in weights):
            raise ValueError(
                f'{type(self).__name__} keeps no weights: output_attentions needs encoder_mixer "transformer" with '
                'attn_implementation="eager", or "fastformer"'
            )
        return BaseModelOutput(
            last_hidden_state=hidden_states[:rows, :tokens],
            hidden_states=tuple(state[:rows, :tokens] for state in states) if output_hidden_states else None,
            attentions=tuple(layer[:rows, :, :tokens, :tokens] for layer in weights) if output_attentions else None,
        )


@register_encoder('transformer')
class TransformerEncoder(BaselineEncoder):
    """The Transformer."""

    attention_type = FullAttention


@register_encoder('longformer')
class LongformerEncoder(BaselineEncoder):
    """Longformer, with the first `num_global_tokens` tokens global."""

    attention_type = LongformerAttention

    @classmethod
    def multiple(cls, config: FastformerConfig) -> int:
        return config.attention_window


@register_encoder('bigbird')
class BigBirdEncoder(BaselineEncoder):
    """BigBird, with the first `num_global_tokens` tokens global and a window of three blocks."""

    attention_type = BigBirdAttention

    @classmethod
    def multiple(cls, config: FastformerConfig) -> int:
        return config.block_size


@register_encoder('linformer')
class LinformerEncoder(BaselineEncoder):
    """Linformer."""

    attention_type = LinformerAttention


@register_encoder('linear_transformer')
class LinearTransformerEncoder(BaselineEncoder):
    """The Linear Transformer."""

    attention_type = LinearAttention


@register_encoder('poolingformer')
class PoolingformerEncoder(BaselineEncoder):
    """Poolingformer."""

    attention_type = PoolingformerAttention

    @classmethod
    def multiple(cls, config: FastformerConfig) -> int:
        halves = config.poolingformer_window // 2, config.poolingformer_stride * (pooled_window(config) // 2)
        return math.lcm(*halves)
