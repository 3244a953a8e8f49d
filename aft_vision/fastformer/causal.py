"""Fastformer's mixing of tokens in a decoder: each token sees the tokens up to itself, and the source.

Shapes: B batch, N new tokens, P tokens before them, S source tokens, C hidden size, h heads, d = C / h.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from .additive import FastformerAttention, accumulate_dtype, can_read_weights
from .cache import AttentionState
from .config import FastformerConfig
from .interaction import Multiply
from .prefix import prefix_softmax_mean


class PrefixAttention(FastformerAttention):
    """Base of a decoder's attentions: the global query and the global key of each prefix."""

    def _prefix_queries(self, q: Tensor, mask: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the global query (B, N, h, d) up to each token, and the new state (Fastformer Eq. 3, Eq. 4)."""
        q = q.to(accumulate_dtype(q))
        scores = self._score(self._scaled(self.query_score, q.dtype), q)
        return _prefix_mean(q.transpose(1, 2), scores, mask, state)

    def _global_keys(self, g: Tensor, keys: Tensor, allowed: Tensor | None, is_causal: bool = False) -> Tensor:
        """Compute each token's global key (B, N, h, d) from keys and its global query (Fastformer Eq. 5, Eq. 6).

        Since w . (g * k) = (w * g) . k, this is dot-product attention with the query w * g and the keys as values,
        followed by a product with g.

        Args:
            g: (B, N, h, d), the global queries.
            keys: (B, h, S, d)
            allowed: (B, 1, N or 1, S) bool, True where a token sees a key; None: everywhere.
            is_causal: instead, token i sees the keys up to i.
        """
        score = self._scaled(self.key_score, g.dtype)
        direction = self.key_interaction.pull_back(score, g[:, :, None] if self.dense_score else g)
        query, score_keys = direction.transpose(1, 2).flatten(3), keys
        if self.dense_score:
            score_keys = keys.transpose(1, 2).flatten(2)[:, None].expand(-1, self.num_heads, -1, -1)
        mean = attend(query.to(keys.dtype), score_keys, keys, allowed, is_causal, scale=1.0)
        return self.key_interaction(g, mean.transpose(1, 2).to(g.dtype))


class CausalFastformerAttention(PrefixAttention):
    """Causal Fastformer attention: each token sees the tokens up to itself (Fastformer Eq. 3-6 for each prefix).

    With `config.causal='exact'` a token's output is `FastformerAttention`'s on its prefix. All keys of a prefix
    interact with its global query, so the time is quadratic in N. With 'streaming' a key interacts only with the global
    query up to itself. The time is linear and the state has a constant size. The parameters are
    `FastformerAttention`'s. If the interaction is not the product, the weights of the keys do not depend on the
    queries, and 'exact' is linear too.
    """

    def __init__(self, config: FastformerConfig) -> None:
        super().__init__(config)
        self.streaming = config.causal == 'streaming'

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None, state: AttentionState | None = None
    ) -> tuple[Tensor, AttentionState]:
        """Mix the tokens of each text.

        Args:
            x: (B, N, C)
            mask: (B, P + N) bool, True where a token counts; None: all do.
            state: state after the P tokens before x; None if there are none.

        Returns:
            The output (B, N, C), and the state after the last token.
        """
        q, k = self._vectors(self.query, x), self._vectors(self.key, x)
        before = None if state is None else state.keys
        with maybe_autocast(x.device.type, enabled=False):
            g, queries = self._prefix_queries(q, mask, None if state is None else state.queries)
            if self.streaming:
                interacted = self.key_interaction(g, k.to(g.dtype))
                scores = self._score(self._scaled(self.key_score, g.dtype), interacted)
                global_key, keys = _prefix_mean(interacted.transpose(1, 2), scores, mask, before)
            elif isinstance(self.key_interaction, Multiply):
                keys = k.transpose(1, 2) if before is None else torch.cat([before, k.transpose(1, 2)], 2)
                allowed = _allowed(x.shape[1], keys, mask)
                global_key = self._global_keys(g, keys, allowed, is_causal=allowed is None and state is None)
            else:
                k = k.to(g.dtype)
                mean, keys = _prefix_mean(k.transpose(1, 2), self._key_scores(k), mask, before)
                global_key = self.key_interaction(g, mean)
        return self._output(q, x, global_key), AttentionState(queries, keys)

    def _key_scores(self, k: Tensor) -> Tensor:
        """Compute the scores (B, h, N) of keys (B, N, h, d) if the interaction adds a constant to all of them."""
        score = self._scaled(self.key_score, k.dtype)
        if not can_read_weights(self.key_interaction):
            return self._score(score, self.key_interaction(torch.zeros_like(k), k))
        return self._score(self.key_interaction.pull_back(score, torch.zeros_like(score)), k)


class AdditiveCrossAttention(PrefixAttention):
    """Attention to the source by global vectors: its keys interact with the global query up to each target token.

    The output is W (k * v) + q with queries and values of the target tokens, as in Fastformer's layer. With any
    interaction other than the product, the result would not depend on the target.
    """

    def project(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys (B, h, S, d) of the source (B, S, C), and empty values (B, h, S, 0)."""
        keys = self._vectors(self.key, source).transpose(1, 2)
        return keys, keys[..., :0]

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        source: Tensor | tuple[Tensor, Tensor],
        source_mask: Tensor | None = None,
        mask: Tensor | None = None,
        state: AttentionState | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor], AttentionState]:
        """Read the source.

        Args:
            x: (B, N, C) target tokens.
            source: (B, S, C), or the output of `project` for it.
            source_mask: (B, S) bool, True where a source token counts; None: all do.
            mask: (B, P + N) bool, True where a target token counts; None: all do.
            state: state after the P tokens before x; None if there are none.

        Returns:
            The output (B, N, C), the output of `project`, and the state after the last token.
        """
        projected = source if isinstance(source, tuple) else self.project(source)
        q = self._vectors(self.query, x)
        with maybe_autocast(x.device.type, enabled=False):
            g, queries = self._prefix_queries(q, mask, None if state is None else state.queries)
            global_key = self._global_keys(g, projected[0], None if source_mask is None else source_mask[:, None, None])
        return self._output(q, x, global_key), projected, AttentionState(queries, queries[..., :0])


