"""What a run writes down while it trains: summary.csv, and TensorBoard's event files."""

import math
from pathlib import Path
from types import TracebackType
from typing import Any

from timm.utils import trim_summary, update_summary

from train.state import TrainState


class RunLog:
    """The log of one run, written by its first process; a context manager, so that nothing stays unwritten.

    Args:
        folder: Of the run; receives summary.csv and, if wanted, tensorboard/.
        state: Of the run. What an earlier process wrote about its unfinished epoch and later ones is dropped.

    Raises:
        ImportError: TensorBoard is wanted and not installed.
    """

    def __init__(self, folder: Path, state: TrainState, tensorboard: bool = True) -> None:
        self.summary = str(folder / 'summary.csv')
        self.is_primary = state.world.is_primary
        self.writer: Any = None
        if self.is_primary:
            trim_summary(self.summary, state.epoch)
            if tensorboard:
                self.writer = _open_tensorboard(folder / 'tensorboard', state.updates)

    def __enter__(self) -> 'RunLog':
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.writer is not None:
            self.writer.close()

    def log_step(self, update: int, loss: float, lr: float) -> None:
        """Record the loss and the learning rate of one update, in TensorBoard alone."""
        if self.writer is not None:
            self.writer.add_scalar('step/loss', loss, update)
            self.writer.add_scalar('step/lr', lr, update)

    def log_epoch(self, epoch: int, trained: dict[str, float], evaluated: dict[str, float]) -> None:
        """Append the row of one epoch, whose columns are the same in each; NaN where nothing was evaluated."""
        if not self.is_primary:
            return
        update_summary(epoch, trained, evaluated, self.summary)
        if self.writer is not None:
            for kind, values in (('train', trained), ('eval', evaluated)):
                for name, value in values.items():
                    if not math.isnan(value):
                        self.writer.add_scalar(f'{kind}/{name}', value, epoch + 1)
            self.writer.flush()


def _open_tensorboard(folder: Path, updates: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "run.tensorboard needs TensorBoard: pip install 'aft-vision[train]', or set run.tensorboard=false"
        ) from error
    return SummaryWriter(str(folder), purge_step=updates + 1 if updates else None)
