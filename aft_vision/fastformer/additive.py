"""Additive attention: masked softmax, pooling, and the Fastformer layer's mixing of tokens (Fastformer Eq. 3-6).

Shapes: B batch, N tokens, C hidden size, h heads, d = C / h channels of a head. A mask (B, N) is True where a token
counts; a text without such a token has zero weights and zero global vectors.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from .config import FastformerConfig
from .initialization import draw_weights
from .interaction import Add, Concat, Multiply, create_interaction


def accumulate_dtype(x: Tensor) -> torch.dtype:
    """Return float64 for float64, else float32."""
    return torch.promote_types(x.dtype, torch.float32)


def masked_softmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the softmax over the tokens that count, in the last dimension; zero for other tokens.

    Args:
        scores: (B, h, N)
        mask: (B, N) bool, or None if all tokens count.

    Returns:
        (B, h, N) in float32, or in float64 for float64.
    """
    scores = scores.to(accumulate_dtype(scores))
    if mask is None:
        return scores.softmax(dim=-1)
    padding = ~mask[:, None]
    # The lowest finite number, because minus infinity would give an empty row a NaN gradient.
    weights = scores.masked_fill(padding, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return weights.masked_fill(padding, 0.0)


def additive_pool(x: Tensor, direction: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute means of the tokens, weighted by the softmax of a linear score (Fastformer Eq. 3, Fastformer Eq. 4).

    Args:
        x: (B, N, C)
        direction: (B, h, C) or (1, h, C), in x's dtype, float32 for half precision: a token's score is its product
            with x.
        mask: (B, N) bool or None.

    Returns:
        The weights (B, h, N) and the means (B, h, C), in direction's dtype.
    """
    direction = direction.expand(x.shape[0], -1, -1)
    if is_transformed(x, direction):
        return _pool(x, direction, mask)
    return _AdditivePool.apply(x, direction, mask)


def _pool(x: Tensor, direction: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    values = x.to(direction.dtype)
    weights = masked_softmax(torch.bmm(direction, values.mT), mask)
    return weights, torch.bmm(weights, values)


def is_transformed(*tensors: Tensor) -> bool:
    """Return True under a transform of torch.func, or where a tensor has a tangent of forward-mode differentiation.

    An autograd function fast enough for small models, without `setup_context`, supports neither.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


class _AdditivePool(torch.autograd.Function):
    """`additive_pool` that keeps x in its own dtype and computes both parts of its gradient in one product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, direction: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, mean = _pool(x, direction, mask)
        ctx.save_for_backward(x, direction, weights)
        return weights, mean

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor, grad_mean: Tensor) -> tuple[Tensor | None, ...]:
        x, direction, weights = ctx.saved_tensors
        with maybe_autocast(x.device.type, enabled=False):
            values = x.to(direction.dtype)
            grad = torch.baddbmm(grad_weights, grad_mean, values.mT)
            grad_scores = weights * (grad - (weights * grad).sum(-1, keepdim=True))
            grad_x = torch.bmm(torch.cat([weights, grad_scores], 1).mT, torch.cat([grad_mean, direction], 1))
            return grad_x.to(x.dtype), torch.bmm(grad_scores, values), None


class AdditivePooling(nn.Module):
    """Pooling of a text to one vector: a mean of its tokens with weights from a tanh layer.

    Args:
        dim: width of the tokens; None means `config.hidden_size`.
    """

    def __init__(self, config: FastformerConfig, dim: int | None = None) -> None:
        super().__init__()
        self.hidden = nn.Linear(config.hidden_size if dim is None else dim, config.pooling_hidden_size)
        # A bias would cancel in the softmax.
        self.score = nn.Linear(config.pooling_hidden_size, 1, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # (B, N, C) -> (B, C)
        scores = self.score(torch.tanh(self.hidden(x))).mT  # (B, 1, N)
        weights = masked_softmax(scores, mask)
        with maybe_autocast(x.device.type, enabled=False):
            return torch.bmm(weights, x.to(weights.dtype)).squeeze(1).to(x.dtype)


class FastformerAttention(nn.Module):
    """Fastformer's mixing of tokens: O = R + Q, with R from values and a global key (Fastformer Eq. 3-6).

    Queries, keys and values are affine in a token, and the pooled ones in the pooled token. So the global vectors
    need two poolings of x and no queries and keys of tokens. In a text at least as long as x is wide, the rest is
    composed too: given the global key, the output of a token is one product with a (C, C) matrix. Memory is linear in
    N, and the backward pass stores only x and 2 h weights per token.

    The attention reads the weights of the linear layers. If a layer is wrapped, replaced or has hooks, as with
    adapters, quantisation and offloading, all layers are called on the tokens, and the equations computed directly.

    In the paper's parameter count, 3 h d^2 + 2 h d, d is the width of each head's input. With d = C / h the count is
    3 C^2 + 2 C without biases, with shared queries and values, and C^2 more otherwise. The output projection adds C^2.

    Args:
        config: `score`, `interaction`, `share_query_value`, `share_heads` and `use_output_proj` of it are used.
            With `share_heads` all heads use one (d, C) matrix of queries, one of keys and one of values, and one
            vector of scores, to the letter: they are the same, and only `transform` tells them apart.
    """

    def __init__(self, config: FastformerConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.dense_score = config.score == 'dense'
        self.std = config.initializer_range
        heads = 1 if config.share_heads else self.num_heads
        dim, width = config.hidden_size, heads * self.head_dim
        self.query = nn.Linear(dim, width)
        self.key = nn.Linear(dim, width)
        self.value = None if config.share_query_value else nn.Linear(dim, width)
        # w_q and w_k: (h, d), or (h, h, d) if a head's score uses all heads. A bias would cancel in the softmax.
        score_shape = (heads, heads, self.head_dim) if self.dense_score else (heads, self.head_dim)
        self.query_score = nn.Parameter(torch.empty(score_shape))
        self.key_score = nn.Parameter(torch.empty(score_shape))
        self.key_interaction = create_interaction(config)
        self.value_interaction = create_interaction(config)
        self.transform = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim) if config.use_output_proj else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the vectors of the scores; the linear layers initialise themselves."""
        # The fan-in of a head's score: its own channels, or the channels of all heads.
        fans = (self.query_score[0].numel(), len(self.query_score) if self.dense_score else 1)
        for score in (self.query_score, self.key_score):
            draw_weights(score, self.std, *fans)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Mix the tokens of each text.

        Args:
            x: (B, N, C)
            mask: (B, N) bool, True where a token counts; None: all do.

        Returns:
            The output (B, N, C) and the weights alpha and beta (B, h, N) of queries and keys.
        """
        linears = (self.query, self.key, self.value, self.transform, self.proj)
        interactions = (self.key_interaction, self.value_interaction)
        if not all(module is None or can_read_weights(module) for module in (*linears, *interactions)):
            return self._forward_as_written(x, mask)
        with maybe_autocast(x.device.type, enabled=False):
            alpha, beta, global_key = self._attend(x, mask)
            weight, bias = self._compose(global_key) if _is_long(x) else (None, None)
        if weight is None or bias is None:
            return self._output(self._vectors(self.query, x), x, global_key[:, None]), alpha, beta
        # Autocast, where it is on, chooses the dtype of this product.
        return torch.baddbmm(bias.to(x.dtype), x, weight.to(x.dtype).mT), alpha, beta

    def _forward_as_written(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute `forward` with the query, key and value of each token, each by one call of its linear layer."""
        q, k = self._vectors(self.query, x), self._vectors(self.key, x)
        with maybe_autocast(x.device.type, enabled=False):
            dtype = accumulate_dtype(x)
            q_wide, k_wide = q.to(dtype), k.to(dtype)
            alpha = masked_softmax(self._score(self._scaled(self.query_score, dtype), q_wide), mask)
            global_query = torch.einsum('bhn,bnhd->bhd', alpha, q_wide)
            p = self.key_interaction(global_query[:, None], k_wide)
            beta = masked_softmax(self._score(self._scaled(self.key_score, dtype), p), mask)
            global_key = torch.einsum('bhn,bnhd->bhd', beta, p)
        return self._output(q, x, global_key[:, None]), alpha, beta

    def _attend(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute alpha and beta (B, h, N), and the global key (B, h, d) (Fastformer Eq. 3-6)."""
        dtype = accumulate_dtype(x)
        query, query_bias = self._by_head(self.query, dtype)
        key, key_bias = self._by_head(self.key, dtype)
        query_score, key_score = (self._scaled(score, dtype) for score in (self.query_score, self.key_score))
        alpha, mean = additive_pool(x, self._pull_back(query_score, query)[None], mask)
        global_query = _project(query, mean) + query_bias * alpha.sum(-1, keepdim=True)
        # Between the heads of a dense score stands the dimension of those that it sees.
        g = global_query[:, None] if self.dense_score else global_query
        direction = self._pull_back(self.key_interaction.pull_back(key_score, g), key)
        beta, mean = additive_pool(x, direction, mask)
        mean_key = _project(key, mean) + key_bias * beta.sum(-1, keepdim=True)
        return alpha, beta, self.key_interaction(global_query, mean_key)

    def _compose(self, global_key: Tensor) -> tuple[Tensor, Tensor]:
        """Compose the matrices (B, C, C) and biases (B, 1, C) that map a token to its output, given the global key."""
        dtype = global_key.dtype
        query, query_bias = self._by_head(self.query, dtype)
        value, value_bias = (query, query_bias) if self.value is None else self._by_head(self.value, dtype)
        transform, transform_bias = self.transform.weight.to(dtype), self.transform.bias.to(dtype)
        mixed = self.value_interaction.compose(global_key, value).flatten(1, 2)  # (B or 1, C, C)
        mixed_bias = self.value_interaction(global_key, value_bias).flatten(1)  # (B, C)
        query, query_bias = query.flatten(0, 1), query_bias.flatten() + transform_bias
        if self.proj is not None:
            proj, proj_bias = self.proj.weight.to(dtype), self.proj.bias.to(dtype)
            transform, query, query_bias = proj @ transform, proj @ query, F.linear(query_bias, proj, proj_bias)
        weight = transform @ mixed + query
        return weight.expand(global_key.shape[0], -1, -1), F.linear(mixed_bias, transform, query_bias)[:, None]

    def _output(self, q: Tensor, x: Tensor, global_key: Tensor) -> Tensor:
        """Compute the output (B, N, C), given the queries and the global keys (B, N or 1, h, d) of the tokens."""
        v = q if self.value is None else self._vectors(self.value, x)
        u = self.value_interaction(global_key.to(v.dtype), v)
        y = self.transform(u.flatten(2)) + q.flatten(2)
        return y if self.proj is None else self.proj(y)

    def _vectors(self, linear: nn.Module, x: Tensor) -> Tensor:
        """Compute queries, keys or values (B, N, h, d); shared heads are repeated."""
        y = linear(x).unflatten(-1, (-1, self.head_dim))
        return y.expand(-1, -1, self.num_heads, -1)

    def _scaled(self, score: Tensor, dtype: torch.dtype) -> Tensor:
        """Return w_q or w_k of every head, (h, d) or (h, h, d), divided by sqrt(d)."""
        return score.to(dtype).expand(self.num_heads, *score.shape[1:]) * self.head_dim**-0.5

    def _score(self, weight: Tensor, vectors: Tensor) -> Tensor:
        """Compute the scores (B, h, N) of vectors (B, N, h, d), with weight (h, d), or (h, h, d) for dense scores."""
        return torch.einsum('kjd,bnjd->bkn' if self.dense_score else 'hd,bnhd->bhn', weight, vectors)

    def _pull_back(self, score: Tensor, weight: Tensor) -> Tensor:
        """Convert a score of queries or keys to a score of tokens (..., h, C).

        Args:
            score: (..., h, d), or (..., h, h, d) where each head sees all.
            weight: (h, d, C) of the queries or keys.
        """
        return torch.einsum('...khd,hdc->...kc' if self.dense_score else '...hd,hdc->...hc', score, weight)

    def _by_head(self, linear: nn.Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the weight (h, d, C) and bias (h, d) of queries, keys or values; shared heads are repeated."""
        weight, bias = (p.to(dtype).unflatten(0, (-1, self.head_dim)) for p in (linear.weight, linear.bias))
        return weight.expand(self.num_heads, -1, -1), bias.expand(self.num_heads, -1)


def _is_long(x: Tensor) -> bool:
    """Return True if texts (B, N, C) have at least C tokens, for which composing is cheaper.

    In `torch.export` the minimal length decides: both ways agree, and an exported program has one of them.
    """
    if torch.compiler.is_exporting():
        return statically_known_true(x.shape[1] >= x.shape[2])
    return x.shape[1] >= x.shape[2]


def can_read_weights(module: nn.Module) -> bool:
    """Return True if a linear layer or an interaction is fully described by its parameters and need not be called.

    Adapters, quantised and parametrised layers have another class. Hooks see inputs and outputs, or load the weights.
    Offloading replaces `forward`. torchao keeps the class and replaces the weight by its own tensor type, which can be
    multiplied but neither viewed nor indexed.
    """
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    if type(module) not in (nn.Linear, Multiply, Add, Concat) or any(hooks) or 'forward' in module.__dict__:
        return False
    # Look at the types, because torch.compile sees torchao's weights as plain tensors.
    return not any(hasattr(type(weight), '__tensor_flatten__') for weight in module.parameters(recurse=False))


def _project(weight: Tensor, mean: Tensor) -> Tensor:
    """Project pooled tokens (B, h, C) to pooled queries or keys (B, h, d)."""
    return torch.einsum('hdc,bhc->bhd', weight, mean)
