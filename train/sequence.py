"""Training of models of sequences: task, metrics and run."""

import argparse
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from timm.task import ClassificationTask
from timm.utils import random_seed
from torch.utils.data import DataLoader

from aft_vision.data import (
    EvalDataset,
    Loaders,
    PixelDataset,
    RecallDataset,
    WindowDataset,
    sequence_eval_loader,
    sequence_train_loader,
)
from aft_vision.files import write_json
from aft_vision.likelihood import BitsEvaluator, evaluate_bits, sequence_loss
from aft_vision.models.checkpoint import load_matching_state_dict, read_checkpoint
from aft_vision.models.decoder import AFTDecoder, bits
from aft_vision.models.decoders import create_decoder, load_decoder
from aft_vision.visualize import draw_bits, save_figure
from train.build import assemble_state
from train.checkpoint import BEST, Saver, describe_samples, lock_run
from train.config import load_config
from train.distributed import World, join_world
from train.key_list import format_keys, list_keys
from train.model_section import decoder_schema
from train.objective import Batch, Objective
from train.run import check_run_dir, evaluated_checkpoint, find_run_dir, train_run
from train.sequence_schema import SequenceExperiment
from train.state import TrainState, autocast_dtype


class SequenceTask(ClassificationTask):
    """timm's task with the mean cross-entropy of all tokens in nats, also evaluated in bits."""

    def __init__(self, model: AFTDecoder, device: torch.device) -> None:
        super().__init__(model.to(device), criterion=sequence_loss, device=device, verbose=False)

    def create_evaluator(self, **kwargs: Any) -> BitsEvaluator:
        return BitsEvaluator(self.device, **kwargs)


class Likelihood(Objective):
    """Sequences of tokens and their bits.

    Args:
        unit: Name of a sequence, in the plural.
        bits_unit: Unit that is printed after the bits.
        length: Tokens of a sequence.
    """

    metrics: tuple[str, ...] = ('loss', 'bits')
    best = 'bits'
    lower_is_better = True
    records_steps = True

    def __init__(self, unit: str, bits_unit: str, length: int) -> None:
        self.unit, self.bits_unit, self.length = unit, bits_unit, length

    def train_metrics(self, loss: float, updates: int, seconds: float, updates_per_second: float) -> dict[str, float]:
        """Return `bits` of the loss, and `updates` and `total_seconds` of the run so far, without evaluation."""
        return {
            'bits': float(bits(loss)),
            'updates_per_second': updates_per_second,
            'updates': updates,
            'total_seconds': seconds,
        }

    def describe(self, row: Mapping[str, float]) -> str:
        line = f'  {row["train_bits"]:.4f} {self.bits_unit}'
        if not math.isnan(row['eval_bits']):
            line += f', evaluated {row["eval_bits"]:.4f}'
        if not math.isnan(row.get('eval_ema_bits', math.nan)):
            line += f', averaged weights {row["eval_ema_bits"]:.4f}'
        return line

    def blank(self, count: int) -> Batch:
        tokens = torch.zeros(count, self.length, dtype=torch.int64)
        return tokens, tokens


