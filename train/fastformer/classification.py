"""Text classification (Fastformer Table 4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from datasets import Dataset, DatasetDict
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
)

from aft_vision.fastformer import FastformerForSequenceClassification
from aft_vision.fastformer.data import READERS, label_maps, split_dataset, tokenize_dataset
from train.fastformer.run import TextRun
from train.fastformer.schema import TextConfig
from train.fastformer.texts import TableData, read_own_and_drawn
from train.fastformer.trainer import TextTrainer

# Kinds whose classes are the values found.
FOUND_CLASSES = ('table', 'hub', 'mind_topic')


@dataclass(frozen=True)
class ClassificationData(TableData):
    """Texts with their classes: the fields of `TableData`, and these.

    Attributes:
        kind: A name of `READERS`: `amazon` (JSON lines of reviews), `jmars` (the IMDB of 10 classes), `mind_topic`
            (MIND's news.tsv), `table` (any CSV, TSV, JSON or parquet file with a header or keys), or `hub` (a data set
            of the Hugging Face hub).
        path: The file or folder, or the name of a data set on the hub. For `mind_topic` also the parent folder of
            train, dev and test.
        test_path: A separate file of test texts, which may lack classes; not for `hub`. None uses the test texts of a
            `hub` data set that has them, and splits off others.
        bodies: For `mind_topic`: docs.tsv with the bodies of the news; None for title and abstract.
        text_columns: Columns of `table`, `hub`, `jmars` and `mind_topic`; several are joined. None means text, text,
            review, and title and abstract or `bodies`.
        label_column: Column of `table`, `hub` and `jmars`. None means label, label and rating.
        drop_incomplete: Leave out rows whose label, or text of all columns, is missing, null, NaN or blank; otherwise
            they are errors, except a blank text.
        test_share, valid_share: Shares of the texts, stratified by class, if the data set has no such split. A data set
            of the hub may have both.
    """

    kinds_of_key = {  # noqa: RUF012
        'text_columns': ('table', 'hub', 'jmars', 'mind_topic'),
        'label_column': ('table', 'hub', 'jmars'),
        'bodies': ('mind_topic',),
        'hub_config': ('hub',),
    }

    kind: Literal['amazon', 'jmars', 'mind_topic', 'table', 'hub'] = 'table'
    bodies: str | None = None
    text_columns: list[str] | None = None
    label_column: str | None = None


@dataclass(frozen=True)
class ClassificationConfig(TextConfig):
    """One experiment with a text classifier."""

    data: ClassificationData = field(default_factory=ClassificationData)


@dataclass(frozen=True)
class ClassificationRun(TextRun):
    """Texts and their classes: `splits` have columns `text` and `label`."""

    config: ClassificationConfig

    schema = ClassificationConfig
    metrics = ('accuracy', 'macro_f')
    model_class = FastformerForSequenceClassification
    auto_model = AutoModelForSequenceClassification

    @classmethod
    def read(cls, config: ClassificationConfig, folder: Path, quiet: bool = True) -> Self:
        return cls(config, folder, quiet, read_splits(config.data))

    def texts(self) -> Sequence[str]:
        return self.splits['train']['text']

    def examples(self, split: str, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        return tokenize_dataset(self.splits[split], tokenizer, self.config.data.max_length)

    @property
    def class_names(self) -> list[str]:
        """Return the classes in the order of their numbers."""
        return self.splits['train'].features['label'].names

    def model_fields(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        return label_maps(self.splits['train'])

    def new_trainer(self, **options: Any) -> Trainer:
        collate = DataCollatorWithPadding(options['processing_class'])
        return TextTrainer(data_collator=collate, compute_metrics=classification_metrics, **options)

    def check_loaded(self, model: PreTrainedModel, source: str | Path) -> None:
        classes = list(dict(model.config.id2label or {}).values())
        if classes != self.class_names:
            raise ValueError(
                f'expected a model of the classes {", ".join(self.class_names)}, got {source} with {", ".join(classes)}'
            )
        super().check_loaded(model, source)

    def summarize_data(self) -> dict[str, Any]:
        return {'classes': len(self.class_names), 'texts': self.counts()}


def classification_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Compute accuracy and macro-F, the mean F score of the classes, in [0, 1].

    The mean is over the classes that the texts have, whatever is predicted: a class that none has, as a split may lack
    a rare one, counts where it is wrongly predicted, by the recall of others, and not as another score of 0.
    """
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    chosen, labels = np.argmax(logits, axis=-1), prediction.label_ids
    return {
        'accuracy': float(accuracy_score(labels, chosen)),
        'macro_f': float(f1_score(labels, chosen, labels=np.unique(labels), average='macro', zero_division=0)),
    }


def read_splits(data: ClassificationData) -> DatasetDict:
    """Read the splits `train`, `validation` and `test`, with columns `text` and `label`.

    Raises:
        ValueError: as `read_own_and_drawn`; a validation or test split with its own data has a class that the training
            texts lack.
    """
    reader: Any = READERS[data.kind]
    options = data.reader_options(text=data.text_columns, label=data.label_column, docs=data.bodies)

    def read(path: str, train: Dataset | None, **more: Any) -> Dataset:
        if train is not None and data.kind in FOUND_CLASSES:
            # Numbered as in training; a split may lack some.
            more['label_names'] = train.features['label'].names
        return reader(path, **options, **more)

    def divide(train: Dataset, shares: Mapping[str, float]) -> DatasetDict:
        try:
            return split_dataset(train, data.split_seed, shares, rare_to_first=True)
        except ValueError as error:
            raise ValueError(f'{data.path}: {error}') from error

    return read_own_and_drawn(data, read, divide)
