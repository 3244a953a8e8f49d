"""Prediction of conversions: whether a user acts on an ad (Fastformer Table 8)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from datasets import Dataset, DatasetDict
from transformers import AutoModel, EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase, Trainer

from aft_vision.data.ranges import within
from aft_vision.fastformer import FastformerConversionConfig, FastformerForConversion
from aft_vision.fastformer.data.behaviors import (
    BehaviorCollator,
    BehaviorTable,
    check_labels,
    read_behaviors,
    split_behaviors,
)
from aft_vision.fastformer.data.interactions import read_mind_clicks, read_ratings
from aft_vision.fastformer.pooled_metrics import POOLED_METRICS, pooled_metrics
from train.fastformer.run import TextRun
from train.fastformer.schema import RESERVED_KEYS, TextConfig, TextData

READERS: dict[str, Any] = {
    'json': read_behaviors,
    'mind': read_mind_clicks,
    'movielens': read_ratings,
}
# Requests in memory at once while collecting their texts.
BATCH = 10_000
# Defaults of `data.division`.
DEFAULT_DIVISION = {'json': 'random', 'mind': 'last', 'movielens': 'last'}
RESERVED = RESERVED_KEYS | {
    'max_behaviors': 'data.max_behaviors says how many there are',
    'behavior_types': 'the data decide',
    'text_config': 'texts are encoded by a Fastformer, or by the encoder in its place',
}


@dataclass(frozen=True)
class ConversionData(TextData):
    """Requests with their ads and behaviours: the fields of `TextData`, and these.

    Attributes:
        kind: `json` (JSON lines of label, ad and typed behaviours, see docs/guide/fastformer_conversion.md), `mind` (a
            folder with its news.tsv and behaviors.tsv) or `movielens` (the folder of MovieLens-100k).
        drop_missing: For `mind`: leave out news without a text, as in an excerpt.
        valid_path, test_path: Separate files of validation and test requests.
        division: How to draw the splits without a path: `random` requests, the `last` of the file, or random users,
            with all requests of a `user` in one split. None means random for `json`, and last for `mind` and
            `movielens`, which are in the order of time.
        test_share, valid_share: Shares of the requests, or of the users.
        max_behaviors: Number of last behaviours of a user to keep.
        min_frequency: Minimal number of distinct training texts with a word.
    """

    kinds_of_key = {'drop_missing': ('mind',)}  # noqa: RUF012

    kind: Literal['json', 'mind', 'movielens'] = 'json'
    max_length: int = within('[1, inf)', 48, 'tokens')
    drop_missing: bool = False
    valid_path: str | None = None
    test_path: str | None = None
    division: Literal['random', 'last', 'user'] | None = None
    max_behaviors: int = within('[1, inf)', 50, 'behaviours')


@dataclass(frozen=True)
class ConversionConfig(TextConfig):
    """One experiment with ads; `model` may also have `head_hidden_size`, the width of the network on user and ad."""

    model_config = FastformerConversionConfig
    reserved = RESERVED

    task: str = 'conversion'
    data: ConversionData = field(default_factory=ConversionData)


@dataclass(frozen=True)
class ConversionRun(TextRun):
    """Requests with behaviours, ads and labels.

    Attributes:
        splits: As `data.behaviors` has them.
        table: Their texts and types.
    """

    config: ConversionConfig
    table: BehaviorTable = field(default_factory=BehaviorTable)

    schema = ConversionConfig
    metrics = POOLED_METRICS
    best_metric = 'auc'
    model_class = FastformerForConversion
    auto_model = AutoModel

    @classmethod
    def read(cls, config: ConversionConfig, folder: Path, quiet: bool = True) -> Self:
        table = BehaviorTable()
        return cls(config, folder, quiet, read_splits(config.data, table), table)

    def texts(self) -> Sequence[str]:
        """Return every distinct text of the training requests, ads and behaviours."""
        texts = self.table.texts
        is_used = np.zeros(len(texts), dtype=bool)
        train = self.splits['train'].select_columns(['ad', 'behaviors']).with_format('numpy')
        for rows in train.iter(BATCH):
            for numbers in (rows['ad'], *rows['behaviors']):
                is_used[numbers] = True
        return [texts[number] for number in np.flatnonzero(is_used)]

    def examples(self, split: str, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        return self.splits[split]

    def model_fields(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        return {'max_behaviors': self.config.data.max_behaviors, 'behavior_types': self.table.types}

    def new_trainer(self, **options: Any) -> Trainer:
        model, tokenizer = options['model'], options['processing_class']
        collate = BehaviorCollator(self.table, tokenizer, model.config.behavior_types, self.config.data.max_length)
        return Trainer(data_collator=collate, compute_metrics=conversion_metrics, **options)

    def check_loaded(self, model: PreTrainedModel, source: str | Path) -> None:
        if not isinstance(model, FastformerForConversion):
            raise ValueError(f'expected a FastformerForConversion in {source}, got a {type(model).__name__}')
        known, most = set(model.config.behavior_types), self.config.data.max_behaviors
        if model.config.max_behaviors < most or not known >= set(self.table.types):
            raise ValueError(
                f'expected a model of {most} behaviours of the types {", ".join(self.table.types)}, got {source} with '
                f'{model.config.max_behaviors} of {", ".join(model.config.behavior_types)}'
            )
        super().check_loaded(model, source)

    def summarize_data(self) -> dict[str, Any]:
        positive = {name: sum(split['label']) / len(split) for name, split in self.splits.items()}
        return {'requests': self.counts(), 'positive': positive}


def conversion_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Compute pooled AUC and log loss."""
    return pooled_metrics(prediction.predictions, prediction.label_ids)


def read_splits(data: ConversionData, table: BehaviorTable) -> DatasetDict:
    """Read the splits `train`, `validation` and `test`.

    Raises:
        ValueError: a file is missing, damaged or of another layout, or a split has requests of only one label.
    """

    def read(path: str) -> Dataset:
        options = {'drop_missing': data.drop_missing} if data.kind == 'mind' else {}
        return READERS[data.kind](path, table, data.max_behaviors, **options)

    own = data.own_paths()
    shares, whole = data.drawn_shares(own), read(data.path)
    splits = DatasetDict({'train': whole})
    if len(shares) > 1:
        splits = split_behaviors(whole, data.division or DEFAULT_DIVISION[data.kind], data.split_seed, shares)
    for name, path in own.items():
        splits[name] = read(path)
        check_labels(name, splits[name])
    return splits