class SequenceData(ABC):
    """The data of an experiment and their loaders, for one of its processes.

    Attributes:
        name: Name of the kind of data; runs are in this folder of `runs/`.
        unit, bits_unit: As in Likelihood.
        length: Tokens of a sequence.
        vocab_size: V.
        note: A line about the data to print before the run, or ''.
        facts: Entries about the data in a checkpoint.
    """

    name: str
    unit: str
    bits_unit: str
    length: int
    vocab_size: int
    note = ''
    facts: Mapping[str, Any] = {}

    def __init__(self, config: Any, world: World) -> None:
        self.config, self.world = config, world
        self.micro_batch_size = config.check_batch_size(world.size)

    @property
    def bits_measure(self) -> str:
        """Return the unit of evaluated bits with their settings, such as the stride."""
        return self.bits_unit

    @property
    def measure(self) -> str:
        """Return the unit of the metric that selects the best weights, with its settings."""
        return self.bits_measure

    @property
    def objective(self) -> Likelihood:
        """Return the objective."""
        return Likelihood(self.unit, self.bits_unit, self.length)

    @abstractmethod
    def train_data(self) -> PixelDataset | WindowDataset | RecallDataset:
        """Return the training sequences."""

    @abstractmethod
    def eval_data(self, split: str) -> EvalDataset | RecallDataset:
        """Return the sequences of a split."""

    def train_loader(self) -> DataLoader:
        """Build the loader of training sequences, as tokens and targets."""
        pin, options = self.world.device.type == 'cuda', self._options()
        data, seed = self.config.data, self.config.run.seed
        return sequence_train_loader(self.train_data(), data.batch_size, seed=seed, pin_memory=pin, **options)

    def eval_loader(self, split: str) -> DataLoader:
        """Build the loader of this process's sequences of a split."""
        size = self.config.data.eval_batch_size or self.micro_batch_size
        return sequence_eval_loader(self.eval_data(split), size, **self._options())

    def _options(self) -> dict[str, Any]:
        return {'shard': self.world.shard(self.config.optim.accumulate), 'num_workers': self.config.data.num_workers}


def build_sequence_model(config: SequenceExperiment, data: SequenceData, **more: Any) -> AFTDecoder:
    """Create the model of an experiment for its data.

    Raises:
        ValueError: the model does not have an argument of the experiment.
    """
    kwargs = {**config.model, 'context': data.length, 'vocab_size': data.vocab_size}
    name = kwargs.pop('name')
    return create_decoder(name, **kwargs, **more)


def create_sequence_state(
    model: AFTDecoder, config: SequenceExperiment, updates_per_epoch: int, objective: Likelihood, world: World
) -> TrainState:
    """Move a decoder to the device and build its optimizer, schedule, loss and moving average.

    Raises:
        ValueError: `optim.args` do not fit the optimizer.
    """
    task = SequenceTask(model, world.device)
    return assemble_state(task, config, objective, lambda *batch: batch, updates_per_epoch, world)


def build_sequence_state(
    config: SequenceExperiment, data: SequenceData, loaders: Loaders, world: World
) -> tuple[TrainState, dict[str, Any]]:
    """Build the model and its training state, and the entries of a checkpoint besides the weights.

    Raises:
        ValueError: the arguments of the model, or the weights to start from, do not fit.
    """
    random_seed(config.run.seed)
    model = build_sequence_model(config, data)
    start = config.run.init_from
    if start is not None:
        content = read_checkpoint(start)
        load_matching_state_dict(model, content['state_dict'], start)
    updates_per_epoch = len(loaders.train) // config.optim.accumulate
    state = create_sequence_state(model, config, updates_per_epoch, data.objective, world)
    arguments: Any = model.model_args
    # The first three are in every checkpoint; `load_decoder` reads the others.
    description = {
        'model_name': arguments['name'],
        'model_kwargs': arguments['kwargs'],
        'class_names': [],
        'model_args': arguments,
        'task': model.task,
        'data': describe_samples(loaders.train),
        **data.facts,
    }
    return state, description


