"""The training loop: epochs of updates, evaluation, the log and the checkpoints."""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timm.utils import distribute_bn
from torch import nn
from tqdm import tqdm

from aft_vision.data import Loaders
from aft_vision.devices import peak_memory_mb
from aft_vision.evaluate import evaluate_all
from train.checkpoint import Saver
from train.diagnosis import NonFiniteLossError, write_diagnosis
from train.distributed import World
from train.log import RunLog
from train.objective import Batch
from train.signals import catch_signals, stop_run
from train.state import TrainState

# The progress bar and the log show the loss only this often.
UPDATES_PER_REPORT = 10
REMEDY = 'try a lower optim.lr or optim.clip_grad=1.0'


def train_step(state: TrainState, micro_batches: Iterable[Batch]) -> float:
    """Make one update and return the mean loss of its micro-batches over all processes.

    The terms of `regularize` are part of the update, not of the returned loss, so that runs with and without them are
    comparable. Randomness depends only on `run.seed` and the numbers of the update and the micro-batch.

    Args:
        micro_batches: `optim.accumulate` batches of the same size, of inputs and targets: images (B, 3, H, W) or their
            patches, and class indices (B,), or tokens and targets (B, T).

    Raises:
        NonFiniteLossError: the loss or the gradient is not finite, on any process; no weight has changed.
        ValueError: micro-batches are missing; no weight has changed.
    """
    world, optimizer, count = state.world, state.optimizer, state.loop.accumulate
    total, done = torch.zeros((), device=world.device), 0
    optimizer.zero_grad(set_to_none=True)
    state.regularization.set_tau(state.progress.updates)
    for index, batch in enumerate(micro_batches):
        done = index + 1
        inputs, targets = state.prepare_micro_batch(index, batch)
        # With several processes, only the last micro-batch synchronises gradients.
        with state.task.no_sync() if done < count else contextlib.nullcontext():
            with state.autocast():
                loss = state.task(inputs, targets)['loss'] / count
            # It depends only on the weights, so it is added in one micro-batch of the update.
            penalty = state.regularization.penalty() if done == count else 0.0
            state.scaler.scale(loss + penalty).backward()
        total += loss.detach()
    if done < count:
        raise ValueError(
            f'expected {state.progress.updates_per_epoch} updates of {count} batches in an epoch, as the schedule '
            f'counts them, got {state.progress.updates_of_epoch} and {done} batches of the next one'
        )
    loss_value = world.mean(total).item()
    if not math.isfinite(loss_value):
        raise NonFiniteLossError(loss_value)
    # A gradient may overflow even if the loss does not. With float16 the scaler detects this and skips the update.
    if state.loop.clip_grad is not None or not state.scaler.is_enabled():
        state.scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(state.task.get_clip_parameters(), state.loop.clip_grad or math.inf)
        if not state.scaler.is_enabled() and not norm.isfinite():
            raise NonFiniteLossError(norm.item())
    state.scaler.step(optimizer)
    state.scaler.update()
    state.progress.updates += 1
    state.task.update_ema(step=state.progress.updates if state.loop.ema_warmup else None)
    state.scheduler.step_update(num_updates=state.progress.updates)
    return loss_value


def skip_update(state: TrainState, loader: Any, loss: float, folder: Path) -> None:
    """Skip an update whose loss is not finite, and write a diagnosis.

    Raises:
        NonFiniteLossError: `run.skip_nonfinite` updates have already been skipped.
    """
    reached = state.progress
    diagnosis = write_diagnosis(state, loader, loss, folder)
    message = (
        f'expected a finite training loss and gradient, got {loss} in epoch {reached.epoch + 1}, '
        f'update {reached.updates + 1}; {diagnosis} says where'
    )
    if reached.skipped >= state.loop.skip_nonfinite:
        raise NonFiniteLossError(f'{message}; the weights are unchanged; {REMEDY}')
    if state.world.is_primary:
        tqdm.write(f'skipped: {message}')
    reached.skipped += 1
    reached.updates += 1
    state.scheduler.step_update(num_updates=reached.updates)


