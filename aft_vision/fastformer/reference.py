"""Fastformer's layer term by term, head by head and text by text: the oracle of the tests."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from .additive import FastformerAttention
from .config import FastformerConfig


def softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Weights (N,) of the tokens with mask (N,) True, zero elsewhere."""
    terms = torch.where(mask, torch.exp(scores), 0.0)
    return terms / terms.sum() if mask.any() else terms


def interact(config: FastformerConfig, matrix: Tensor | None, g: Tensor, t: Tensor) -> Tensor:
    """The vector (d,) that a global vector g and a token's vector t make."""
    if matrix is not None:
        return matrix @ torch.cat([g, t])
    return g * t if config.interaction == 'multiply' else g + t


def scores(weight: Tensor, head: int, vectors: Tensor) -> Tensor:
    """w^T x / sqrt(d) of every token (N,), with w of one head; vectors (N, h, d)."""
    own = vectors[:, head] @ weight[head] if weight.dim() == 2 else (vectors * weight[head]).sum((1, 2))
    return own / vectors.shape[2] ** 0.5


def linear(x: Tensor, p: Mapping[str, Tensor], name: str, heads: int) -> Tensor:
    """Queries, keys or values (N, h, d) of one text."""
    y = F.linear(x, p[f'{name}.weight'], p[f'{name}.bias'])
    # A shared head gives the same for all.
    return torch.stack([y] * heads, 1) if y.shape[1] < x.shape[1] else y.unflatten(1, (heads, -1))


def attend_one(config: FastformerConfig, p: Mapping[str, Tensor], x: Tensor, mask: Tensor) -> Tensor:
    """Fastformer Eq. 3 to Eq. 6 and the output R + Q of one text (N, C)."""
    heads = config.num_attention_heads
    q, k = linear(x, p, 'query', heads), linear(x, p, 'key', heads)
    v = q if config.share_query_value else linear(x, p, 'value', heads)

    def of(name: str) -> Tensor:  # the parameters of each head
        return torch.cat([p[name]] * heads) if config.share_heads else p[name]

    concat = config.interaction == 'concat'
    of_keys, of_values = (
        list(of(f'{name}_interaction.weight')) if concat else [None] * heads for name in ('key', 'value')
    )
    met = []
    for h in range(heads):
        alpha = softmax(scores(of('query_score'), h, q), mask)  # Eq. 3
        global_query = torch.stack([alpha[i] * q[i, h] for i in range(len(x))]).sum(0)  # Eq. 4
        met.append(torch.stack([interact(config, of_keys[h], global_query, k[i, h]) for i in range(len(x))]))
    p_all = torch.stack(met, 1)  # (N, h, d)
    u = []
    for h in range(heads):
        beta = softmax(scores(of('key_score'), h, p_all), mask)  # Eq. 5
        global_key = torch.stack([beta[i] * p_all[i, h] for i in range(len(x))]).sum(0)  # Eq. 6
        u.append(torch.stack([interact(config, of_values[h], global_key, v[i, h]) for i in range(len(x))]))
    y = F.linear(torch.stack(u, 1).flatten(1), p['transform.weight'], p['transform.bias']) + q.flatten(1)
    return F.linear(y, p['proj.weight'], p['proj.bias']) if config.use_output_proj else y


def attention(config: FastformerConfig, module: FastformerAttention, x: Tensor, mask: Tensor | None) -> Tensor:
    """What `FastformerAttention` returns first, with its parameters."""
    parameters = dict(module.named_parameters())
    mask = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    return torch.stack([attend_one(config, parameters, text, row) for text, row in zip(x, mask, strict=True)])
