"""Data of the tasks whose examples are texts, each with a class or a summary."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, DatasetDict, get_dataset_split_names

from aft_vision.data.ranges import within
from aft_vision.fastformer.data.splits import report_shared
from train.fastformer.schema import OWN_PATHS, TextData
from train.schema import require


@dataclass(frozen=True)
class TableData(TextData):
    """Texts from files or from the Hugging Face hub: the fields of `TextData`, and these.

    Attributes:
        hub_config: For `hub`: the configuration, if there are several.
        revision: For the hub: such as `refs/convert/parquet`.
        max_texts: Number of texts of `path` to draw by `split_seed`, before splits are drawn; None for all.
        bucket: Batch texts of similar length, which need less padding.
    """

    test_path: str | None = None
    hub_config: str | None = None
    revision: str | None = None
    text_columns: Any = None
    drop_incomplete: bool = False
    max_texts: int | None = within('[1, inf)', None, 'texts')
    bucket: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require('data.text_columns', self.text_columns, self.text_columns != [], 'one column or several')
        for split, path in self.own_paths().items():
            # It would be read as another data set, with the configuration and revision of this one.
            require(f'data.{OWN_PATHS[split]}', path, not self.is_remote, 'null for a data set of the hub')
        require('data.revision', self.revision, self.revision is None or self.is_remote, 'null for files')

    @property
    def is_remote(self) -> bool:
        """Return True if the data set is one of the hub."""
        return self.kind == 'hub'

    def own_splits(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Return the splits with their own data: their path, and the options of their reader."""
        if self.kind != 'hub':
            return {split: (path, {}) for split, path in self.own_paths().items()}
        names = get_dataset_split_names(self.path, self.hub_config, revision=self.revision)
        return {split: (self.path, {'split': split}) for split in OWN_PATHS if split in names}

    def reader_options(self, **more: Any) -> dict[str, Any]:
        """Return the options of the readers that are set."""
        revision = None if self.revision is None else {'revision': self.revision}
        options = {'config': self.hub_config, 'load_options': revision, 'drop_incomplete': self.drop_incomplete, **more}
        return {name: value for name, value in options.items() if value is not None}


def read_own_and_drawn(
    data: TableData,
    read: Callable[..., Dataset],
    divide: Callable[[Dataset, Mapping[str, float]], DatasetDict],
) -> DatasetDict:
    """Read the splits `train`, `validation` and `test`, and draw those from `train` that have no data of their own.

    A split that comes with the data set, or has a file of its own, stays whole: its texts that are also in training are
    counted and logged.

    Args:
        read: Reads a path, given the training texts or None before they are read, with options.
        divide: Divides a data set into splits with these shares.

    Raises:
        ValueError: a file is missing, damaged or of another layout, or has too few texts to divide.
    """
    own = data.own_splits()
    train = read(data.path, None, sample=data.max_texts, seed=data.split_seed)
    parts = {split: read(path, train, **options) for split, (path, options) in own.items()}
    shares = data.drawn_shares(own)
    splits = divide(train, shares) if len(shares) > 1 else DatasetDict({'train': train})
    splits.update(parts)
    for split in parts:
        report_shared(splits, split)
    return splits
