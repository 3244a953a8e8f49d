"""State of a decoder between generated tokens, as a cache of transformers."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache


class AttentionState(NamedTuple):
    """State of an attention after the tokens so far; it needs no gradients.

    Args:
        queries: (B, h, 1, d + 1), the state of the global query's `prefix_softmax_mean`.
        keys: (B, h, 1, d + 1), the state of the global key, or (B, h, P, d), the keys of all tokens.
    """

    queries: Tensor
    keys: Tensor


class StateLayer(CacheLayerMixin):
    """Two tensors of one layer, batch dimension first. Unlike keys they do not grow: new ones replace them."""

    is_sliding = False
    cumulative_length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Replace the two tensors.

        Args:
            key_states: (B, ...)
            value_states: (B, ...)
            tokens: number of additional tokens that they include.
        """
        self.lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states, value_states
        self.cumulative_length += tokens
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of a mask over all tokens."""
        return self.cumulative_length + query_length, 0

    def get_max_length(self) -> int:
        """Return -1, for an unlimited number of tokens."""
        return -1

    def reset(self) -> None:
        """Drop all tokens."""
        self.keys = self.values = None
        self.is_initialized, self.cumulative_length = False, 0


class FastformerCache(EncoderDecoderCache):
    """The states of a decoder's layers, and the keys and values of the source."""

    def __init__(self) -> None:
        super().__init__(Cache(layer_class_to_replicate=StateLayer), Cache(layer_class_to_replicate=StateLayer))
        # The source until the first reordering, then a number for each row: equal for equal neighbours.
        self._source: Tensor | None = None

    def read(self, index: int) -> AttentionState | None:
        """Return the state of a layer; None before the first token."""
        state = _read(self.self_attention_cache, index)
        return None if state is None else AttentionState(*state)

    def write(self, index: int, state: AttentionState | None, tokens: int) -> None:
        """Replace the state of a layer, if it has one, by that after this many more tokens."""
        if state is not None:
            self.self_attention_cache.update(*state, index, tokens)

    def read_source(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Return keys and values of the source; None before the first token."""
        return _read(self.cross_attention_cache, index)

    def write_source(self, index: int, source: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store a layer's keys and values (B, h, S, d) of the source (B, S, C)."""
        self.cross_attention_cache.update(keys, values, index, source.shape[1])
        self.is_updated[index], self._source = True, source

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replace row i by row beam_idx[i]; copy the source only if that changes it."""
        self.self_attention_cache.reorder_cache(beam_idx)
        if self._source is None:
            return
        if self._source.dim() > 1:
            self._source = _number_distinct(self._source)
        numbers = self._source[beam_idx.to(self._source.device)]
        # The beams of a text share its source, which is most of the cache.
        if not torch.equal(numbers, self._source):
            self._source = numbers
            self.cross_attention_cache.reorder_cache(beam_idx)

    def reset(self) -> None:
        """Drop all tokens and the source."""
        super().reset()
        self.is_updated.clear()
        self._source = None


def _read(cache: Cache, index: int) -> tuple[Tensor, Tensor] | None:
    layer = cache.layers[index] if index < len(cache.layers) else None
    if not isinstance(layer, StateLayer) or layer.keys is None or layer.values is None:
        return None
    return layer.keys, layer.values


def _number_distinct(rows: Tensor) -> Tensor:
    """Number rows (B, ...) as (B,), with equal numbers for equal neighbours."""
    differ = (rows[1:] != rows[:-1]).flatten(1).any(1)
    return torch.cat([differ.new_zeros(1), differ]).cumsum(0)
