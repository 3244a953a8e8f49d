"""Fastformer's layers and classifier term by term, head by head and text by text: the oracle of the tests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from .additive import AdditivePooling, FastformerAttention
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


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values (N, h, d) of one text, and the parameters of each head."""

    config: FastformerConfig
    parameters: Mapping[str, Tensor]
    q: Tensor
    k: Tensor
    v: Tensor

    def of(self, name: str) -> Tensor:
        """A parameter, with a first dimension of heads."""
        p = self.parameters[name]
        return torch.cat([p] * self.config.num_attention_heads) if self.config.share_heads else p

    def interaction(self, name: str, head: int, g: Tensor, t: Tensor) -> Tensor:
        """The interaction of a head's keys or values."""
        concat = self.config.interaction == 'concat'
        return interact(self.config, self.of(f'{name}_interaction.weight')[head] if concat else None, g, t)

    def output(self, u: Tensor) -> Tensor:
        """W u + q of every token, and the output projection (N, C)."""
        p = self.parameters
        y = F.linear(u.flatten(1), p['transform.weight'], p['transform.bias']) + self.q.flatten(1)
        return F.linear(y, p['proj.weight'], p['proj.bias']) if self.config.use_output_proj else y


def make_heads(config: FastformerConfig, p: Mapping[str, Tensor], x: Tensor, source: Tensor | None = None) -> Heads:
    """The heads of one text (N, C), with the keys of a source (S, C) where there is one."""
    heads = config.num_attention_heads
    q, k = linear(x, p, 'query', heads), linear(x if source is None else source, p, 'key', heads)
    return Heads(config, p, q, k, q if config.share_query_value else linear(x, p, 'value', heads))


def weighted_sum(weights: Tensor, vectors: Tensor) -> Tensor:
    """The sum (d,) of vectors (N, d), each with its weight."""
    return torch.stack([weights[i] * vectors[i] for i in range(len(vectors))]).sum(0)


def means(vectors: Tensor, score: Tensor, mask: Tensor) -> Tensor:
    """The weighted mean of vectors (N, d), once for each token (N, d)."""
    return weighted_sum(softmax(score, mask), vectors).expand_as(vectors)


def prefix_means(vectors: Tensor, score: Tensor, mask: Tensor) -> Tensor:
    """The weighted mean (N, d) of vectors (N, d) up to each token (Fastformer Eq. 3, Eq. 4, each prefix)."""
    return torch.stack([weighted_sum(softmax(score[:n], mask[:n]), vectors[:n]) for n in range(1, len(vectors) + 1)])


def attend_one(
    config: FastformerConfig,
    p: Mapping[str, Tensor],
    x: Tensor,
    mask: Tensor,
    mean: Callable[[Tensor, Tensor, Tensor], Tensor] = means,
) -> Tensor:
    """Fastformer Eq. 3 to Eq. 6 and the output R + Q of one text (N, C)."""
    heads, tokens = make_heads(config, p, x), range(len(x))
    interacted = []
    for h in range(config.num_attention_heads):
        global_query = mean(heads.q[:, h], scores(heads.of('query_score'), h, heads.q), mask)  # Eq. 3, Eq. 4
        interacted.append(torch.stack([heads.interaction('key', h, global_query[i], heads.k[i, h]) for i in tokens]))
    p_all = torch.stack(interacted, 1)  # (N, h, d)
    u = []
    for h in range(config.num_attention_heads):
        global_key = mean(p_all[:, h], scores(heads.of('key_score'), h, p_all), mask)  # Eq. 5, Eq. 6
        u.append(torch.stack([heads.interaction('value', h, global_key[i], heads.v[i, h]) for i in tokens]))
    return heads.output(torch.stack(u, 1))


def stream_one(config: FastformerConfig, p: Mapping[str, Tensor], x: Tensor, mask: Tensor) -> Tensor:
    """The output (N, C) of causal='streaming': each key interacts with the global query up to itself."""
    return attend_one(config, p, x, mask, prefix_means)


