"""Data of the summarisation task, and options of generation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from datasets import Dataset, DatasetDict

from aft_vision.data.ranges import check_ranges, within
from aft_vision.fastformer.data import read_hub_summaries, read_summaries, split_summaries
from train.fastformer.schema import OWN_PATHS
from train.fastformer.texts import TableData, read_own_and_drawn
from train.schema import require

# Data sets of the hub: name, configuration, and the columns of text and summary.
PUBLISHED = {
    'cnn_dailymail': ('abisee/cnn_dailymail', '3.0.0', 'article', 'highlights'),
    'pubmed': ('ccdv/pubmed-summarization', 'document', 'article', 'abstract'),
}


@dataclass(frozen=True)
class SummarizationData(TableData):
    """Texts with their summaries: the fields of `TableData`, and these.

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
        drop_incomplete: Leave out rows with a blank text or summary, which are errors otherwise.
        skip_lines: Leading lines to remove from each text, such as a headline; blank lines do not count.
        max_texts: Number of training texts to draw by `split_seed`, before splits are drawn; None for all.
        tokenizer: `nltk` or `wordpunct` words, or byte pairs; only byte pairs keep spaces and line ends.
        vocab_size: Maximal size of the vocabulary, including special tokens, for texts and summaries.
        max_summary_length: Tokens of a summary, including the end token.
    """

    kinds_of_key = {  # noqa: RUF012
        **dict.fromkeys(('text_columns', 'summary_column'), ('table', 'hub')),
        'hub_config': ('hub',),
    }

    kind: Literal['cnn_dailymail', 'pubmed', 'table', 'hub'] = 'table'
    tokenizer: Literal['nltk', 'wordpunct', 'bpe'] = 'bpe'
    lowercase: bool = False
    batch_size: int = within('[1, inf)', 32, 'examples')
    valid_path: str | None = None
    split_column: str | None = None
    text_columns: list[str] = field(default_factory=lambda: ['text'])
    summary_column: str = 'summary'
    skip_lines: int = within('[0, inf)', 0, 'lines')
    max_summary_length: int = within('[2, inf)', 128, 'tokens')

    def __post_init__(self) -> None:
        super().__post_init__()
        column, is_alone = self.split_column, not self.own_paths() and not self.is_remote
        wanted = 'null for a data set of the hub, and where other splits have files of their own'
        require('data.split_column', column, column is None or is_alone, wanted)

    @property
    def is_remote(self) -> bool:
        return self.kind == 'hub' or (self.kind in PUBLISHED and not self.path)

    def own_splits(self) -> dict[str, tuple[str, dict[str, Any]]]:
        # The splits of the published data sets are known, and a column is expected to have all.
        if self.split_column is not None or (self.is_remote and self.kind in PUBLISHED):
            return {split: (self.path, {'split': split}) for split in OWN_PATHS}
        return super().own_splits()


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

    Raises:
        ValueError: as `read_own_and_drawn`, or a file is not named.
    """
    source = {'table': 'a file', 'hub': 'the name of a data set'}.get(data.kind)
    require('data.path', data.path, source is None or bool(data.path), f'{source} where data.kind is {data.kind}')
    published = PUBLISHED.get(data.kind)
    columns = published[2:] if published else (data.text_columns, data.summary_column)
    split = {} if data.split_column is None else {'split': 'train', 'split_column': data.split_column}
    options = data.reader_options(text=columns[0], summary=columns[1], skip_lines=data.skip_lines, **split)

    def read(path: str, train: Dataset | None, **more: Any) -> Dataset:
        if not data.is_remote:
            return read_summaries(path, **{**options, **more})
        name, config = published[:2] if published else (path, data.hub_config)
        return read_hub_summaries(name, **{**options, 'config': config, **more})

    def divide(train: Dataset, shares: Mapping[str, float]) -> DatasetDict:
        return split_summaries(train, data.split_seed, shares)

    return read_own_and_drawn(data, read, divide)
