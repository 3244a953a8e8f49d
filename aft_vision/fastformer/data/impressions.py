"""Impressions: users with what they clicked, and candidates to rank; samples and batches of them for training.

A news item is a row of a list of texts. Impressions store only row numbers, which keeps millions of them small.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from aft_vision.fastformer.data.batches import number_distinct, pad_rows, pad_tokens, token_ids


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths in one array: row i is values[starts[i] : starts[i + 1]]."""

    values: np.ndarray
    starts: np.ndarray

    @classmethod
    def from_sizes(cls, values: Any, sizes: Any) -> 'Ragged':
        """Build rows of the given lengths from consecutive values."""
        starts = np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))]).astype(np.int64)
        return cls(np.asarray(values, dtype=np.int32), starts)

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int] | np.ndarray]) -> 'Ragged':
        """Build an array of these rows."""
        arrays = [np.asarray(row, dtype=np.int32) for row in rows]
        values = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int32)
        return cls.from_sizes(values, [len(row) for row in arrays])

    @property
    def sizes(self) -> np.ndarray:
        """Return the lengths of the rows."""
        return np.diff(self.starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.starts[row] : self.starts[row + 1]]

    def select(self, rows: np.ndarray) -> 'Ragged':
        """Return selected rows in the given order."""
        return Ragged.from_sizes(self.values[self.indices(rows)], self.sizes[rows])

    def indices(self, rows: np.ndarray) -> np.ndarray:
        """Return the positions of the values of selected rows, row by row."""
        sizes = self.sizes[rows]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return np.repeat(self.starts[:-1][rows], sizes) + within


@dataclass(frozen=True)
class Behaviors:
    """Impressions, one per row.

    Attributes:
        impression_ids: Names in the file.
        histories: News that the user clicked before, the oldest first.
        candidates: News that were shown.
        labels: For `candidates.values`: 1 if clicked, else 0; None if unknown.
        users: Names of the users; None if unknown.
        seconds: Times in seconds since 1970, in the time zone of the file; None if unknown.
    """

    impression_ids: list[str]
    histories: Ragged
    candidates: Ragged
    labels: np.ndarray | None
    users: list[str] | None = None
    seconds: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.impression_ids)

    def select(self, rows: np.ndarray) -> 'Behaviors':
        """Return selected impressions in the given order."""
        labels = None if self.labels is None else self.labels[self.candidates.indices(rows)]
        names = [self.impression_ids[row] for row in rows]
        users = None if self.users is None else [self.users[row] for row in rows]
        seconds = None if self.seconds is None else self.seconds[rows]
        return Behaviors(names, self.histories.select(rows), self.candidates.select(rows), labels, users, seconds)


def split_impressions(behaviors: Behaviors, shares: Sequence[float], seed: int = 0) -> list[Behaviors]:
    """Divide impressions at random into splits with these shares; the last split gets the rest.

    Raises:
        ValueError: a split would be empty.
    """
    order = np.random.default_rng(seed).permutation(len(behaviors))
    ends = np.round(np.cumsum(shares)[:-1] * len(behaviors)).astype(np.int64)
    splits = [np.sort(split) for split in np.split(order, ends)]
    if min(map(len, splits)) == 0:
        raise ValueError(f'expected impressions for splits of {list(shares)}, got {len(behaviors)}')
    return [behaviors.select(split) for split in splits]


class ClickSamples(torch.utils.data.Dataset):
    """Training samples: each click with candidates of the same impression that were not clicked.

    Sample i + e * len(samples) is sample i with its negatives of epoch e, so a batch is determined by its numbers,
    independent of earlier batches. Impressions without a negative have no samples.

    Args:
        behaviors: Impressions with labels.
        negatives: K, drawn without replacement, then with replacement if an impression has fewer.
        seed: Seed of the draws.

    Raises:
        ValueError: there are no labels, or no impression has both a click and a negative.
    """

    def __init__(self, behaviors: Behaviors, negatives: int = 4, seed: int = 0) -> None:
        if behaviors.labels is None:
            raise ValueError('expected impressions with labels, got none')
        self.behaviors, self.negatives, self.seed = behaviors, negatives, seed
        labels = np.asarray(behaviors.labels, dtype=bool)
        impressions = np.repeat(np.arange(len(behaviors)), behaviors.candidates.sizes)
        others = np.bincount(impressions, ~labels, len(behaviors))
        self.clicks = np.flatnonzero(labels & (others[impressions] > 0))
        self.impressions = impressions[self.clicks]
        if not len(self.clicks):
            raise ValueError('expected an impression with a clicked and another candidate, got none')

    def __len__(self) -> int:
        return len(self.clicks)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return `history` (M,) and `candidates` (1 + K,), the clicked one first, as rows of news."""
        epoch, sample = divmod(int(index), len(self))
        row, candidates = int(self.impressions[sample]), self.behaviors.candidates
        labels = np.asarray(self.behaviors.labels)[candidates.starts[row] : candidates.starts[row + 1]]
        others = candidates[row][labels == 0]
        draw = np.random.default_rng((self.seed, epoch, sample))
        chosen = draw.permutation(others)[: self.negatives]
        more = draw.choice(others, self.negatives - len(chosen))
        clicked = candidates.values[self.clicks[sample]]
        return {'history': self.behaviors.histories[row], 'candidates': np.concatenate([[clicked], chosen, more])}


@dataclass(frozen=True)
class NewsCollator:
    """A collator for `FastformerForNewsRecommendation`, with each news item once per batch.

    Args:
        tokens: The ids of the tokens of every news.
        pad_token_id: Fills short texts.

    Raises:
        ValueError: there is no token that fills them.
    """

    tokens: Ragged
    pad_token_id: int

    def __post_init__(self) -> None:
        if self.pad_token_id is None:
            raise ValueError(
                'expected a tokenizer with a padding token, got one without; set tokenizer.pad_token, to its eos_token '
                'for example, and save it next to the model'
            )

    def __call__(self, samples: Sequence[dict[str, np.ndarray]]) -> dict[str, Tensor]:
        """Batch B samples with U different news.

        Returns:
            input_ids and attention_mask (U, N); history (B, M) and candidates (B, 1 + K), rows of input_ids with -1
            for padding at the end; labels (B,), zero: the first candidate was clicked.
        """
        # At least one column, so that all parameters have a part in the loss, as distributed training demands.
        history, candidates = (
            pad_rows([sample[name] for sample in samples], -1, 1) for name in ('history', 'candidates')
        )
        news, text_rows = number_distinct(np.concatenate([history, candidates], 1))
        return self.texts(news) | {
            'history': text_rows[:, : history.shape[1]],
            'candidates': text_rows[:, history.shape[1] :],
            'labels': torch.zeros(len(samples), dtype=torch.int64),
        }

    def texts(self, news: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """Return input_ids and attention_mask (U, N) of selected news."""
        return pad_tokens([self.tokens[int(row)] for row in news], self.pad_token_id)


def tokenize_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int | None = None) -> Ragged:
    """Return the token ids of texts; a text without tokens becomes one unknown token.

    Args:
        max_length: Length to which texts are truncated, in tokens; None for no limit.
    """
    return Ragged.from_rows(token_ids(texts, tokenizer, max_length))