def read_one(
    config: FastformerConfig,
    p: Mapping[str, Tensor],
    x: Tensor,
    source: Tensor,
    mask: Tensor,
    source_mask: Tensor,
) -> Tensor:
    """The output (N, C) of cross_attention='additive': the source's keys (S, ...) meet each target token's query."""
    heads = make_heads(config, p, x, source)
    queries = [
        prefix_means(heads.q[:, h], scores(heads.of('query_score'), h, heads.q), mask)
        for h in range(config.num_attention_heads)
    ]
    u = []
    for i in range(len(x)):
        interacted = torch.stack(
            [
                torch.stack([heads.interaction('key', h, query[i], key) for key in heads.k[:, h]])
                for h, query in enumerate(queries)
            ],
            1,
        )  # (S, h, d)
        global_keys = [
            weighted_sum(softmax(scores(heads.of('key_score'), h, interacted), source_mask), interacted[:, h])
            for h in range(len(queries))
        ]
        u.append(torch.stack([heads.interaction('value', h, g, heads.v[i, h]) for h, g in enumerate(global_keys)]))
    return heads.output(torch.stack(u))


def attention(config: FastformerConfig, module: FastformerAttention, x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the output of `FastformerAttention` with its parameters."""
    parameters = dict(module.named_parameters())
    mask = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    return torch.stack([attend_one(config, parameters, text, row) for text, row in zip(x, mask, strict=True)])


def normalize(config: FastformerConfig, norm: nn.Module, x: Tensor) -> Tensor:
    """LayerNorm of each token, or the token itself where the config has none."""
    if not config.use_layer_norm:
        return x
    p = dict(norm.named_parameters())
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + config.layer_norm_eps).sqrt() * p['weight'] + p['bias']


def layer(config: FastformerConfig, module: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """The output (B, N, C) of a `FastformerLayer` without dropout."""
    p = dict(module.named_parameters())
    y = attention(config, module.get_submodule('attn'), x, mask)  # type: ignore[arg-type]
    x = normalize(config, module.get_submodule('norm1'), x + y if config.use_residual else y)
    if not config.use_ffn:
        return x
    hidden = ACT2FN[config.hidden_act](x @ p['mlp.fc1.weight'].T + p['mlp.fc1.bias'])
    y = hidden @ p['mlp.fc2.weight'].T + p['mlp.fc2.bias']
    return normalize(config, module.get_submodule('norm2'), x + y if config.use_residual else y)


def encoder(config: FastformerConfig, module: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """The last hidden states (B, N, C) of a `FastformerEncoder` without dropout."""
    for index in range(config.num_hidden_layers):
        number = 0 if config.share_layers else index
        x = layer(config, module.get_submodule(f'layers.{number}'), x, mask)
    return x


def pool_text(module: AdditivePooling, x: Tensor, mask: Tensor) -> Tensor:
    """One vector (B, C) for each text (B, N, C)."""
    p = dict(module.named_parameters())
    texts = []
    for tokens, counts in zip(x, mask, strict=True):
        hidden = torch.tanh(tokens @ p['hidden.weight'].T + p['hidden.bias'])
        weights = softmax(hidden @ p['score.weight'][0], counts)
        texts.append(torch.stack([weight * token for weight, token in zip(weights, tokens, strict=True)]).sum(0))
    return torch.stack(texts)


def classify(config: FastformerConfig, module: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """The logits (B, num_labels) of a `FastformerForSequenceClassification` without dropout."""
    p = dict(module.named_parameters())
    x = p['model.embeddings.embed_tokens.weight'][ids]
    if config.embedding_size != config.hidden_size:
        x = x @ p['model.embeddings.projection.weight'].T + p['model.embeddings.projection.bias']
    if config.use_position_embeddings:
        x = x + p['model.embeddings.embed_positions.weight'][: ids.shape[1]]
    x = normalize(config, module.get_submodule('model.embeddings.norm'), x)
    x = encoder(config, module.get_submodule('model.encoder'), x, mask)
    pooling = module.get_submodule('model.pooling')
    return pool_text(pooling, x, mask) @ p['classifier.weight'].T + p['classifier.bias']  # type: ignore[arg-type]