def run_sequences(args: argparse.Namespace, schema: type[Any], data_type: type[SequenceData]) -> TrainState | None:
    """Train or evaluate, as the command line says.

    Args:
        args: From `train.command_line.parse_args`.
        schema: Dataclass of the experiment.
        data_type: Class of its data.

    Returns:
        The final state, with the metrics of every epoch in `progress.history`; None after an evaluation.

    Raises:
        ValueError: the experiment, the data or the checkpoint to start from is not valid.
        FileExistsError: the folder already has a run.
        SystemExit: a signal stopped the run; its state is saved.
    """
    if args.keys:
        print(format_keys(list_keys(schema, decoder_schema())))
        return None
    config = load_config(args.config, args.overrides, schema)
    run_dir = find_run_dir(config.run.dir, args.config, Path('runs') / data_type.name)
    if not args.eval:
        check_run_dir(run_dir, config.run.resume, config.run.overwrite)
    run = config.run
    with join_world(run.device, run.cpu_threads, run.timeout_minutes, args.eval) as world:
        data = data_type(config, world)
        if data.note and world.is_primary:
            print(data.note)
        if args.eval:
            checkpoint: Any = evaluated_checkpoint(config, run_dir, args.overrides)
            if world.is_primary:
                print(f'evaluates {checkpoint}')
            evaluate_split(checkpoint, data, config.data.eval_split, progress=not args.quiet)
            return None
        loaders = Loaders(data.train_loader(), data.eval_loader(config.data.eval_split), [])
        state, facts = build_sequence_state(config, data, loaders, world)
        with lock_run(run_dir) if world.is_primary else nullcontext():
            run = config.run
            saver = Saver(run_dir, facts, run.keep, run.save_minutes)
            train_run(state, loaders, saver, run.resume, run.overwrite, run.throughput_batches, not args.quiet)
            finish(run_dir, state, data, progress=not args.quiet)
    return state


def evaluate_split(checkpoint: str | Path, data: SequenceData, split: str, progress: bool = False) -> dict[str, float]:
    """Evaluate a checkpoint on a split, each token counted once, and print the result.

    Raises:
        ValueError: it is not a checkpoint of a decoder, or is one for other sequences.
    """
    model, world = load_decoder(checkpoint, data.world.device), data.world
    sizes, expected = (model.context, model.vocab_size), (data.length, data.vocab_size)
    if sizes != expected:
        raise ValueError(
            f'expected a model of {expected[0]} tokens of {expected[1]} symbols, as the data are, got {checkpoint} '
            f'with {sizes[0]} of {sizes[1]}'
        )
    metrics = evaluate_bits(
        model,
        data.eval_loader(split),
        world.device,
        amp_dtype=autocast_dtype(data.config.run.amp, world.device),
        distributed=world.is_distributed,
        progress=progress and world.is_primary,
    )
    if world.is_primary:
        counted = f'{metrics["samples"]} {data.unit}, {metrics["tokens"]:.0f} tokens'
        value = metrics[data.objective.best]
        print(f'{checkpoint}, {split}: {value:.4f} {data.measure}  loss {metrics["loss"]:.4f}  {counted}')
    return metrics


def finish(run_dir: Path, state: TrainState, data: SequenceData, progress: bool = False) -> None:
    """Evaluate the best weights on the test split, draw the curves, write result.json, and print the files."""
    world = state.world
    # The first process may still be writing them.
    world.wait()
    split, metric = data.config.data.eval_split, state.objective.best
    result: dict[str, Any] = {'measure': data.measure, 'bits_unit': data.bits_measure}
    result[f'{split}_{metric}'] = state.progress.best
    if 'test_bits' not in result:
        tested = evaluate_split(run_dir / BEST, data, 'test', progress)
        result |= {f'test_{name}': tested[name] for name in ('bits', metric)}
    if not world.is_primary:
        return
    last = state.progress.history[-1]
    result |= {
        'train_bits_of_last_epoch': last['train_bits'],
        'updates': state.progress.updates,
        'seconds': round(state.progress.seconds, 1),
        'updates_per_second': state.progress.updates / state.progress.seconds,
        'memory_mb': last['train_memory_mb'],
        'parameters': sum(parameter.numel() for parameter in state.model.parameters()),
        'model': state.record['model'],
    }
    write_json(run_dir / 'result.json', result)
    save_figure(draw_bits(run_dir, data.bits_unit), run_dir / 'curves.png')
    print(f'best {state.progress.best:.4f} {data.measure} ({split}); in {run_dir}:')
    print('  best.pth, last.pth  checkpoints    result.json  the final metrics')
    print('  summary.csv, steps.csv  every epoch, every tenth update    curves.png  the metrics as plots')
    print('  config.yaml         to repeat the run', end='')
    print('    tensorboard/  for tensorboard --logdir' if state.loop.tensorboard else '')
