"""Prediction of the user's response to an ad from earlier behaviours (Fastformer Table 8).

One text encoder for ads and behaviours, an embedding of the behaviours' types, a user encoder over both, and a network
of two layers on [user; ad; user * ad]. The paper only says that the hierarchy is as in news recommendation; the types
and the network are ours. Positions and LayerNorm are on, which the authors found better for this task.

Shapes: U texts of N tokens, B users, M behaviours of a user, K ads of a user, C hidden size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple, maybe_autocast

from .additive import accumulate_dtype, can_read_weights
from .hierarchy import (
    FastformerHierarchyConfig,
    FastformerHierarchyModel,
    UserEncoder,
    create_text_encoder,
    gather_vectors,
)


class FastformerConversionConfig(FastformerHierarchyConfig):
    """Configuration of text encoder, user encoder and head; all fields are keyword-only.

    Args:
        behavior_types: names of the types of behaviours, such as `search`; a type is its index in this list (only
            `click`).
        head_hidden_size: width of the hidden layer on user and ad (hidden_size).
        kwargs: of `FastformerHierarchyConfig`.

    Raises:
        ValueError: a field is out of range.
    """

    model_type = 'fastformer_conversion'

    behavior_types: list[str] = None  # type: ignore[assignment]
    head_hidden_size: int = None  # type: ignore[assignment]

    def __post_init__(self, **kwargs: Any) -> None:
        if self.behavior_types is None:
            self.behavior_types = ['click']
        if not self.behavior_types or len(set(self.behavior_types)) < len(self.behavior_types):
            raise ValueError(f'behavior_types must be one name or several that differ, got {self.behavior_types}')
        if self.head_hidden_size is None:
            self.head_hidden_size = self.hidden_size
        super().__post_init__(**kwargs)


class ConversionHead(nn.Module):
    """One logit of [user; ad; user * ad]: two linear layers with an activation and dropout between them."""

    def __init__(self, config: FastformerConversionConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3 * config.hidden_size, config.head_hidden_size)
        self.act = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.fc2 = nn.Linear(config.head_hidden_size, 1)

    def forward(self, user: Tensor, ad: Tensor) -> Tensor:  # (..., C), (..., C) -> (...,)
        x = self.dropout(self.act(self.fc1(torch.cat([user, ad, user * ad], -1))))
        # bfloat16 logits have three digits, and many users would have the same one.
        # A wrapper may have no weight, and the weights of some quantised layers are integers.
        weight = getattr(self.fc2, 'weight', x)
        dtype = weight.dtype if weight.is_floating_point() else x.dtype
        with maybe_autocast(x.device.type, enabled=False):
            if dtype == accumulate_dtype(weight) or not can_read_weights(self.fc2):
                return self.fc2(x.to(dtype)).squeeze(-1)
            return F.linear(x.float(), weight.float(), self.fc2.bias.float()).squeeze(-1)


class FastformerForConversion(FastformerHierarchyModel):
    """A model of the probability, as a logit, that a user acts on an ad."""

    config_class = FastformerConversionConfig
    config: FastformerConversionConfig

    def __init__(self, config: FastformerConversionConfig) -> None:
        super().__init__(config)
        self.text_encoder = create_text_encoder(config)
        self.embed_types = nn.Embedding(len(config.behavior_types), config.hidden_size)
        self.user_encoder = UserEncoder(config)
        self.head = ConversionHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        ad: Tensor,
        behaviors: Tensor,
        behavior_types: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Score ads; `data.behaviors.BehaviorCollator` builds the arguments.

        Args:
            input_ids: (U, N), every text of the batch once, ads and behaviours.
            attention_mask: (U, N), 1 or True where a token counts; None: all do.
            ad: (B,) rows of input_ids, or (B, K) for several ads per user; -1 for none.
            behaviors: (B, M) rows of input_ids, the oldest behaviour first; -1 is padding, at the end.
            behavior_types: (B, M) indices in `config.behavior_types`; None means the first. Ignored for padding.
            labels: Shaped as ad, 0 or 1; ignored where ad is -1.

        Returns:
            logits, shaped as ad, the lowest number where ad is -1, and with labels the mean binary cross-entropy.

        Raises:
            ValueError: there are more behaviours than `config.max_behaviors`.
        """
        vectors = self.text_encoder(input_ids, attention_mask)
        ads, shown = gather_vectors(vectors, ad)
        logits = self.score(self.encode_users(vectors, behaviors, behavior_types), ads)
        loss = None
        if labels is not None:
            # Half precision would round the loss of a confident prediction to 0.
            dtype = accumulate_dtype(logits)
            expected = labels.to(dtype).masked_fill(~shown, 0.0)
            losses = F.binary_cross_entropy_with_logits(logits.to(dtype), expected, shown.to(dtype), reduction='sum')
            loss = losses / shown.sum().clamp(min=1)
        logits = logits.masked_fill(~shown, torch.finfo(logits.dtype).min)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def encode_users(self, vectors: Tensor, behaviors: Tensor, behavior_types: Tensor | None = None) -> Tensor:
        """Encode users to (B, C), zero for users without behaviours; vectors (U, C) encode the texts."""
        if behavior_types is None:
            behavior_types = torch.zeros_like(behaviors)
        behavior_vectors, mask = gather_vectors(vectors, behaviors)
        types = self.embed_types(behavior_types.masked_fill(~mask, 0))
        return self.user_encoder(behavior_vectors + types, mask)

    def score(self, users: Tensor, ads: Tensor) -> Tensor:
        """Compute logits (B,) of users (B, C) and ads (B, C), or (B, K) of ads (B, K, C)."""
        if ads.ndim == 3:
            users = users[:, None].expand_as(ads)
        return self.head(users, ads)
