"""Data of the summarisation task, and options of generation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from datasets import Dataset, DatasetDict, get_dataset_split_names

from aft_vision.data.ranges import check_ranges, within
from aft_vision.fastformer.data import SUMMARY_READERS, split_summaries
from aft_vision.fastformer.data.files import MissingColumnsError
from aft_vision.fastformer.data.splits import report_shared
from train.fastformer.schema import TextData, name_keys
from train.layers import as_yaml
from train.schema import require


@dataclass(frozen=True)
class SummarizationData(TextData):
    """Texts with their summaries: the fields of `TextData`, and these.

    Attributes:
        kind: `cnn_dailymail` or `pubmed`, from the hub or, with `path`, from a file; `table` (any CSV, TSV, JSON or
            parquet file with a header or keys); or `hub` (a data set of the Hugging Face hub).
        path: The file, or the name of a data set on the hub.
        valid_path, test_path: Separate files of the validation and test texts.
        split_column: For a file: the column with `train`, `validation` or `test`. Without it and without separate
            files, the splits are drawn from `path`, with equal texts or summaries in the same split. This also applies
            to splits that a data set of the hub lacks.
        text_columns: Columns of `table` and `hub`; several are joined.
        summary_column: Column of `table` and `hub`.
        hub_config: For `hub`: the configuration, if there are several.
        revision: For the hub: such as `refs/convert/parquet`.
        drop_incomplete: Leave out rows with a blank text or summary, which are errors otherwise.
        skip_lines: Leading lines to remove from each text, such as a headline; blank lines do not count.
        max_texts: Number of training texts to draw by `split_seed`, before splits are drawn; None for all.
        tokenizer: `nltk` or `wordpunct` words, or byte pairs; only byte pairs keep spaces and line ends.
        vocab_size: Maximal size of the vocabulary, including special tokens, for texts and summaries.
        max_summary_length: Tokens of a summary, including the end token.
        bucket: Batch texts of similar length, which need less padding.
    """

    kind: Literal['cnn_dailymail', 'pubmed', 'table', 'hub'] = 'table'
    tokenizer: Literal['nltk', 'wordpunct', 'bpe'] = 'bpe'
    lowercase: bool = False
    batch_size: int = within('[1, inf)', 32, 'examples')
    valid_path: str | None = None
    test_path: str | None = None
    split_column: str | None = None
    text_columns: list[str] = field(default_factory=lambda: ['text'])
    summary_column: str = 'summary'
    hub_config: str | None = None
    revision: str | None = None
    drop_incomplete: bool = False
    skip_lines: int = within('[0, inf)', 0, 'lines')
    max_texts: int | None = within('[1, inf)', None, 'texts')
    max_summary_length: int = within('[2, inf)', 128, 'tokens')
    bucket: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require('data.text_columns', self.text_columns, bool(self.text_columns), 'one column or several')
        for name, initial, kinds in (
            ('text_columns', ['text'], ('table', 'hub')),
            ('summary_column', 'summary', ('table', 'hub')),
            ('hub_config', None, ('hub',)),
        ):
            value, valid = getattr(self, name), f'{as_yaml(initial)} except for {" and ".join(kinds)}'
            require(f'data.{name}', value, value == initial or self.kind in kinds, valid)
        require('data.revision', self.revision, self.revision is None or self.is_remote, 'null for files')
        for name in ('valid_path', 'test_path', 'split_column'):
            value = getattr(self, name)
            require(f'data.{name}', value, value is None or not self.is_remote, 'null for a data set of the hub')
        files = self.split_column is None or (self.valid_path is None and self.test_path is None)
        require('data.split_column', self.split_column, files, 'null where other splits have files of their own')

    @property
    def is_remote(self) -> bool:
        """Return True if the data set is one of the hub."""
        return self.kind == 'hub' or (self.kind != 'table' and not self.path)

    @property
    def has_splits(self) -> bool:
        """Return True if `path` holds more than texts of training, each row in a named split."""
        return self.is_remote or self.split_column is not None


@dataclass(frozen=True)
class Generation:
    """Options of `generate` for summaries; what else transformers' `generate` takes keeps its default.

    Attributes:
        num_beams: Beams of the search; 1 takes the most likely token each time.
        length_penalty: Above 0 favours long summaries among the beams, below 0 short ones; 1 where there is one beam.
        no_repeat_ngram_size: No sequence of this many tokens occurs twice in a summary; 0 allows any.
        min_length: Fewest tokens of a summary, fewer than `data.max_summary_length`; the end token is not counted.
        validate: Also generate summaries of the validation texts each epoch; the one with the best rougeL is tested.
            Else it is the one with the least loss.
    """

    num_beams: int = within('[1, inf)', 5, 'beams')
    length_penalty: float = within('(-inf, inf)', 1.0)
    no_repeat_ngram_size: int = within('[0, inf)', 0, 'tokens')
    min_length: int = within('[0, inf)', 0, 'tokens')
    validate: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, 'generate')
        plain = self.num_beams > 1 or self.length_penalty == 1
        require('generate.length_penalty', self.length_penalty, plain, '1 where generate.num_beams is 1')


def read_splits(data: SummarizationData) -> DatasetDict:
    """Read the splits `train`, `validation` and `test`, with columns `text` and `summary`.

    Texts of a split with its own data that are also in training are counted and logged.

    Raises:
        ValueError: a file is not named, missing, damaged or of another layout.
    """
    source = {'table': 'a file', 'hub': 'the name of a data set'}.get(data.kind)
    require('data.path', data.path, source is None or bool(data.path), f'{source} where data.kind is {data.kind}')
    sample = dict(sample=data.max_texts, seed=data.split_seed)
    own = own_splits(data)
    train = read_texts(data, data.path, **({'split': 'train'} if data.has_splits else {}), **sample)
    shares, splits = data.drawn_shares(own), DatasetDict({'train': train})
    if len(shares) > 1:
        splits = split_summaries(train, data.split_seed, shares)
    for split, (path, options) in own.items():
        splits[split] = read_texts(data, path, **options)
        report_shared(splits, split)
    return splits


def own_splits(data: SummarizationData) -> dict[str, tuple[str, dict[str, str]]]:
    """Return the splits with their own data: their path, and the options of their reader."""
    if not data.has_splits:
        paths = {'validation': data.valid_path, 'test': data.test_path}
        return {split: (path, {}) for split, path in paths.items() if path is not None}
    # Those of the published data sets are known, and those of a column are all expected.
    splits: Sequence[str] = ('validation', 'test')
    if data.kind == 'hub':
        splits = get_dataset_split_names(data.path, data.hub_config, revision=data.revision)
    return {split: (data.path, {'split': split}) for split in ('validation', 'test') if split in splits}


def read_texts(data: SummarizationData, path: str, **options: Any) -> Dataset:
    """Read one file or split of a data set with the options of `data`."""
    options |= {'drop_incomplete': data.drop_incomplete, 'skip_lines': data.skip_lines}
    if data.kind in ('table', 'hub'):
        options |= {'text': list(data.text_columns), 'summary': data.summary_column}
    if data.is_remote and data.revision is not None:
        options['load_options'] = {'revision': data.revision}
    if data.kind == 'hub':
        options['config'] = data.hub_config
    if data.split_column is not None:
        options['split_column'] = data.split_column
    try:
        return SUMMARY_READERS[data.kind](path or None, **options)
    except MissingColumnsError as error:
        keys = ['text_columns', 'summary_column'] if data.kind in ('table', 'hub') else []
        keys += [] if data.split_column is None else ['split_column']
        raise name_keys(error, keys) from error
