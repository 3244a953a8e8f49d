"""The log of a run: summary.csv, steps.csv, and TensorBoard's event files."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from timm.utils import update_summary

from aft_vision.files import replacing
from train.state import TrainState

KINDS = ('train_', 'eval_')
STEP_COLUMNS = ('update', 'seconds', 'loss', 'lr')


class RunLog:
    """The log of one run, written by its first process.

    Args:
        folder: Folder of the run, for summary.csv and optionally steps.csv and tensorboard/.
        state: State of the run. Rows of an earlier process about its unfinished epoch and later ones are dropped.

    Raises:
        ImportError: TensorBoard is enabled and not installed.
    """

    def __init__(self, folder: Path, state: TrainState) -> None:
        self.summary = str(folder / 'summary.csv')
        self.steps = folder / 'steps.csv' if state.objective.records_steps else None
        # Columns of a moving average, which every run has.
        self.averages = [f'ema_{name}' for name in state.objective.metrics]
        self.is_primary = state.world.is_primary
        self.writer: Any = None
        # Every row has all columns, of earlier rows and of later ones.
        names = [
            *state.regularization.metrics(),
            *(k.removeprefix('train_') for row in state.progress.history for k in row),
        ]
        self.entropies = [name for name in dict.fromkeys(names) if name.startswith('kernel_entropy')]
        if self.is_primary:
            self._rewrite(state)
            if state.loop.tensorboard:
                self.writer = _open_tensorboard(folder / 'tensorboard', state.progress.updates)

    def close(self) -> None:
        """Write what TensorBoard has not written yet."""
        if self.writer is not None:
            self.writer.close()

    def _rewrite(self, state: TrainState) -> None:
        """Rewrite the file from the history, whose columns may have changed."""
        Path(self.summary).unlink(missing_ok=True)
        # A run of five classes of an earlier version has columns of top-5.
        known = {f'eval_{name}' for name in (*state.objective.metrics, *self.averages)}
        for row in state.progress.history:
            row = {name: value for name, value in row.items() if name in known or not name.startswith('eval_')}
            parts = {
                prefix: {k.removeprefix(prefix): v for k, v in row.items() if k.startswith(prefix)} for prefix in KINDS
            }
            self._append(int(row['epoch']), parts['train_'], parts['eval_'])
        if self.steps is not None:
            # Drop rows after the checkpoint and incomplete rows.
            before = self.steps.read_text().splitlines()[1:] if self.steps.exists() and state.progress.updates else []
            cells = [row.split(',') for row in before]
            kept = [row for row in cells if len(row) == len(STEP_COLUMNS) and int(row[0]) <= state.progress.updates]
            with replacing(self.steps) as file:
                file.write_text(''.join(','.join(row) + '\n' for row in [STEP_COLUMNS, *kept]))

    def _append(self, epoch: int, trained: dict[str, float], evaluated: dict[str, float]) -> None:
        trained = trained | {name: trained.get(name, math.nan) for name in self.entropies}
        # From 1, as on the console.
        update_summary(epoch + 1, trained, dict.fromkeys(self.averages, math.nan) | evaluated, self.summary)

    def log_step(
        self, update: int, loss: float, lr: float, seconds: float, entropies: Callable[[], Sequence[float]] = tuple
    ) -> None:
        """Record one update in TensorBoard, with the entropy of each kernel, and in steps.csv if the run has one.

        Args:
            seconds: Time of all updates up to this one.
        """
        if self.is_primary and self.steps is not None:
            with self.steps.open('a') as file:
                file.write(f'{update},{seconds:.3f},{loss:.6g},{lr:.6g}\n')
        if self.writer is not None:
            self.writer.add_scalar('step/loss', loss, update)
            self.writer.add_scalar('step/lr', lr, update)
            for layer, entropy in enumerate(entropies(), start=1):
                self.writer.add_scalar(f'kernel_entropy/layer_{layer:02d}', entropy, update)

    def log_epoch(self, epoch: int, update: int, trained: dict[str, float], evaluated: dict[str, float]) -> None:
        """Append the row of one epoch, with NaN if there was no evaluation; all rows have the same columns.

        Args:
            update: Number of updates up to its end, the step in TensorBoard.
        """
        if not self.is_primary:
            return
        self._append(epoch, trained, evaluated)
        if self.writer is not None:
            for prefix, values in (('train', trained), ('eval', evaluated)):
                for name, value in values.items():
                    if not math.isnan(value):
                        self.writer.add_scalar(f'{prefix}/{name}', value, update)
            self.writer.flush()


def _open_tensorboard(folder: Path, updates: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "run.tensorboard needs TensorBoard: pip install 'aft-vision[train]', or set run.tensorboard=false"
        ) from error
    return SummaryWriter(str(folder), purge_step=updates + 1 if updates else None)
