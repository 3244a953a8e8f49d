"""One run of a text classifier on transformers' Trainer, and what several seeds give together."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from aft_vision.evaluate import reset_peak_memory
from aft_vision.fastformer import FastformerForSequenceClassification
from aft_vision.fastformer.data.batches import tokenize_dataset
from aft_vision.fastformer.data.table import label_maps
from aft_vision.fastformer.glove import load_glove
from aft_vision.fastformer.tokenize import train_tokenizer
from train.fastformer_schema import TextConfig, text_model_config
from train.fastformer_trainer import METRICS, EpochMeter, TextTrainer, text_metrics, training_arguments

RESULT = 'result.json'


@dataclass(frozen=True)
class TextRun:
    """An experiment with the data that it is for; every seed is a run of its own.

    Attributes:
        folder: Receives a folder `seed_N` for each seed.
        quiet: No progress bars.
    """

    config: TextConfig
    splits: DatasetDict
    folder: Path
    quiet: bool = True

    def seed_dir(self, seed: int) -> Path:
        """The folder of one seed."""
        return self.folder / f'seed_{seed}'

    def train(self, seed: int) -> dict[str, Any]:
        """Train with one seed, test the best epoch once, and give and write the result.

        A seed whose result is there is not run again; an interrupted one goes on from its last checkpoint where
        `run.resume` says so.
        """
        folder, run = self.seed_dir(seed), self.config.run
        if run.resume and (folder / RESULT).is_file():
            return json.loads((folder / RESULT).read_text())
        arguments = training_arguments(self.config, folder, seed, self.quiet)
        set_seed(seed)
        tokenizer = self.make_tokenizer()
        model = self.make_model(tokenizer, seed)
        if run.grad_checkpointing:
            model.gradient_checkpointing_enable({'use_reentrant': False})
        trainer = self.make_trainer(model, tokenizer, arguments)
        reset_peak_memory(arguments.device)
        # The moment that torch's generators are set again: dropout depends on the seed, not on the vocabulary's size.
        set_seed(seed)
        trainer.train(resume_from_checkpoint=last_checkpoint(folder) if run.resume else None)
        trainer.save_model(str(folder / 'best'))
        tested = trainer.evaluate(self.tokenized('test', tokenizer), metric_key_prefix='test')
        parameters = sum(parameter.numel() for parameter in model.parameters())
        result = summarize_run(trainer, self.splits, tested, seed) | {'parameters': parameters}
        if trainer.is_world_process_zero():
            (folder / RESULT).write_text(json.dumps(result, indent=2) + '\n')
        return result

    def evaluate(self, folder: str | Path, split: str) -> dict[str, float]:
        """Evaluate a saved model on a split.

        Raises:
            ValueError: it is no model, or one of other classes.
        """
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        check_classes(model, self.class_names, folder)
        arguments = training_arguments(self.config, self.folder, self.config.run.seeds[0], self.quiet)
        metrics = self.make_trainer(model, tokenizer, arguments).evaluate(self.tokenized(split, tokenizer))
        return {name.removeprefix('eval_'): value for name, value in metrics.items()}

    def tokenized(self, split: str, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        """A split as ids of tokens."""
        return tokenize_dataset(self.splits[split], tokenizer, self.config.data.max_length)

    @property
    def class_names(self) -> list[str]:
        """The classes in the order of their numbers."""
        return self.splits['train'].features['label'].names

    def make_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of `run.init_from`, or one of the training texts."""
        run, data = self.config.run, self.config.data
        if run.init_from is not None:
            return AutoTokenizer.from_pretrained(run.init_from)
        return train_tokenizer(
            self.splits['train']['text'],
            data.tokenizer,
            vocab_size=data.vocab_size,
            min_frequency=data.min_frequency,
            lowercase=data.lowercase,
            max_length=data.max_length,
        )

    def make_model(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
        """The model of `run.init_from`, or a new one, with GloVe's embeddings where the experiment names them."""
        run, data = self.config.run, self.config.data
        if run.init_from is not None:
            model = AutoModelForSequenceClassification.from_pretrained(run.init_from)
            check_classes(model, self.class_names, run.init_from)
            return model
        config = text_model_config(
            self.config.model,
            data.max_length,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            **label_maps(self.splits['train']),
        )
        # Which form of full attention the baseline Transformer has.
        model = FastformerForSequenceClassification._from_config(config, attn_implementation=run.attention)
        if data.glove is not None:
            load_glove(model, tokenizer, data.glove, seed)
        return model

    def make_trainer(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, arguments: TrainingArguments
    ) -> Trainer:
        """transformers' Trainer of the training and validation texts."""
        trainer = TextTrainer(
            model=model,
            args=arguments,
            data_collator=DataCollatorWithPadding(tokenizer),
            train_dataset=self.tokenized('train', tokenizer),
            eval_dataset=self.tokenized('validation', tokenizer),
            processing_class=tokenizer,
            compute_metrics=text_metrics,
            callbacks=[EpochMeter(arguments.device, self.config.run.save_updates)],
        )
        trainer.remove_callback(PrinterCallback)
        return trainer


def summarize_run(trainer: Trainer, splits: DatasetDict, tested: dict[str, float], seed: int) -> dict[str, Any]:
    """What came out of one seed: the best epoch by validation, its test, and what it took."""
    history = trainer.state.log_history
    evaluated = [row for row in history if 'eval_accuracy' in row]
    best = max(evaluated, key=lambda row: row['eval_accuracy'])
    measured = [row for row in history if 'memory_mb' in row]
    seconds = sum(row['seconds'] for row in measured) / sum(row['updates'] for row in measured)
    return {
        'seed': seed,
        'best_epoch': round(best['epoch'], 3),
        **{f'validation_{name}': best[f'eval_{name}'] for name in METRICS},
        **{f'test_{name}': tested[f'test_{name}'] for name in METRICS},
        'seconds_per_epoch': seconds * trainer.state.global_step / trainer.state.epoch,
        'memory_mb': max(row['memory_mb'] for row in measured),
        'updates': trainer.state.global_step,
        'classes': splits['train'].features['label'].num_classes,
        'texts': {name: len(split) for name, split in splits.items()},
        'epochs': [
            {name: row[f'eval_{name}'] for name in ('loss', *METRICS)} | {'epoch': round(row['epoch'], 3)}
            for row in evaluated
        ],
    }


def summarize_seeds(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation (of a sample, n - 1) of what the seeds gave; no deviation of a single one."""
    names = [f'{split}_{metric}' for split in ('test', 'validation') for metric in METRICS]
    summary: dict[str, Any] = {'seeds': [result['seed'] for result in results]}
    for name in (*names, 'seconds_per_epoch', 'memory_mb'):
        values = [result[name] for result in results]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        summary[name] = {'mean': statistics.mean(values), 'std': deviation}
    summary['parameters'] = results[0]['parameters']
    return summary | {'runs': list(results)}


def last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint of transformers' Trainer in a folder, if there is one."""
    return get_last_checkpoint(str(folder)) if folder.is_dir() else None


def check_classes(model: PreTrainedModel, names: Sequence[str], source: str | Path) -> None:
    """Raise a ValueError unless the model has these classes."""
    found = list(dict(model.config.id2label or {}).values())
    if found != list(names):
        raise ValueError(f'expected a model of the classes {", ".join(names)}, got {source} with {", ".join(found)}')
