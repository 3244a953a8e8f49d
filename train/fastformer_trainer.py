"""transformers' Trainer as the text classifiers use it: its arguments, the order of texts, what it measures."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sklearn.metrics import accuracy_score, f1_score
from torch.utils.data import Sampler
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from aft_vision.evaluate import peak_memory_mb
from train.fastformer_schema import TextConfig
from train.texts import BucketSampler

METRICS = ('accuracy', 'macro_f')


class TextTrainer(Trainer):
    """transformers' Trainer with batches of texts of about the same length that do not depend on interruptions."""

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != 'group_by_length':
            return super()._get_train_sampler(train_dataset)
        lengths = [len(ids) for ids in dataset['input_ids']]
        batch_size = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return BucketSampler(batch_size, lengths, self.args.seed)


class EpochMeter(TrainerCallback):
    """Logs the seconds that the updates of each epoch took, evaluation apart, and the peak memory; prints evaluations.

    Args:
        save_updates: Updates between checkpoints within an epoch; None for none.
    """

    def __init__(self, device: torch.device, save_updates: int | None) -> None:
        self.device, self.save_updates = device, save_updates
        self.start, self.first = 0.0, 0

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.start, self.first = time.perf_counter(), state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.save_updates is not None and state.global_step % self.save_updates == 0:
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
        metrics = kwargs['metrics']
        if state.is_world_process_zero and 'eval_accuracy' in metrics and state.global_step > 0:
            found = [f'{name} {100 * metrics[f"eval_{name}"]:.2f} %' for name in METRICS]
            print(f'seed {args.seed}, epoch {state.epoch:.2f}: validation {", ".join(found)}', flush=True)


def training_arguments(config: TextConfig, folder: Path, seed: int, quiet: bool) -> TrainingArguments:
    """The experiment in the words of transformers' Trainer.

    Raises:
        ValueError: the batch cannot be shared out evenly.
    """
    data, optim, schedule, run = config.data, config.optim, config.schedule, config.run
    arguments = TrainingArguments(
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
        train_sampling_strategy='group_by_length' if data.bucket else 'random',
        dataloader_num_workers=data.num_workers,
        dataloader_pin_memory=run.device != 'cpu',
        eval_strategy='epoch',
        save_strategy='epoch',
        save_total_limit=run.keep,
        load_best_model_at_end=True,
        metric_for_best_model='accuracy',
        logging_strategy='steps',
        logging_steps=run.log_updates,
        bf16=run.amp == 'bfloat16',
        fp16=run.amp == 'float16',
        torch_compile=run.compile,
        use_cpu=run.device == 'cpu',
        ddp_find_unused_parameters=False,
        report_to='tensorboard' if run.tensorboard else 'none',
        disable_tqdm=quiet,
    )
    share = config.check_parts(arguments.world_size)
    arguments.per_device_train_batch_size = share
    arguments.per_device_eval_batch_size = data.eval_batch_size or share
    return arguments


def text_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy, and the mean of the classes' F scores, in [0, 1]."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    chosen, labels = np.argmax(logits, axis=-1), prediction.label_ids
    return {
        'accuracy': float(accuracy_score(labels, chosen)),
        'macro_f': float(f1_score(labels, chosen, average='macro', zero_division=0)),
    }
