"""The texts of an experiment with their labels, and the order that they are trained in."""

from typing import Any

import torch
from datasets import Dataset, DatasetDict
from transformers.trainer_pt_utils import LengthGroupedSampler

from aft_vision.fastformer.data.news import read_ag_news, read_mind_topic
from aft_vision.fastformer.data.reviews import read_acl_imdb, read_amazon, read_jmars
from aft_vision.fastformer.data.splits import split_dataset
from aft_vision.fastformer.data.table import read_hub, read_table
from train.fastformer_schema import TextData

READERS: dict[str, Any] = {
    'amazon': read_amazon,
    'jmars': read_jmars,
    'acl_imdb': read_acl_imdb,
    'mind': read_mind_topic,
    'ag_news': read_ag_news,
    'table': read_table,
    'hub': read_hub,
}


def read_splits(data: TextData) -> DatasetDict:
    """The parts `train`, `validation` and `test`, with columns `text` and `label`.

    Raises:
        ValueError: a file is not there, damaged or of another layout, or training and test texts have other classes.
    """
    train = read_texts(data, data.path, sample=data.max_texts, seed=data.split_seed)
    tested = data.test_path is not None or data.has_test
    held_out = {'validation': data.valid_share} | ({} if tested else {'test': data.test_share})
    shares = {'train': 1 - sum(held_out.values()), **held_out}
    parts = split_dataset(train, data.split_seed, shares, rare_to_first=True)
    if tested:
        options = {'split': 'test'} if data.has_test else {}
        parts['test'] = read_texts(data, data.test_path or data.path, **options)
        names, found = (parts[part].features['label'].names for part in ('train', 'test'))
        if names != found:
            raise ValueError(f'expected test texts of the classes {", ".join(names)}, got {", ".join(found)}')
    return parts


def read_texts(data: TextData, path: str, **options: Any) -> Dataset:
    """One file, folder or data set as `data` says."""
    if data.kind == 'mind':
        options['docs'] = data.bodies
    elif data.kind in ('table', 'hub'):
        options |= {'text': list(data.text_columns), 'label': data.label_column}
    return READERS[data.kind](path, **options)


class BucketSampler(LengthGroupedSampler):
    """transformers' sampler of texts of about the same length, whose order depends on the seed and the epoch alone.

    Theirs draws from torch's common generator, so that an epoch that is resumed half-way has another order.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: int) -> None:
        super().__init__(batch_size, lengths=lengths, generator=torch.Generator())
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of an epoch; Trainer calls this."""
        self.generator.manual_seed(self.seed + epoch)
