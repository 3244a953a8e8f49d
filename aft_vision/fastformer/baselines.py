"""The baseline Transformers (Fastformer Tables 4 to 7), as encoders of the same model.

All have the layer of transformers' BERT and differ only in its attention. The attentions of the Transformer and of
Longformer come from transformers. BigBird's is our own, with the parameter names of transformers: there the last
block of the padded batch is global, so that results depend on padding, evaluation has no random blocks, and every call
allocates an N x N tensor of weights. Linformer, Linear Transformer and Poolingformer are our own too.

An attention is built from a config and the number of its layer. It takes (B, N, C) and a mask (B, N), True where a
token counts, or None, and returns (B, N, C) and its weights or None. Padding is at the end of a row.
"""

import math
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, LongformerConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.bert.modeling_bert import BertAttention, BertIntermediate, BertOutput, BertSelfAttention
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from .additive import can_read_weights
from .config import FastformerConfig
from .efficient_attention import (
    block_attention,
    full_mask,
    linear_attention,
    pool_tokens,
    projected_attention,
    window_attention,
)
from .encoder import register_encoder

# The result of every attention: the output (B, N, C), and the weights or None.
AttentionOutput = tuple[Tensor, Tensor | None]


class FullAttention(BertSelfAttention):
    """BERT's attention, fused or with its weights in memory as `config._attn_implementation` says."""

    def __init__(self, config: FastformerConfig, index: int) -> None:
        super().__init__(bert_config(config), layer_idx=index)
        # Outside a model no implementation is chosen.
        config._attn_implementation = config._attn_implementation or 'sdpa'
        # Use the model's config instead of BERT's, because `set_attn_implementation` changes only the former.
        self.config: Any = config

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> AttentionOutput:
        allowed = full_mask(attention_mask)
        if allowed is not None and self.config._attn_implementation == 'eager':
            # It adds the mask to the scores.
            low = torch.finfo(hidden_states.dtype).min
            allowed = torch.zeros_like(allowed, dtype=hidden_states.dtype).masked_fill(~allowed, low)
        attended: Any = super().forward(hidden_states, allowed)
        return attended


class LongformerAttention(LongformerSelfAttention):
    """Longformer's attention: a window around each token, and the first tokens of a row global."""

    def __init__(self, config: FastformerConfig, index: int) -> None:
        window = [config.attention_window] * config.num_hidden_layers
        longformer = LongformerConfig(**common_arguments(config), attention_window=window, onnx_export=False)
        super().__init__(longformer, index)
        self.num_global_tokens = config.num_global_tokens

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> AttentionOutput:
        if attention_mask is None:
            attention_mask = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
        # In float16 a score plus the lowest number could become minus infinity.
        hidden_states = hidden_states.masked_fill(~attention_mask[..., None], 0.0)
        first = torch.arange(attention_mask.shape[1], device=attention_mask.device) < self.num_global_tokens
        is_global = attention_mask & first
        # The mask of transformers' attention: below 0 for tokens that do not count, above 0 for global ones.
        signs = is_global.to(hidden_states.dtype) - (~attention_mask).to(hidden_states.dtype)
        (y,) = super().forward(
            hidden_states,
            attention_mask=signs,
            is_index_masked=~attention_mask,
            is_index_global_attn=is_global,
            is_global_attn=bool(is_global.any()),
        )
        if not is_global.any() and torch.is_grad_enabled():
            # Distributed training fails with a parameter that is not part of the loss.
            unused = (self.query_global, self.key_global, self.value_global)
            y = y + sum(parameter.sum() for layer in unused for parameter in layer.parameters()) * 0
        return y, None


