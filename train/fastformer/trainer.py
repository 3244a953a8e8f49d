"""transformers' Trainer for the tasks: arguments, order of texts, metrics and checkpoints."""

import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather
from datasets import Dataset
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from aft_vision.devices import peak_memory_mb
from train.adjust import note_long_warmup
from train.fastformer.schema import TextConfig
from train.signals import stop_run

# The weights of a checkpoint in one file, or the list of its files.
WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)


class BucketSampler(LengthGroupedSampler):
    """transformers' sampler of texts of similar length, with an order that depends only on the seed and the epoch.

    transformers' sampler uses torch's global generator, so an epoch resumed half-way would have another order.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: int) -> None:
        super().__init__(batch_size, lengths=lengths, generator=torch.Generator())
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order."""
        # Of both numbers, not of their sum, which would repeat for the next seed.
        self.generator.manual_seed(int(np.random.SeedSequence((self.seed, epoch)).generate_state(1)[0]))


class SetEpoch(TrainerCallback):
    """A callback that tells a sampler the epoch."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.sampler.set_epoch(int(state.epoch or 0))


def with_epochs(trainer: Trainer, sampler: Sampler) -> Sampler:
    """Return a sampler with a method `set_epoch`, whose epoch is set in every epoch of the trainer.

    Trainer calls the method too, but not in an epoch that several processes resume half-way: there accelerate wraps the
    sampler.
    """
    # The file of an earlier training.
    trainer.remove_callback(SetEpoch)
    trainer.add_callback(SetEpoch(sampler))
    return sampler


class EpochTrainer(Trainer):
    """transformers' Trainer that saves an epoch before its evaluation, which may fail.

    A run that is resumed from there evaluates the epoch first. Of epochs with equal results the one with the lower
    validation loss is the best.
    """

    # Updates of the newest checkpoint that this process has written or read.
    saved_step: int | None = None

    def _evaluate(self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False) -> Any:
        # Trainer would go on with the rest of an epoch within which the updates end.
        if float(self.state.epoch or 0).is_integer():
            self._save_checkpoint(self.model, trial)
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        state = self.state
        if state.global_step and float(state.epoch or 0).is_integer() and not is_evaluated(state):
            self.saved_step = state.global_step
            # A loader draws from the generators.
            self._load_rng_state(resume_from_checkpoint)
            self._determine_best_metric(self._evaluate(None, None), None)
            self._save_checkpoint(self.model, None)
        return prepared

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial))
        if self.saved_step == self.state.global_step:
            self._save_evaluated(folder)
            return
        super()._save_checkpoint(model, trial)
        self.saved_step = self.state.global_step

    def _save_evaluated(self, folder: Path) -> None:
        """Save what the evaluation has changed: the state and the generators. The other files stay whole."""
        state = self.state
        parent, best = (
            folder / f'{PREFIX_CHECKPOINT_DIR}-{step}' for step in (state.global_step, state.best_global_step)
        )
        if best.is_dir():
            state.best_model_checkpoint = str(best)
        with tempfile.TemporaryDirectory(dir=parent) as written:
            self._save_rng_state(written)
            if self.args.should_save:
                state.save_to_json(str(Path(written) / TRAINER_STATE_NAME))
            for path in Path(written).iterdir():
                os.replace(path, parent / path.name)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        state, name = self.state, f'eval_{self.args.metric_for_best_model}'
        if metrics[name] == state.best_metric and metrics.get('eval_loss', math.inf) < _loss_at(state):
            state.best_global_step = state.global_step
            return True
        return super()._determine_best_metric(metrics, trial)


def is_evaluated(state: TrainerState) -> bool:
    """Return whether the log has an evaluation after the last update."""
    return any(
        row.get('step') == state.global_step and any(key.startswith('eval_') for key in row)
        for row in state.log_history
    )


def _loss_at(state: TrainerState) -> float:
    """Return the validation loss of the best epoch so far."""
    best = [row for row in state.log_history if row.get('step') == state.best_global_step and 'eval_loss' in row]
    return best[-1]['eval_loss'] if best else -math.inf


class TextTrainer(EpochTrainer):
    """transformers' Trainer with batches of texts of similar length that do not depend on interruptions."""

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != 'group_by_length':
            return super()._get_train_sampler(train_dataset)
        lengths = [len(ids) for ids in dataset['input_ids']]
        # The texts of an update, whoever has them, so that the order does not depend on the number of processes.
        batch_size = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return with_epochs(self, BucketSampler(batch_size, lengths, self.args.seed))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn about weights that a checkpoint lacks, except those tied to existing weights."""
        model: Any = self.model
        tied = model.all_tied_weights_keys
        missing = [key for key in load_result.missing_keys if key not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))


class EpochMeter(TrainerCallback):
    """A callback that logs training time per epoch and peak memory, and prints evaluations.

    Args:
        save_updates: Updates between checkpoints within an epoch; None for none.
        metrics: What evaluation measures, in [0, 1], or a loss in nats.
    """

    def __init__(self, device: torch.device, save_updates: int | None, metrics: Sequence[str]) -> None:
        self.device, self.save_updates, self.metrics = device, save_updates, metrics
        self.start, self.first = 0.0, 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        note_long_warmup(int(args.warmup_steps), state.max_steps)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.start, self.first = time.perf_counter(), state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # After the last update of an epoch the checkpoint is written when that is evaluated.
        within = not float(state.epoch or 0).is_integer() and state.global_step < state.max_steps
        if self.save_updates is not None and within and state.global_step % self.save_updates == 0:
            control.should_save = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        seconds = time.perf_counter() - self.start
        state.log_history.append(
            {
                'epoch': state.epoch,
                'step': state.global_step,
                'updates': state.global_step - self.first,
                'seconds': seconds,
                'memory_mb': peak_memory_mb(self.device),
            }
        )

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        results = {name: value for name in self.metrics if (value := kwargs['metrics'].get(f'eval_{name}')) is not None}
        if state.is_world_process_zero and results and state.global_step > 0:
            print(f'seed {args.seed}, epoch {state.epoch:.2f}: validation {describe(results)}', flush=True)


class StopAfterSignal(TrainerCallback):
    """A callback that saves and stops after the update, or the evaluation, in which any process got a signal.

    Args:
        received: Numbers of the signals that this process received.
        config: The resolved experiment, in the folder of the runs.
    """

    def __init__(self, received: list[int], config: Path) -> None:
        self.received, self.config = received, config
        self.saving = self.epoch_ended = False
        # The largest signal of any process, so that all end with the same exit code.
        self.stopping = 0

    def asked(self, args: TrainingArguments) -> int:
        """Return the largest signal that any process has received, 0 for none: they must stop after the same update."""
        return int(gather(torch.tensor(self.received[:1] or [0], device=args.device)).max())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.stopping, self.epoch_ended = self.asked(args), False
        # After the last update of an epoch the checkpoint is written when that is evaluated.
        if self.stopping and not float(state.epoch or 0).is_integer() and state.global_step < state.max_steps:
            control.should_save = self.saving = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.epoch_ended = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # After the last update the seed is finished first.
        if state.global_step >= state.max_steps:
            return
        if self.epoch_ended:
            # It may have come during the evaluation.
            self.stopping = self.asked(args)
        if self.stopping and (self.saving or self.epoch_ended):
            # torchrun ends the others when one process has ended: each must have written its part.
            PartialState().wait_for_everyone()
            stop_run(self.stopping, state.global_step, self.config)


def describe(metrics: Mapping[str, float]) -> str:
    """Format metrics in percent and losses in nats."""
    return ', '.join(f'{name} {describe_value(name, value)}' for name, value in metrics.items())


def describe_value(name: str, value: float, deviation: float | None = None) -> str:
    """Format a metric in percent or a loss in nats, with its standard deviation if there is one."""
    scale, digits, unit = (1, 4, 'nats') if name.endswith('loss') else (100, 2, '%')
    spread = '' if deviation is None else f' +- {scale * deviation:.{digits}f}'
    return f'{scale * value:.{digits}f}{spread} {unit}'


def training_arguments(
    config: TextConfig,
    folder: Path,
    seed: int,
    best_metric: str,
    quiet: bool,
    arguments_class: type[TrainingArguments] = TrainingArguments,
    **more: Any,
) -> TrainingArguments:
    """Convert the experiment to arguments of transformers' Trainer.

    Args:
        folder: Receives the checkpoints.
        best_metric: The metric that chooses the best epoch, or `loss`.
        arguments_class: A subclass of TrainingArguments, for another Trainer.
        more: Further arguments of that subclass.

    Raises:
        ValueError: the batch cannot be shared out evenly.
    """
    data, optim, schedule, run = config.data, config.optim, config.schedule, config.run
    arguments = arguments_class(
        output_dir=str(folder),
        seed=seed,
        data_seed=seed,
        num_train_epochs=schedule.epochs,
        max_steps=schedule.max_updates or -1,
        lr_scheduler_type=schedule.kind,
        warmup_steps=schedule.warmup_updates,
        optim=optim.name,
        learning_rate=optim.lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_epsilon=optim.eps,
        max_grad_norm=optim.clip_grad or 0.0,
        gradient_accumulation_steps=optim.accumulate,
        train_sampling_strategy='group_by_length' if getattr(data, 'bucket', False) else 'random',
        dataloader_num_workers=data.num_workers,
        dataloader_pin_memory=run.device != 'cpu',
        save_total_limit=run.keep,
        metric_for_best_model=best_metric,
        greater_is_better=best_metric != 'loss',
        logging_steps=run.log_updates,
        bf16=run.amp == 'bfloat16',
        fp16=run.amp == 'float16',
        torch_compile=run.compile,
        use_cpu=run.device == 'cpu',
        report_to='tensorboard' if run.tensorboard else 'none',
        disable_tqdm=quiet or not sys.stderr.isatty(),
        eval_strategy='epoch',
        save_strategy='epoch',
        load_best_model_at_end=True,
        ddp_find_unused_parameters=False,
        **more,
    )
    arguments.per_device_train_batch_size = share = config.check_batch_size(arguments.world_size)
    arguments.per_device_eval_batch_size = data.eval_batch_size or share
    return arguments


def finished_training(folder: Path) -> tuple[TrainerState, Path] | None:
    """Return the state and the best checkpoint of a training without updates to come; None if there are any.

    Trainer would do one more update where `schedule.max_updates` ends within an epoch, and take the last checkpoint for
    the best one if the folder was moved.
    """
    last = last_checkpoint(folder)
    if last is None:
        return None
    state = TrainerState.load_from_json(str(Path(last) / TRAINER_STATE_NAME))
    best = folder / f'{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}'
    complete = state.global_step >= state.max_steps and is_evaluated(state)
    return (state, best) if complete and best.is_dir() else None


def last_checkpoint(folder: Path) -> str | None:
    """Return the newest complete checkpoint of transformers' Trainer in a folder, or None.

    A run that is killed while writing leaves a checkpoint without the state, which Trainer writes last.
    """
    whole = [path.parent for path in folder.glob(f'{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}')]
    whole = [path for path in whole if any((path / name).is_file() for name in WEIGHTS)]
    return str(max(whole, key=lambda path: int(path.name.rpartition('-')[2]))) if whole else None
