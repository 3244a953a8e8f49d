"""Tokens of texts, and rows of padded numbers, for the batches of Hugging Face's Trainer.

The library pads and groups: `transformers.DataCollatorWithPadding` pads a batch to its longest text, and texts of like
length share a batch with `TrainingArguments(train_sampling_strategy='group_by_length')`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

AnyDataset = TypeVar('AnyDataset', Dataset, DatasetDict)


def tokenize_dataset(
    dataset: AnyDataset, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None, num_proc: int | None = None
) -> AnyDataset:
    """Replace the column `text` by `input_ids`; the other columns stay.

    A text without tokens becomes one unknown token, so that no row of a batch is only padding.

    Args:
        max_length: Length to which texts are truncated, in tokens; None for no limit.
        num_proc: Number of processes, useful with NLTK; None for this one.
    """

    def tokenize(batch: Mapping[str, list[str]]) -> dict[str, Any]:
        return {'input_ids': token_ids(batch['text'], tokenizer, max_length)}

    return dataset.map(tokenize, batched=True, remove_columns='text', num_proc=num_proc, desc='tokens')


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
