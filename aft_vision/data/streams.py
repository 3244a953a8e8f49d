"""The loader of data sets that can only be read in their own order."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from aft_vision.data.images import CorruptImageError
from aft_vision.data.shards import WebDataset

_logger = logging.getLogger(__name__)


@dataclass
class Remainder:
    """The samples of a loading process after its last whole batch."""

    samples: list[Any]


class StreamLoader(DataLoader):
    """A loader whose batches are whole, however the images are divided among the loading processes.

    In training, a pass has the batches of an epoch: if images were skipped, others are repeated. In evaluation it has
    every image once.

    Args:
        batch_size: Images per batch of this process.
        collate: Makes a batch of a list of samples.
        options: Other options of DataLoader.

    Raises:
        ValueError: a pass had another number of images than the split, without those that were skipped.
        CorruptImageError: a pass of training has no batch.
    """

    def __init__(
        self, stream: WebDataset, batch_size: int, collate: Callable[[list[Any]], Any], **options: Any
    ) -> None:
        super().__init__(stream, batch_size, collate_fn=partial(_collate_whole, batch_size, collate), **options)
        self.stream, self.collate = stream, collate

    def __len__(self) -> int:
        images, size = len(self.stream), self.batch_size or 1
        return images // size if self.stream.is_training else -(-images // size)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        stream, made = self.stream, 0
        while True:
            before, read = made, 0
            stream.forget_skipped()
            for batch in self._batches():
                read += len(batch[1])
                if stream.is_training and len(batch[1]) < (self.batch_size or 1):
                    continue
                yield batch
                made += 1
                if stream.is_training and made == len(self):
                    return
            self._compare(read)
            if not stream.is_training:
                return
            if made == before:
                raise CorruptImageError(f'expected a batch of images that can be read in {stream.name}, got {read}')

    def _compare(self, read: int) -> None:
        """Compare the images of a whole pass with the split; at most the skipped ones may be missing."""
        stream, missing = self.stream, len(self.stream) - read
        if not 0 <= missing <= stream.skipped:
            raise ValueError(
                f'expected {len(stream)} images in {stream.name}, got {read}; correct the number after | in the name '
                'of the split, or its description'
            )
        if missing and not stream.is_training:
            _logger.warning('skipped: %d of %d images of %s', missing, len(stream), stream.name)

    def _batches(self) -> Iterator[Any]:
        rest: list[Any] = []
        size = self.batch_size or 1
        for batch in super().__iter__():
            if not isinstance(batch, Remainder):
                yield batch
                continue
            rest += batch.samples
            if len(rest) >= size:
                yield self.collate(rest[:size])
                del rest[:size]
        if rest:
            yield self.collate(rest)


def _collate_whole(batch_size: int, collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    return collate(samples) if len(samples) == batch_size else Remainder(samples)
