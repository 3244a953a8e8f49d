"""News recommendation (Fastformer Table 5): a user's clicked news and the candidates, encoded and multiplied."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig
from transformers.utils.generic import ModelOutput, can_return_tuple, maybe_autocast

from .additive import accumulate_dtype
from .hierarchy import (
    FastformerHierarchyConfig,
    FastformerHierarchyModel,
    UserEncoder,
    create_text_encoder,
    gather_vectors,
)


class FastformerNewsConfig(FastformerHierarchyConfig):
    """Configuration of `FastformerForNewsRecommendation`; all fields are keyword-only.

    Args:
        text_columns: columns of MIND that were joined to a text in training, for those who rank with it (only `title`).
        kwargs: of `FastformerHierarchyConfig`.
    """

    model_type = 'fastformer_news'

    text_columns: list[str] = None  # type: ignore[assignment]

    def __post_init__(self, **kwargs: Any) -> None:
        if self.text_columns is None:
            self.text_columns = ['title']
        super().__post_init__(**kwargs)


@dataclass
class RankingOutput(ModelOutput):
    """Scores (B, n) of the candidates, the lowest number for missing ones, and the loss if there are labels."""

    loss: Tensor | None = None
    scores: Tensor | None = None


class FastformerForNewsRecommendation(FastformerHierarchyModel):
    """A recommender: encoders of news and of users by their clicked news; a score is the product of the two.

    With `config.text_config` that language model encodes the texts, and the encoder of `config.encoder_mixer` the users
    (Fastformer+PLM-NR).
    """

    config_class = FastformerNewsConfig
    config: FastformerNewsConfig

    def __init__(self, config: FastformerNewsConfig) -> None:
        super().__init__(config)
        self.text_encoder = create_text_encoder(config)
        self.user_encoder = UserEncoder(config)
        self.post_init()

    @classmethod
    def from_text_model(cls, source: str | Path, **kwargs: Any) -> Self:
        """Create a model with a saved language model for its texts and initial weights for the rest.

        Args:
            source: A folder, or a name on the Hugging Face hub.
            kwargs: Passed to `FastformerNewsConfig`; `vocab_size` comes from the language model, if it has one.
        """
        text_config = AutoConfig.from_pretrained(source)
        if 'vocab_size' not in kwargs and hasattr(text_config, 'vocab_size'):
            kwargs['vocab_size'] = text_config.vocab_size
        model: Any = cls(FastformerNewsConfig(**kwargs, text_config=text_config))
        model.text_encoder.load(source)
        return model

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        history: Tensor | None = None,
        candidates: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> RankingOutput:
        """Score candidates for users; each news item is in the batch once.

        Args:
            input_ids: (U, N), the texts of the news.
            attention_mask: (U, N), 1 or True where a token counts; None: all do.
            history: (B, M) int64, rows of input_ids, what each user clicked, the oldest first; -1 at the end for none.
            candidates: (B, n) int64, rows of input_ids; -1 for none.
            labels: (B,), the index of the clicked one among the candidates: cross-entropy over them.

        Raises:
            ValueError: history or candidates are missing, or of different numbers of users.
        """
        if history is None or candidates is None or len(history) != len(candidates):
            shapes = [None if x is None else tuple(x.shape) for x in (history, candidates)]
            raise ValueError(f'expected history (B, M) and candidates (B, n) of the same users, got {shapes}')
        news = self.encode_news(input_ids, attention_mask)
        users = self.encode_users(*gather_vectors(news, history))
        vectors, shown = gather_vectors(news, candidates)
        scores = self.score(users, vectors)
        scores = scores.masked_fill(~shown, torch.finfo(scores.dtype).min)
        return RankingOutput(loss=None if labels is None else F.cross_entropy(scores, labels), scores=scores)

    def encode_news(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Encode texts (U, N) to vectors (U, C)."""
        return self.text_encoder(input_ids, attention_mask)

    def encode_users(self, clicked: Tensor, mask: Tensor | None = None) -> Tensor:
        """Encode users to vectors (B, C); zero for a user without clicks, for whom all scores are equal.

        Args:
            clicked: (B, M, C), vectors of news, the oldest first.
            mask: (B, M) bool, True where there is one; None: everywhere.
        """
        return self.user_encoder(clicked, mask)

    def score(self, users: Tensor, candidates: Tensor) -> Tensor:  # (B, C), (B, n, C) -> (B, n)
        """Compute products of users and candidates, in at least float32."""
        dtype = accumulate_dtype(users)
        with maybe_autocast(users.device.type, enabled=False):
            return torch.einsum('bc,bnc->bn', users.to(dtype), candidates.to(dtype))
