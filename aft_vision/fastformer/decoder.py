"""The decoder: layers that mix the target's tokens, read the source, and predict the next token from both."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from .cache import AttentionState, FastformerCache
from .causal import AdditiveCrossAttention, CausalFastformerAttention, DotProductCrossAttention
from .config import FastformerConfig
from .encoder import FeedForward, as_mask

CROSS_ATTENTIONS: dict[str, type[DotProductCrossAttention] | type[AdditiveCrossAttention]] = {
    'dot_product': DotProductCrossAttention,
    'additive': AdditiveCrossAttention,
}


class FastformerDecoderLayer(GradientCheckpointingLayer):
    """Causal attention, attention to the source and a feed-forward network, each followed by residual and LayerNorm."""

    def __init__(self, config: FastformerConfig) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.layer_norm_eps
        self.attn = CausalFastformerAttention(config)
        self.norm1 = nn.LayerNorm(dim, eps)
        self.cross_attn = CROSS_ATTENTIONS[config.cross_attention](config)
        self.norm2 = nn.LayerNorm(dim, eps)
        self.mlp = FeedForward(config)
        self.norm3 = nn.LayerNorm(dim, eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        keys: Tensor | None = None,
        values: Tensor | None = None,
        source_mask: Tensor | None = None,
        mask: Tensor | None = None,
        state: AttentionState | None = None,
        cross_state: AttentionState | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, AttentionState, AttentionState | None]:
        """Compute the output (B, N, C), the keys and values of the source, and the states of both attentions.

        The source (B, S, C), or its keys and values from an earlier call, are arguments of their own, because reentrant
        checkpointing detaches no tensor in a tuple.
        """
        y, state = self.attn(x, mask, state)
        x = self.norm1(x + self.dropout(y))
        kept = source if keys is None else (keys, values)
        y, (keys, values), cross_state = self.cross_attn(x, kept, source_mask, mask, cross_state)
        x = self.norm2(x + self.dropout(y))
        return self.norm3(x + self.dropout(self.mlp(x))), keys, values, state, cross_state


class DecoderEmbeddings(nn.Module):
    """Token embeddings, projected to the hidden size, plus positions; normalised, with dropout."""

    def __init__(self, config: FastformerConfig) -> None:
        super().__init__()
        self.max_positions = config.max_target_positions
        same = config.embedding_size == config.hidden_size
        self.projection = nn.Identity() if same else nn.Linear(config.embedding_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_target_positions, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, inputs_embeds: Tensor, before: int = 0, mask: Tensor | None = None) -> Tensor:
        """Compute hidden states (B, N, C) of token embeddings (B, N, embedding_size).

        Args:
            inputs_embeds: (B, N, embedding_size)
            before: P, tokens before these.
            mask: (B, P + N) bool: positions count the tokens that do; None: all do.

        Raises:
            ValueError: the text is longer than the positions.
        """
        length, limit = before + inputs_embeds.shape[1], self.max_positions
        if length > limit:
            raise ValueError(
                f'a generated text may have {limit} tokens (max_target_positions), its beginning included, got '
                f'{length}: lower max_new_tokens, truncate the labels, or raise max_target_positions'
            )
        if mask is None:
            positions = torch.arange(before, length, device=inputs_embeds.device)
        else:
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, before:]
        return self.dropout(self.norm(self.projection(inputs_embeds) + self.embed_positions(positions)))


class FastformerDecoder(nn.Module):
    """Embeddings and decoder layers; with `share_layers` one layer, applied `decoder_layers` times."""

    def __init__(self, config: FastformerConfig) -> None:
        super().__init__()
        self.depth = config.decoder_layers
        self.embeddings = DecoderEmbeddings(config)
        count = 1 if config.share_layers else self.depth
        self.layers = nn.ModuleList(FastformerDecoderLayer(config) for _ in range(count))

    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        cache: FastformerCache | None = None,
        output_hidden_states: bool = False,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode embedded tokens.

        Args:
            inputs_embeds: (B, N, embedding_size)
            attention_mask: (B, P + N), 1 or True where a token counts, of the P tokens in the cache too; None:
                all do.
            encoder_hidden_states: (B, S, C); not needed where the cache holds a source.
            encoder_attention_mask: (B, S), 1 or True where a source token counts; None: all do.
            cache: state of the earlier tokens, updated with these; None keeps no state.
            output_hidden_states: also return the input of every layer, and the last output.

        Raises:
            ValueError: a mask of another shape, more tokens than positions, or no source.
        """
        before = 0 if cache is None else cache.get_seq_length()
        shape = (inputs_embeds.shape[0], before + inputs_embeds.shape[1])
        mask = as_mask(attention_mask, shape, 'decoder_attention_mask')
        source_mask = None if encoder_attention_mask is None else encoder_attention_mask.bool()
        if mask is not None:
            inputs_embeds = inputs_embeds.masked_fill(~mask[:, before:, None], 0.0)
        x = self.embeddings(inputs_embeds, before, mask)
        count = len(self.layers)
        projected: list[Any] = [None if cache is None else cache.read_source(i) for i in range(count)]
        if encoder_hidden_states is None and None in projected:
            raise ValueError('the decoder needs the states of the encoder, or a cache that holds their projections')
        states = [x]
        for i in range(self.depth):
            index = i % count
            source = (encoder_hidden_states, None, None) if projected[index] is None else (None, *projected[index])
            # The states of the layer's two attentions.
            earlier = [None if cache is None else cache.read(j) for j in (i, self.depth + i)]
            x, keys, values, *updated = self.layers[index](x, *source, source_mask, mask, *earlier)
            if cache is not None:
                for j, state in zip((i, self.depth + i), updated, strict=True):
                    cache.write(j, state, inputs_embeds.shape[1])
                if projected[index] is None and encoder_hidden_states is not None:
                    cache.write_source(index, encoder_hidden_states, keys, values)
            projected[index] = (keys, values)
            if output_hidden_states:
                states.append(x)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x,
            cache=cache,
            hidden_states=tuple(states) if output_hidden_states else None,
        )
