"""Text classification (Fastformer Table 4)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from datasets import Dataset, DatasetDict, get_dataset_split_names
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
)

from aft_vision.data.ranges import within
from aft_vision.fastformer import FastformerForSequenceClassification
from aft_vision.fastformer.data import READERS, label_maps, split_dataset, tokenize_dataset
from aft_vision.fastformer.data.files import MissingColumnsError
from aft_vision.fastformer.data.splits import report_shared
from train.fastformer.run import TextRun
from train.fastformer.schema import TextConfig, TextData, name_keys
from train.fastformer.trainer import TextTrainer
from train.schema import require

# The kinds of data that these keys are for.
KINDS_OF_KEY = {
    'text_columns': ('table', 'hub', 'jmars', 'mind_topic'),
    'label_column': ('table', 'hub', 'jmars', 'acl_imdb'),
    'bodies': ('mind_topic',),
    'hub_config': ('hub',),
    'revision': ('hub',),
}


@dataclass(frozen=True)
class ClassificationData(TextData):
    """Texts with their classes: the fields of `TextData`, and these.

    Attributes:
        kind: A name of `READERS`: `amazon` (JSON lines of reviews), `jmars` (the IMDB of 10 classes), `acl_imdb` (that
            of 2), `mind_topic` (MIND's news.tsv), `ag_news` (CSV as published), `table` (any CSV, TSV, JSON or parquet
            file with a header or keys), or `hub` (a data set of the Hugging Face hub).
        path: The file or folder, or the name of a data set on the hub. For `mind_topic` also the parent folder of
            train, dev and test.
        test_path: A separate file of test texts, which may lack classes; not for `hub`. None uses the test texts of
            `acl_imdb`, or of a `hub` data set that has them, and splits off others.
        hub_config: For `hub`: the configuration, if there are several.
        revision: For `hub`: such as `refs/convert/parquet`.
        bodies: For `mind_topic`: docs.tsv with the bodies of the news; None for title and abstract.
        text_columns: Columns of `table`, `hub`, `jmars` and `mind_topic`; several are joined. None means text, text,
            review, and title and abstract or `bodies`.
        label_column: Column of `table`, `hub`, `jmars` and `acl_imdb`. None means label, label, rating, sentiment.
        drop_incomplete: Leave out rows whose label, or text of all columns, is missing, null, NaN or blank; otherwise
            they are errors, except a blank text.
        max_texts: Number of texts of `path` to draw by `split_seed`; None for all.
        test_share, valid_share: Shares of the texts, stratified by class, if the data set has no such split. A data set
            of the hub may have both.
        bucket: Batch texts of similar length, which need less padding.
    """

    kind: Literal['amazon', 'jmars', 'acl_imdb', 'mind_topic', 'ag_news', 'table', 'hub'] = 'table'
    test_path: str | None = None
    hub_config: str | None = None
    revision: str | None = None
    bodies: str | None = None
    text_columns: list[str] | None = None
    label_column: str | None = None
    drop_incomplete: bool = False
    max_texts: int | None = within('[1, inf)', None, 'texts')
    bucket: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        columns = self.text_columns is None or bool(self.text_columns)
        require('data.text_columns', self.text_columns, columns, 'one column or several, or null')
        # It would be read as another data set, with the configuration and revision of this one.
        own = self.test_path is None or self.kind != 'hub'
        require('data.test_path', self.test_path, own, 'null for a data set of the hub')
        for name, kinds in KINDS_OF_KEY.items():
            value = getattr(self, name)
            require(f'data.{name}', value, value is None or self.kind in kinds, f'null except for {", ".join(kinds)}')


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
        found = list(dict(model.config.id2label or {}).values())
        if found != self.class_names:
            raise ValueError(
                f'expected a model of the classes {", ".join(self.class_names)}, got {source} with {", ".join(found)}'
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

    A split that comes with the data set, or has a file of its own, stays whole: its texts that are also in training are
    counted and logged.

    Raises:
        ValueError: a file is missing, damaged or of another layout, or has too few texts to divide; a
            validation or test split that comes with the data set, or has a file of its own, has a class that the
            training texts lack.
    """
    train = read_texts(data, data.path, sample=data.max_texts, seed=data.split_seed)
    own = own_splits(data)
    shares, splits = data.drawn_shares(own), DatasetDict({'train': train})
    if len(shares) > 1:
        try:
            splits = split_dataset(train, data.split_seed, shares, rare_to_first=True)
        except ValueError as error:
            raise ValueError(f'{data.path}: {error}; see {_name_division(data, shares)}') from error
    for split, (path, options) in own.items():
        splits[split] = _with_classes(read_texts(data, path, **options), train, split)
        report_shared(splits, split)
    return splits


def _with_classes(dataset: Dataset, train: Dataset, split: str) -> Dataset:
    """Number the classes of a split, which may lack some, as the training texts do."""
    own, numbers = dataset.features['label'].names, label_maps(train)['label2id']
    if own == list(numbers):
        return dataset
    others = [own[label] for label in sorted(dataset.unique('label')) if own[label] not in numbers]
    if others:
        raise ValueError(
            f'expected {split} texts of the {len(numbers)} classes of training ({_some(list(numbers))}), got also '
            f'{_some(others)}'
        )
    columns = {'text': dataset['text'][:], 'label': [numbers[own[label]] for label in dataset['label'][:]]}
    return Dataset.from_dict(columns, features=train.features)


def _some(names: Sequence[str]) -> str:
    return f'{", ".join(names[:5]):.200}{", ..." if len(names) > 5 else ""}'


def _name_division(data: ClassificationData, drawn: Collection[str]) -> str:
    """Return the keys that decide which texts the drawn splits get, with their values."""
    shares = {'test': 'test_share', 'validation': 'valid_share'}
    keys = ['label_column'] if data.kind in KINDS_OF_KEY['label_column'] else []
    keys += [key for split, key in shares.items() if split in drawn]
    return ', '.join(f'data.{key}={"null" if (value := getattr(data, key)) is None else value}' for key in keys)


def own_splits(data: ClassificationData) -> dict[str, tuple[str, dict[str, str]]]:
    """Return the splits with their own data: their path, and the options of their reader."""
    if data.kind == 'acl_imdb':
        return {'test': (data.test_path or data.path, {'split': 'test'})}
    if data.kind != 'hub':
        return {} if data.test_path is None else {'test': (data.test_path, {})}
    splits = get_dataset_split_names(data.path, data.hub_config, revision=data.revision)
    return {split: (data.path, {'split': split}) for split in ('validation', 'test') if split in splits}


def read_texts(data: ClassificationData, path: str, **options: Any) -> Dataset:
    """Read one file, folder or data set with the options of `data`."""
    chosen = {'text': data.text_columns, 'label': data.label_column, 'docs': data.bodies, 'config': data.hub_config}
    options |= {name: value for name, value in chosen.items() if value is not None}
    if data.revision is not None:
        options['load_options'] = {'revision': data.revision}
    reader: Any = READERS[data.kind]
    try:
        return reader(path, drop_incomplete=data.drop_incomplete, **options)
    except MissingColumnsError as error:
        keys = [key for key in ('text_columns', 'label_column') if data.kind in KINDS_OF_KEY[key]]
        raise name_keys(error, keys) from error
