"""Tokens of texts and summaries, and rows of padded numbers, for the batches of Hugging Face's Trainer.

The library pads and groups: `transformers.DataCollatorWithPadding` pads a batch to its longest text, and texts of like
length share a batch with `TrainingArguments(train_sampling_strategy='group_by_length')`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

AnyDataset = TypeVar('AnyDataset', Dataset, DatasetDict)


def tokenize_dataset(
    dataset: AnyDataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    *,
    num_proc: int | None = None,
    max_summary_length: int | None = None,
) -> AnyDataset:
    """Replace `text` by `input_ids`, and `summary`, if it has a limit, by `labels` with an end token; others stay.

    A text without tokens becomes one unknown token, so that no row of a batch is only padding. A decoder reads the
    labels after its start token, as `transformers.DataCollatorForSeq2Seq` makes its batches.

    Args:
        max_length: Length to which texts are truncated, in tokens; None for no limit.
        num_proc: Number of processes, useful with NLTK; None for this one.
        max_summary_length: Length to which summaries are truncated, including the end token; None leaves a column
            `summary` as it is.

    Raises:
        ValueError: the tokenizer has no end token.
    """
    limit: int | None = max_summary_length
    end: Any = tokenizer.eos_token_id
    if limit is not None and end is None:
        raise ValueError('expected a tokenizer with an end token (eos_token), got one without')

    def with_end(target: list[int], limit: int) -> list[int]:
        # Some tokenizers add the end token themselves.
        return target if target[-1:] == [end] else [*target[: limit - 1], end]

    def tokenize(batch: Mapping[str, list[str]]) -> dict[str, Any]:
        tokens = {'input_ids': token_ids(batch['text'], tokenizer, max_length)}
        if limit is not None:
            targets: Any = tokenizer(batch['summary'], truncation=True, max_length=limit)['input_ids']
            tokens['labels'] = [with_end(target, limit) for target in targets]
        return tokens

    texts = ['text'] if limit is None else ['text', 'summary']
    return dataset.map(tokenize, batched=True, remove_columns=texts, num_proc=num_proc, desc='tokens')


def token_ids(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> list[list[int]]:
    """Return the token ids of texts; a text without tokens becomes one unknown token.

    Args:
        max_length: Length to which texts are truncated, in tokens; None for no limit.
    """
    if not texts:
        return []
    encoded = tokenizer(
        list(texts), truncation=max_length is not None, max_length=max_length, return_attention_mask=False
    )
    return [row or [tokenizer.unk_token_id] for row in encoded['input_ids']]


def pad_rows(rows: Sequence[Sequence[int] | np.ndarray], fill: int, shortest: int = 0) -> np.ndarray:
    """Pad rows of integers at the end to one array (rows, longest) int64.

    Args:
        shortest: Minimal number of columns.
    """
    padded = np.full((len(rows), max([shortest, *map(len, rows)])), fill, dtype=np.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded


def pad_tokens(rows: Sequence[Sequence[int] | np.ndarray], pad_token_id: int) -> dict[str, Tensor]:
    """Return input_ids and attention_mask (rows, longest) of the tokens of texts."""
    input_ids = pad_rows(rows, pad_token_id)
    mask = np.arange(input_ids.shape[1]) < np.array([len(row) for row in rows])[:, None]
    return {'input_ids': torch.from_numpy(input_ids), 'attention_mask': torch.from_numpy(mask.astype(np.int64))}


def number_distinct(rows: np.ndarray) -> tuple[np.ndarray, Tensor]:
    """Return the distinct numbers of an array, in order, and the index of each number among them; -1 stays -1."""
    distinct, inverse = np.unique(rows, return_inverse=True)
    padding = np.count_nonzero(distinct == -1)
    return distinct[padding:], torch.from_numpy(inverse.reshape(rows.shape) - padding)