def train_one_epoch(
    state: TrainState,
    loader: Any,
    log: RunLog | None = None,
    progress: bool = True,
    after_update: Callable[[], None] = lambda: None,
    folder: Path = Path(),
    before_error: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Train for one epoch, for the rest of an interrupted one, or until the budget of the run is used up.

    Args:
        loader: The batches of the remaining updates of the epoch.
        after_update: Called after every update, also one that is skipped.
        folder: Folder of the run, for a diagnosis of each update whose loss is not finite.
        before_error: Called before the error of a batch that a process cannot read, in all processes.

    Returns:
        `loss` (mean), `lr` (of the last update), `images_per_second` (including loading; or the unit of the objective),
        `seconds`, `memory_mb` (the peak so far, of the device, or of the process on a CPU), and the metrics of the
        objective. With kernel regularisation also entropies after the epoch in nats: `kernel_entropy`, the mean per
        head, and `kernel_entropy_NN` of each layer.

    Raises:
        NonFiniteLossError: more updates than `run.skip_nonfinite` had a loss that is not finite.
        ValueError: the loader ended before the epoch, or no update had a finite loss.
    """
    reached = state.progress
    state.model.train()
    # A restored epoch may be trained and not evaluated.
    unread = loader if reached.updates_of_epoch < reached.updates_per_epoch else ()
    updates = _read_together(unread, state.loop.accumulate, state.world, before_error)
    bar = _progress_bar(state, progress)
    for _ in bar:
        if state.budget_exhausted():
            break
        # The largest, if layers differ.
        lr = max(group['lr'] for group in state.optimizer.param_groups)
        restore_statistics = _keep_statistics(state)
        start = time.perf_counter()
        try:
            loss = train_step(state, next(updates, []))
        except NonFiniteLossError as error:
            skip_update(state, loader, error.args[0], folder)
            restore_statistics()
            after_update()
            continue
        reached.epoch_done += 1
        reached.epoch_loss += loss
        reached.epoch_lr = lr
        reached.epoch_seconds += time.perf_counter() - start
        if reached.updates % UPDATES_PER_REPORT == 0 or reached.updates_of_epoch == reached.updates_per_epoch:
            bar.set_postfix(_progress_values(state, loss, lr))
            if log is not None:
                log.log_step(reached.updates, loss, lr, reached.seconds, state.regularization.entropies)
        after_update()
    if not reached.epoch_done:
        raise ValueError('expected an update with a finite loss in the epoch, got none')
    return _epoch_metrics(state)


def _read_together(
    loader: Iterable[Batch], accumulate: int, world: World, before_error: Callable[[], None]
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each update until a process cannot read one, which ends all.

    All of an update are read before its first pass, which changes the running statistics of the model.

    Raises:
        DistNetworkError: another process cannot read its batch.
    """
    batches, failed, read, previous = iter(loader), None, [], signal.getsignal(signal.SIGCHLD)
    try:
        while True:
            try:
                read = list(islice(batches, accumulate))
            except Exception as error:
                failed = error
            # Torch raises the end of a loading process wherever this one is, also within an update, by a handler that
            # the first batch installs; the loader itself finds it within 5 s when it needs the next batch.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if world.any(failed is not None):
                before_error()
                # A launcher may kill all processes when one has ended.
                world.wait()
                raise failed or dist.DistNetworkError('another process cannot read its training data')
            if not read:
                return
            yield read
    finally:
        signal.signal(signal.SIGCHLD, previous or signal.SIG_DFL)


def _keep_statistics(state: TrainState) -> Callable[[], None]:
    """Keep the running statistics, which a batch that is skipped makes not finite; return what restores them."""
    kept = [(x, x.clone()) for x in state.model.buffers()] if state.loop.skip_nonfinite else []

    def restore() -> None:
        for buffer, before in kept:
            buffer.copy_(before)

    return restore


def _epoch_metrics(state: TrainState) -> dict[str, float]:
    reached = state.progress
    updates_per_second = reached.epoch_done / reached.epoch_seconds
    loss = reached.epoch_loss / reached.epoch_done
    return {
        'loss': loss,
        'lr': reached.epoch_lr,
        f'{state.objective.unit}_per_second': state.loop.batch_size * updates_per_second,
        'seconds': reached.epoch_seconds,
        'memory_mb': peak_memory_mb(state.world.device),
        **state.objective.train_metrics(loss, reached.updates, reached.seconds, updates_per_second),
        **state.regularization.metrics(),
    }


def fit(state: TrainState, loaders: Loaders, saver: Saver, progress: bool = True) -> TrainState:
    """Train to the last epoch; write the log, `last.pth` after each epoch and `best.pth` after the best.

    `last.pth` is written before each evaluation too, and when a process cannot read its training data, so that neither
    loses an update. A restored state continues where it was saved, except for streamed data sets, which can only be
    read from the start of an epoch. On Ctrl-C, SIGTERM and SIGUSR1 the update or the evaluation is finished and the
    state saved; a second Ctrl-C ends the run immediately.

    Raises:
        SystemExit: one of these signals was received; the code is 128 plus its number.
    """
    reached, loop = state.progress, state.loop
    progress = progress and state.world.is_primary
    if not state.budget_exhausted():
        # A continued run that ended within an epoch has a row for this epoch already.
        reached.history = [row for row in reached.history if row['epoch'] < reached.epoch]
    with (
        _until_signal(state, saver) as (after_update, stop_if_asked),
        contextlib.closing(RunLog(saver.folder, state)) as log,
    ):
        for epoch in range(reached.epoch, loop.epochs):
            if is_complete(state):
                break
            if not state.budget_exhausted() and reached.updates_of_epoch < reached.updates_per_epoch:
                if loaders.is_stream and reached.updates_of_epoch:
                    reached.restart_epoch()
                    state.set_rate()
                loaders.set_epoch(epoch, reached.updates_of_epoch)
            trained = train_one_epoch(
                state, loaders.train, log, progress, after_update, saver.folder, partial(_save_unsaved, state, saver)
            )
            # The evaluation may fail: at a damaged image, for lack of memory, at a limit of time.
            _save_unsaved(state, saver)
            spent = state.budget_exhausted()
            if reached.updates_of_epoch == reached.updates_per_epoch:
                reached.epoch = epoch + 1
                reached.restart_epoch()
                state.set_rate()
            due = spent or reached.epoch % loop.eval_every == 0 or reached.epoch == loop.epochs
            try:
                evaluated, evaluators = _evaluate(state, loaders.validation if due else None)
            except FloatingPointError:
                saver.withdraw_last(state)
                raise
            row = {f'train_{name}': value for name, value in trained.items()}
            reached.history.append({'epoch': epoch, **row, **{f'eval_{k}': v for k, v in evaluated.items()}})
            _keep_best(state, evaluated, evaluators, saver)
            saver.save_last(state)
            log.log_epoch(epoch, state.progress.updates, trained, evaluated)
            if state.world.is_primary:
                tqdm.write(_epoch_line(state))
            # It may have come during the evaluation.
            stop_if_asked()
    return state


def _save_unsaved(state: TrainState, saver: Saver) -> None:
    """Write `last.pth` if there are updates of the epoch that no checkpoint has."""
    if state.progress.epoch_done and state.progress.updates != saver.saved_updates:
        saver.save_last(state)


def is_complete(state: TrainState) -> bool:
    """Return whether the budget of a run is used up and its last updates are in its history."""
    reached = state.progress
    measured = not reached.epoch_done or any(row['epoch'] == reached.epoch for row in reached.history)
    return state.budget_exhausted() and measured


@contextlib.contextmanager
def _until_signal(state: TrainState, saver: Saver) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Yield the functions to call after every update, and after every epoch, which is saved.

    The first one saves when due; both stop after a signal.
    """
    with catch_signals() as received:

        def asked() -> int:
            # The processes must stop after the same update, and with the same exit code: a launcher that returns the
            # highest one must return the signal's.
            return state.world.largest(received[0] if received else 0)

        def stop(number: int) -> None:
            if number:
                # A launcher may kill all processes when one has ended, so wait until the first one has saved.
                state.world.wait()
                stop_run(number, state.progress.updates, saver.experiment)

        def after_update() -> None:
            number = asked()
            if number or saver.is_due():
                saver.save_last(state)
            stop(number)

        yield after_update, lambda: stop(asked())


def _evaluate(state: TrainState, loader: Any | None) -> tuple[dict[str, float], dict[str, Any]]:
    """Evaluate the weights and their average; without a loader return NaN.

    Returns:
        The metrics, with the prefix `ema_` for the average, and by prefix the evaluators.
    """
    models = {'': state.model}
    if state.averaged_model is not None:
        models['ema_'] = state.averaged_model
    names, world = state.objective.metrics, state.world
    evaluators = {prefix: state.objective.create_evaluator(state.task) for prefix in models}
    if loader is None:
        return {prefix + name: math.nan for prefix in models for name in names}, evaluators
    if world.is_distributed:
        # Each process has the statistics of its own batches; saved are the first one's.
        for model in models.values():
            distribute_bn(model, world.size, reduce=False)
    options: dict[str, Any] = {
        'amp_dtype': state.amp_dtype,
        'distributed': world.is_distributed,
        'evaluator': iter(evaluators.values()).__next__,
    }
    metrics = evaluate_all(list(models.values()), loader, world.device, **options)
    results = {prefix + name: each[name] for prefix, each in zip(models, metrics, strict=True) for name in names}
    if not math.isfinite(results['loss']):
        raise FloatingPointError(
            f'expected a finite validation loss, got {results["loss"]} after epoch {state.progress.epoch}; '
            f'the checkpoints are those before it, as far as run.keep goes back; {REMEDY}'
        )
    return results, evaluators


def _keep_best(state: TrainState, evaluated: dict[str, float], evaluators: dict[str, Any], saver: Saver) -> None:
    """Save the weights or their average if they are the best so far, of equal results those with the lower loss."""
    reached, is_better, name = state.progress, state.objective.is_better, state.objective.best
    value, loss = evaluated[name], evaluated['loss']
    average, average_loss = evaluated.get(f'ema_{name}', math.nan), evaluated.get('ema_loss', math.nan)
    averaged = state.averaged_model if is_better(average, value, average_loss, loss) else None
    if averaged is not None:
        value, loss = average, average_loss
    # NaN is never better, so an epoch without an evaluation is never the best.
    if is_better(value, reached.best, loss, reached.best_eval_loss):
        reached.best, reached.best_eval_loss = value, loss
        by_class = getattr(evaluators['' if averaged is None else 'ema_'], 'by_class', None)
        saver.save_best(state, (averaged or state.model).state_dict(), averaged is not None, by_class)


def _progress_bar(state: TrainState, progress: bool) -> tqdm:
    """Build the progress bar over the remaining updates of the epoch."""
    reached = state.progress
    return tqdm(
        range(reached.updates_of_epoch, reached.updates_per_epoch),
        desc=f'epoch {reached.epoch + 1}/{state.loop.epochs}',
        initial=reached.updates_of_epoch,
        total=reached.updates_per_epoch,
        unit='update',
        leave=False,
        disable=None if progress else True,
    )


def _progress_values(state: TrainState, loss: float, lr: float) -> dict[str, str]:
    """Return the values of the progress bar; the remaining time is for all epochs, without evaluation."""
    reached = state.progress
    seconds = reached.epoch_seconds / reached.epoch_done
    left = (state.total_updates - reached.updates) * seconds
    if state.loop.max_seconds is not None:
        left = max(min(left, state.loop.max_seconds - reached.seconds), 0)
    return {
        'loss': f'{loss:.3f}',
        'lr': f'{lr:.2e}',
        f'{state.objective.unit}/s': f'{state.loop.batch_size / seconds:.0f}',
        'left': tqdm.format_interval(left),
    }


def _epoch_line(state: TrainState) -> str:
    row = state.progress.history[-1]
    line = f'epoch {row["epoch"] + 1:.0f}/{state.loop.epochs}  loss {row["train_loss"]:.3f}'
    unit = state.objective.unit
    line += f'  lr {row["train_lr"]:.2e}  {row[f"train_{unit}_per_second"]:.0f} {unit}/s'
    if 'train_kernel_entropy' in row:
        line += f'  kernel entropy {row["train_kernel_entropy"]:.3f} nats'
    return line + state.objective.describe(row)
