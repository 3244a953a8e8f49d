"""Ranking with a trained recommender: for one user, and for a whole file of impressions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import LARGE_INTEGER

from aft_vision.modes import in_evaluation

from .data.batches import pad_rows
from .data.impressions import Behaviors, NewsCollator, Ragged, tokenize_texts
from .hierarchy import gather_vectors
from .newsrec import FastformerForNewsRecommendation


class NewsRanker:
    """A recommender and its tokenizer, for the texts of one user at a time."""

    def __init__(self, model: FastformerForNewsRecommendation, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = 'cpu') -> 'NewsRanker':
        """Load the model of a folder, such as `best` of a run of `train.fastformer`.

        Raises:
            ValueError: the folder has no recommender.
        """
        if not (Path(folder) / 'config.json').is_file():
            raise ValueError(f'expected a folder with a saved model, got {folder}')
        saved = (AutoConfig.from_pretrained(folder).architectures or ['none'])[0]
        if saved != FastformerForNewsRecommendation.__name__:
            raise ValueError(f'expected a recommender, got {folder} with a {saved}')
        model: Any = AutoModel.from_pretrained(folder).to(device)
        return cls(model, AutoTokenizer.from_pretrained(folder))

    @property
    def max_length(self) -> int | None:
        """Return the length to which texts are truncated, in tokens; None without a limit of tokenizer or model."""
        config, limits = self.model.config, [self.tokenizer.model_max_length]
        if config.text_config is None:
            limits.append(config.max_position_embeddings)
        # A tokenizer without a limit has a very large number.
        known = [limit for limit in limits if limit < LARGE_INTEGER]
        return min(known, default=None)

    def score(self, history: Sequence[str], candidates: Sequence[str]) -> np.ndarray:
        """Score texts (n,) for a user; larger is better.

        Args:
            history: Texts that the user clicked, the oldest first; only the last ones count if there are too many.
                Without any, all scores are 0.
            candidates: n texts.
        """
        history = list(history)[-self.model.config.max_behaviors :]
        texts = [*history, *candidates]
        clicked, shown = (Ragged.from_rows([part]) for part in np.split(np.arange(len(texts)), [len(history)]))
        collator = NewsCollator(tokenize_texts(texts, self.tokenizer, self.max_length), self.tokenizer.pad_token_id)
        return score_behaviors(self.model, Behaviors(['user'], clicked, shown, None), collator)


@torch.no_grad()
def score_behaviors(
    model: FastformerForNewsRecommendation, behaviors: Behaviors, collator: NewsCollator, batch_size: int = 256
) -> np.ndarray:
    """Score the candidates of all impressions; every news item is encoded once.

    Args:
        model: Put into evaluation mode, which is undone afterwards.
        batch_size: News, or users, per batch.

    Returns:
        (n,) float32, in the order of `behaviors.candidates.values`.
    """
    with in_evaluation(model):
        is_named = np.zeros(len(collator.tokens), dtype=bool)
        for rows in (behaviors.histories, behaviors.candidates):
            is_named[rows.values] = True
        vectors = _encode_all(model, collator, np.flatnonzero(is_named), batch_size)
        # The row of each news item's vector.
        vector_rows = np.cumsum(is_named) - 1
        parts = [np.zeros(0, dtype=np.float32)]
        for first in range(0, len(behaviors), batch_size):
            batch = range(first, min(first + batch_size, len(behaviors)))
            parts.append(_score_batch(model, behaviors, batch, vectors, vector_rows))
        return np.concatenate(parts)


def _score_batch(
    model: FastformerForNewsRecommendation, behaviors: Behaviors, batch: range, vectors: Tensor, vector_rows: np.ndarray
) -> np.ndarray:
    """Score some impressions by the vectors (U, C) of the news."""
    device = model.device
    clicked = pad_rows([vector_rows[behaviors.histories[i]] for i in batch], -1)
    users = model.encode_users(*gather_vectors(vectors, torch.from_numpy(clicked).to(device)))
    shown = [vector_rows[behaviors.candidates[i]] for i in batch]
    # One candidate per row, so that impressions need no padding.
    owner = np.repeat(np.arange(len(batch)), [len(row) for row in shown])
    owners, rows = (torch.from_numpy(x).to(device) for x in (owner, np.concatenate(shown)))
    return model.score(users[owners], vectors[rows][:, None])[:, 0].float().cpu().numpy()


def _encode_all(
    model: FastformerForNewsRecommendation, collator: NewsCollator, news: np.ndarray, batch_size: int
) -> Tensor:
    """Encode news to vectors (U, C), in batches of similar length."""
    order = np.argsort(collator.tokens.sizes[news], kind='stable')
    parts = [torch.zeros(0, model.config.hidden_size, device=model.device, dtype=model.dtype)]
    for first in range(0, len(news), batch_size):
        batch = collator.texts(news[order[first : first + batch_size]])
        parts.append(model.encode_news(**{name: value.to(model.device) for name, value in batch.items()}))
    vectors = torch.cat(parts)
    unsorted = torch.empty_like(vectors)
    unsorted[torch.from_numpy(order).to(vectors.device)] = vectors
    return unsorted
