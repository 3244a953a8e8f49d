"""The runs of an experiment with transformers' Trainer, one per seed, and their summary."""

import json
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from accelerate import PartialState
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import IntervalStrategy

from aft_vision.devices import reset_peak_memory
from aft_vision.fastformer.glove import load_glove
from aft_vision.fastformer.tokenize import train_tokenizer
from aft_vision.files import write_json
from train.fastformer.schema import RESERVED_KEYS, TextConfig, stated_model, text_model_config
from train.fastformer.trainer import EpochMeter, StopAfterSignal, finished_training, last_checkpoint, training_arguments
from train.signals import catch_signals, stop_run

CONFIG, RESULT = 'config.yaml', 'result.json'


@dataclass(frozen=True)
class TextRun(ABC):
    """An experiment with its data; every seed is a separate run. A subclass is a task.

    Attributes:
        folder: Receives a folder `seed_N` for each seed.
        quiet: No progress bars.
        splits: The examples `train`, `validation` and `test`; the task decides their columns.
        schema: The dataclass of the task's experiments.
        metrics: Names of the metrics, in [0, 1] or a loss in nats, without Trainer's prefix `eval_`.
        model_class: The class of a new model.
        auto_model: The class of transformers that loads a saved model of the task.
        limits: Fields of a saved model's configuration that limit keys of `data`.
    """

    config: Any
    folder: Path
    quiet: bool = True
    splits: Mapping[str, Any] = field(default_factory=dict)
    _tokenized: dict[str, Any] = field(default_factory=dict, init=False)
    # Counts of the rows of the embedding that are from GloVe, drawn, or padding; the same for all seeds.
    _coverage: dict[str, int] = field(default_factory=dict, init=False)

    schema: ClassVar[type[TextConfig]]
    metrics: ClassVar[tuple[str, ...]]
    model_class: ClassVar[Any]
    auto_model: ClassVar[Any]
    limits: ClassVar[dict[str, str]] = {'max_position_embeddings': 'max_length'}

    @property
    def best_metric(self) -> str:
        """Return the metric that selects the tested epoch: a validation metric or `loss`; here the first."""
        return self.validation_metrics[0]

    @property
    def validation_metrics(self) -> tuple[str, ...]:
        """Return which of `metrics` and `loss` are computed each epoch; here all metrics."""
        return self.metrics

    @classmethod
    @abstractmethod
    def read(cls, config: Any, folder: Path, quiet: bool = True) -> Self:
        """Build the run of an experiment and read its data.

        Raises:
            ValueError: a file is missing, damaged or of another layout.
        """

    def check_splits(self) -> None:  # noqa: B027
        """Raise a ValueError if a split is unfit for training or for its measurement; here all are fit."""

    def counts(self) -> dict[str, int]:
        """Return the number of examples by split."""
        return {name: len(split) for name, split in self.splits.items()}

    @abstractmethod
    def texts(self) -> Sequence[str]:
        """Return the training texts, for the vocabulary."""

    @abstractmethod
    def examples(self, split: str, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        """Return a split for Trainer, with a column `input_ids`."""

    @abstractmethod
    def model_fields(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return the fields of the model's configuration that the data decide, besides what every task has."""

    def new_model(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """Create a model with initial weights."""
        max_length, config_class = self.config.data.max_length, self.model_class.config_class
        fields = {'vocab_size': len(tokenizer), 'pad_token_id': tokenizer.pad_token_id, **self.model_fields(tokenizer)}
        config = text_model_config(self.stated_model(), max_length, config_class, **fields)
        # The implementation of full attention in the baseline Transformer.
        return self.model_class._from_config(config, attn_implementation=self.config.run.attention)

    @abstractmethod
    def new_trainer(self, **options: Any) -> Trainer:
        """Create the Trainer of the task from the options common to all tasks."""

    def check_loaded(self, model: PreTrainedModel, source: str | Path) -> None:
        """Raise a ValueError if a saved model does not fit this experiment; here if its texts are shorter."""
        for name, key in self.limits.items():
            length, longest = getattr(self.config.data, key), getattr(model.config, name, None)
            if longest is not None and longest < length:
                raise ValueError(f'expected data.{key} of at most {longest}, as {source} takes, got {length}')

    def summarize_data(self) -> dict[str, Any]:
        """Return the entries about the data in the result of a seed."""
        return {'texts': self.counts()}

    def seed_dir(self, seed: int) -> Path:
        """Return the folder of one seed."""
        return self.folder / f'seed_{seed}'

    def train(self, seed: int) -> dict[str, Any]:
        """Train with one seed, test the best epoch once, and write and return the result.

        A seed with a result is not run again; with `run.resume` an interrupted one continues from its last checkpoint.
        """
        folder, run = self.seed_dir(seed), self.config.run
        if run.resume and (folder / RESULT).is_file():
            return json.loads((folder / RESULT).read_text())
        arguments = self.arguments(folder, seed)
        set_seed(seed)
        tokenizer = self.tokenizer
        finished = finished_training(folder) if run.resume else None
        model = self.make_model(tokenizer, seed)
        if finished is not None:
            model = self.load_model(finished[1])
        if run.grad_checkpointing:
            model.activation_checkpointing_enable({'use_reentrant': False})
        trainer = self.make_trainer(model, tokenizer, arguments)
        if self._coverage and trainer.is_world_process_zero():
            known, drawn = self._coverage['found'], self._coverage['drawn']
            print(f'seed {seed}: GloVe has {known} of the {known + drawn} words of the vocabulary', flush=True)
        reset_peak_memory(arguments.device)
        # Seed torch's generators again here, so that dropout depends on the seed and not on the size of the vocabulary.
        set_seed(seed)
        with catch_signals() as received:
            stop = StopAfterSignal(received, self.folder / CONFIG)
            trainer.add_callback(stop)
            if finished is None:
                trainer.train(resume_from_checkpoint=last_checkpoint(folder) if run.resume else None)
            else:
                trainer.state = finished[0]
                # Saved by the process which wrote it.
                trainer.state.is_world_process_zero = trainer.is_world_process_zero()
                trainer.state.is_local_process_zero = trainer.is_local_process_zero()
            trainer.save_model(str(folder / 'best'))
            tested = self.test(trainer, tokenizer, 'test', folder)
            parameters = sum(parameter.numel() for parameter in model.parameters())
            result = self.summarize_run(trainer, tested, seed) | {'parameters': parameters}
            if trainer.is_world_process_zero():
                write_json(folder / RESULT, result)
        number = stop.asked(arguments)
        if number:
            PartialState().wait_for_everyone()
            stop_run(number, trainer.state.global_step, self.folder / CONFIG)
        return result

    def evaluate(self, source: str | Path, split: str) -> dict[str, float]:
        """Evaluate a saved model on a split.

        Raises:
            ValueError: it is no model, or not one for this experiment.
        """
        trainer = self.load_trainer(source)
        return self.test(trainer, trainer.processing_class, split, self.output_dir(source))

    def evaluate_all(self, sources: Sequence[Path], split: str) -> dict[str, dict[str, float]]:
        """Evaluate several saved models by name; a task may add their ensemble."""
        return {str(source): self.evaluate(source, split) for source in sources}

    def output_dir(self, source: str | Path) -> Path:
        """Return the folder for predictions of a saved model: next to a model of these runs, else the runs' folder."""
        if self.config.run.init_from is None:
            return Path(source).parent
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder

    def load_trainer(self, source: str | Path) -> Any:
        """Create the Trainer of a saved model for evaluation, without examples."""
        arguments = self.arguments(self.folder, self.config.run.seeds[0])
        arguments.eval_strategy = IntervalStrategy.NO
        tokenizer = AutoTokenizer.from_pretrained(source)
        return self.make_trainer(self.load_model(source), tokenizer, arguments, (None, None))

    def test(self, trainer: Trainer, tokenizer: PreTrainedTokenizerBase, split: str, folder: Path) -> dict[str, float]:
        """Evaluate a trainer's model on a split.

        Args:
            folder: Folder for the predictions of the model.

        Returns:
            `metrics` by name, without those that cannot be computed.
        """
        tested = trainer.evaluate(self.tokenized(split, tokenizer), metric_key_prefix='test')
        return {name.removeprefix('test_'): value for name, value in tested.items()}

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of all seeds."""
        return self.make_tokenizer()

    def tokenized(self, split: str, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        """Return the `examples` of a split, which are kept until they are needed for another tokenizer."""
        if self._tokenized.get('tokenizer') is not tokenizer:
            self._tokenized.clear()
            self._tokenized['tokenizer'] = tokenizer
        if split not in self._tokenized:
            self._tokenized[split] = self.examples(split, tokenizer)
        return self._tokenized[split]

    def make_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of `run.init_from`, or train one."""
        run, data = self.config.run, self.config.data
        if run.init_from is not None:
            return AutoTokenizer.from_pretrained(run.init_from, model_max_length=data.max_length)
        return train_tokenizer(
            self.texts(),
            data.tokenizer,
            vocab_size=data.vocab_size,
            min_frequency=data.min_frequency,
            lowercase=data.lowercase,
            max_length=data.max_length,
        )

    def make_model(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
        """Return the model of `run.init_from`, or a new one.

        Raises:
            ValueError: the experiment contradicts the saved model.
        """
        source = self.config.run.init_from
        if source is None:
            model = self.new_model(tokenizer)
            self.fill_embeddings(model, tokenizer, seed)
            return model
        model = self.load_model(source)
        self.check_as_stated(model, source)
        return model

    def fill_embeddings(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        """Fill the embedding of a new model with the vectors of `data.glove`, if set.

        Raises:
            ValueError: it has no word of the vocabulary, is damaged or of another width.
        """
        path = self.config.data.glove
        if path is None:
            return
        coverage = load_glove(model, tokenizer, path, seed)
        if coverage.found == 0:
            raise ValueError(f'expected words of the vocabulary in data.glove, got none of {coverage.drawn} in {path}')
        self._coverage.update(coverage._asdict())

    def load_model(self, source: str | Path) -> PreTrainedModel:
        """Load a saved model for this experiment."""
        model = self.auto_model.from_pretrained(source, attn_implementation=self.config.run.attention)
        self.check_loaded(model, source)
        return model

    def check_as_stated(self, model: PreTrainedModel, source: str | Path) -> None:
        """Raise a ValueError if the experiment contradicts the model of `run.init_from`."""
        glove = self.config.data.glove
        if glove is not None:
            raise ValueError(f'expected data.glove=null, as run.init_from ({source}) has embeddings, got {glove!r}')
        for key, stated in self.stated_model().items():
            if key in RESERVED_KEYS:
                # Of a preset, where the data decide.
                continue
            trained = getattr(model.config, key, None)
            if stated is not None and stated != trained:
                raise ValueError(
                    f'expected model.{key} = {trained!r} as in run.init_from ({source}), or nothing in the model '
                    f'section, got {stated!r}'
                )

    def stated_model(self) -> dict[str, Any]:
        """Return the fields of the model's configuration that the experiment sets."""
        stated = stated_model(self.config.model)
        return {key: value for key, value in stated.items() if key not in self.config.more_keys}

    def arguments(self, folder: Path, seed: int, **more: Any) -> TrainingArguments:
        """Convert the experiment to arguments of transformers' Trainer; `more` as `training_arguments` takes them."""
        arguments = training_arguments(self.config, folder, seed, self.best_metric, self.quiet, **more)
        if arguments.n_gpu > 1:
            # torch's DataParallel would give each GPU a whole batch, and split tensors that a batch shares.
            raise ValueError(
                f'expected a process for each GPU, got one for {arguments.n_gpu}: start with torchrun, or show it one '
                'GPU by CUDA_VISIBLE_DEVICES'
            )
        return arguments

    def make_trainer(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        arguments: TrainingArguments,
        splits: Sequence[str | None] = ('train', 'validation'),
    ) -> Trainer:
        """Create the Trainer of a model.

        Args:
            splits: Data for training and for the evaluation of each epoch; None for none.
        """
        train, validation = (None if split is None else self.tokenized(split, tokenizer) for split in splits)
        trainer = self.new_trainer(
            model=model,
            args=arguments,
            train_dataset=train,
            eval_dataset=validation,
            processing_class=tokenizer,
            callbacks=[EpochMeter(arguments.device, self.config.run.save_updates, self.validation_metrics)],
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def summarize_run(self, trainer: Trainer, tested: dict[str, float], seed: int) -> dict[str, Any]:
        """Return the result of one seed: the best epoch by validation, its test, and the time and memory it took."""
        key, history = f'eval_{self.best_metric}', trainer.state.log_history
        evaluated = [row for row in history if key in row]
        sign = -1 if self.best_metric == 'loss' else 1
        best = max(evaluated, key=lambda row: (sign * row[key], -row.get('eval_loss', 0)))
        measured = [row for row in history if 'memory_mb' in row]
        seconds = sum(row['seconds'] for row in measured) / sum(row['updates'] for row in measured)
        return {
            'seed': seed,
            'best_epoch': round(best['epoch'], 3),
            **{f'validation_{name}': best[f'eval_{name}'] for name in self.validation_metrics},
            **{f'test_{name}': tested[name] for name in self.metrics if name in tested},
            'seconds_per_epoch': seconds * trainer.state.global_step / trainer.state.epoch,
            'memory_mb': max(row['memory_mb'] for row in measured),
            'updates': trainer.state.global_step,
            **self.summarize_data(),
            **({'glove': self._coverage} if self._coverage else {}),
            'epochs': [
                {name: row[f'eval_{name}'] for name in ('loss', *self.validation_metrics)}
                | {'epoch': round(row['epoch'], 3)}
                for row in evaluated
            ],
        }

    def summarize_seeds(self, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return mean and standard deviation (n - 1) over the seeds; no deviation for a single seed."""
        measured = [f'test_{metric}' for metric in self.metrics]
        measured += [f'validation_{metric}' for metric in self.validation_metrics]
        names = [name for name in measured if all(name in result for result in results)]
        summary: dict[str, Any] = {'seeds': [result['seed'] for result in results]}
        for name in (*names, 'seconds_per_epoch', 'memory_mb'):
            values = [result[name] for result in results]
            deviation = statistics.stdev(values) if len(values) > 1 else None
            summary[name] = {'mean': statistics.mean(values), 'std': deviation}
        summary['parameters'] = results[0]['parameters']
        return summary | {'runs': list(results)}