class HeadAttention(nn.Module, ABC):
    """Base of attentions on queries, keys and values by heads; a subclass defines the attention."""

    def __init__(self, config: FastformerConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        width = config.hidden_size
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def split(self, x: Tensor) -> Tensor:
        """Split (B, N, C) into heads (B, h, N, C / h)."""
        return x.unflatten(-1, (self.config.num_attention_heads, -1)).transpose(1, 2)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> AttentionOutput:
        q, k, v = (self.split(linear(hidden_states)) for linear in (self.query, self.key, self.value))
        return join_heads(self.attend(q, k, v, attention_mask)), None

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Compute the attention (B, h, N, C / h) of queries, keys and values of that shape; mask is (B, N)."""


class BigBirdAttention(HeadAttention):
    """BigBird's attention: blocks attend to the first ones, their neighbours and random ones."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        size = self.config.block_size
        num_global, num_random = (-(-n // size) for n in (self.config.num_global_tokens, self.config.num_random_tokens))
        return block_attention(q, k, v, size, num_global, num_random, mask, seed=self.index)


class LinearAttention(HeadAttention):
    """The attention of the Linear Transformer, with elu(x) + 1."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return linear_attention(q, k, v, mask)


class LinformerAttention(HeadAttention):
    """Linformer's attention to `linformer_dim` learned sums of the keys and values, the same for all heads."""

    def __init__(self, config: FastformerConfig, index: int) -> None:
        super().__init__(config, index)
        self.longest, slots = config.max_position_embeddings, config.linformer_dim
        self.project_key, self.project_value = (nn.Linear(self.longest, slots, bias=False) for _ in range(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        longest = self.longest
        if k.shape[2] > longest:
            raise ValueError(
                f'Linformer takes at most max_position_embeddings ({longest}) tokens, got {k.shape[2]}; truncate them'
            )
        project_key, project_value = (partial(self._sum_positions, p) for p in (self.project_key, self.project_value))
        return projected_attention(q, k, v, project_key, project_value, mask)

    def _sum_positions(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """Return the sums (B, h, slots, d) over the positions of x (B, h, N, d), with a layer of the longest N."""
        if can_read_weights(linear):
            return linear.weight[:, : x.shape[2]] @ x
        return linear(F.pad(x.mT, (0, self.longest - x.shape[2]))).mT


class PoolingformerAttention(HeadAttention):
    """Poolingformer's attention: a window, then a wider one of pooled keys and values on its output; both added."""

    def __init__(self, config: FastformerConfig, index: int) -> None:
        super().__init__(config, index)
        width = config.hidden_size
        self.pooled_query, self.pooled_key, self.pooled_value = (nn.Linear(width, width) for _ in range(3))
        self.second_window = pooled_window(config)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> AttentionOutput:
        first, _ = super().forward(hidden_states, attention_mask)
        kernel, stride = self.config.poolingformer_kernel, self.config.poolingformer_stride
        q = self.split(self.pooled_query(first))
        # Pooling before the projection is equivalent and cheaper.
        pooled, mask = pool_tokens(first, kernel, stride, attention_mask)
        k, v = self.split(self.pooled_key(pooled)), self.split(self.pooled_value(pooled))
        return first + join_heads(window_attention(q, k, v, self.second_window, stride, mask)), None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return window_attention(q, k, v, self.config.poolingformer_window, mask=mask)


def pooled_window(config: FastformerConfig) -> int:
    """Return the number of pooled keys in the second window of Poolingformer.

    Raises:
        ValueError: it or the first window cannot be halved.
    """
    first, stride = config.poolingformer_window, config.poolingformer_stride
    second = config.poolingformer_second_window
    if first % 2 or second % (2 * stride) or min(first, second) < 2:
        raise ValueError(
            'expected an even poolingformer_window and a poolingformer_second_window that is a multiple of '
            f'2 * poolingformer_stride ({2 * stride}), got {first} and {second}'
        )
    return second // stride


def join_heads(x: Tensor) -> Tensor:
    """Join heads (B, h, N, d) to (B, N, h * d)."""
    return x.transpose(1, 2).flatten(2)


def common_arguments(config: FastformerConfig) -> dict[str, Any]:
    """Return the arguments that the configurations of transformers' own models share."""
    names = ('hidden_size', 'num_hidden_layers', 'num_attention_heads', 'intermediate_size', 'hidden_act')
    dropout = dict(hidden_dropout_prob=config.hidden_dropout_prob, attention_probs_dropout_prob=0.0)
    return {name: getattr(config, name) for name in names} | dropout | dict(layer_norm_eps=config.layer_norm_eps)


def bert_config(config: FastformerConfig) -> BertConfig:
    """Return the configuration of BERT's layer."""
    bert: Any = BertConfig
    return bert(**common_arguments(config), attn_implementation=config._attn_implementation or 'sdpa')


class BaselineLayer(GradientCheckpointingLayer):
    """The layer of BERT around an attention."""

    def __init__(self, config: FastformerConfig, attention: type[nn.Module], index: int) -> None:
        super().__init__()
        bert = bert_config(config)
        self.attention = BertAttention(bert, layer_idx=index)
        self.attention.self = attention(config, index)
        self.intermediate, self.output = BertIntermediate(bert), BertOutput(bert)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> AttentionOutput:
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
