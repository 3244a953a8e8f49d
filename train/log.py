"""What a run writes down while it trains: summary.csv, and TensorBoard's event files."""

import math
from pathlib import Path
from types import TracebackType
from typing import Any

from timm.utils import update_summary

from train.state import TrainState

KINDS = ('train_', 'eval_')
# Columns that only a run with a moving average fills, and every run has.
AVERAGES = ('ema_loss', 'ema_top1', 'ema_top5')


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
            self._rewrite(state)
            if tensorboard:
                self.writer = _open_tensorboard(folder / 'tensorboard', state.updates)

    def __enter__(self) -> 'RunLog':
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.writer is not None:
            self.writer.close()

    def _rewrite(self, state: TrainState) -> None:
        """Begin the file anew from the history, whose columns may have changed since."""
        Path(self.summary).unlink(missing_ok=True)
        for row in state.history:
            parts = {kind: {k.removeprefix(kind): v for k, v in row.items() if k.startswith(kind)} for kind in KINDS}
            self._append(int(row['epoch']), parts['train_'], parts['eval_'])

    def _append(self, epoch: int, trained: dict[str, float], evaluated: dict[str, float]) -> None:
        update_summary(epoch, trained, dict.fromkeys(AVERAGES, math.nan) | evaluated, self.summary)

    def log_step(self, update: int, loss: float, lr: float) -> None:
        """Record the loss and the learning rate of one update, in TensorBoard alone."""
        if self.writer is not None:
            self.writer.add_scalar('step/loss', loss, update)
            self.writer.add_scalar('step/lr', lr, update)

    def log_epoch(self, epoch: int, trained: dict[str, float], evaluated: dict[str, float]) -> None:
        """Append the row of one epoch, whose columns are the same in each; NaN where nothing was evaluated."""
        if not self.is_primary:
            return
        self._append(epoch, trained, evaluated)
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