class DotProductCrossAttention(nn.Module):
    """The Transformer's attention to the source."""

    def __init__(self, config: FastformerConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.query, self.key, self.value, self.proj = (
            nn.Linear(config.hidden_size, config.hidden_size) for _ in range(4)
        )

    def project(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values (B, h, S, d) of the source (B, S, C)."""
        return self._heads(self.key(source)), self._heads(self.value(source))

    def forward(
        self,
        x: Tensor,
        source: Tensor | tuple[Tensor, Tensor],
        source_mask: Tensor | None = None,
        mask: Tensor | None = None,
        state: AttentionState | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor], None]:
        """Read the source, as `AdditiveCrossAttention` does; the last two arguments have no effect."""
        projected = source if isinstance(source, tuple) else self.project(source)
        allowed = None if source_mask is None else source_mask[:, None, None]
        y = attend(self._heads(self.query(x)), *projected, allowed)
        return self.proj(y.transpose(1, 2).flatten(2)), projected, None

    def _heads(self, x: Tensor) -> Tensor:  # (B, N, C) -> (B, h, N, d)
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Compute dot-product attention, zero for queries without an allowed key.

    Args:
        query: (B, h, N, e)
        key: (B, h, S, e)
        value: (B, h, S, d)
        allowed: (B, 1, N or 1, S) bool; None: everywhere.
        is_causal: instead, token i sees those up to i.
        scale: scale of the scores; None means 1 / sqrt(e).
    """
    if allowed is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)
    empty = ~allowed.any(-1, keepdim=True)
    y = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed | empty, scale=scale)
    return y.masked_fill(empty, 0.0)


def _prefix_mean(x: Tensor, scores: Tensor, mask: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `prefix_softmax_mean` as (B, N, h, d), given a mask (B, P + N) with P earlier tokens."""
    means, state = prefix_softmax_mean(x, scores, None if mask is None else mask[:, -x.shape[2] :], state)
    return means.transpose(1, 2), state


def _allowed(tokens: int, keys: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return which keys (B, h, P + N, d) each of N tokens sees, (B or 1, 1, N, P + N); None for all up to itself."""
    total = keys.shape[2]
    if mask is None and tokens in (1, total):
        # One token sees all keys; for a whole text, torch has causal attention without a mask.
        return None
    causal = torch.ones(tokens, total, dtype=torch.bool, device=keys.device).tril(total - tokens)[None, None]
    return causal if mask is None else causal & mask[:, None, None]
