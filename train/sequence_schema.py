"""The sections and keys of experiments with sequence models: pixels, characters and associative recall."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from aft_vision.data import PixelAugmentation, RecallTask
from aft_vision.data.ranges import check_ranges, within
from train.schema import EmaConfig, Experiment, OptimizerConfig, RunConfig, require, require_default


@dataclass(frozen=True)
class BatchData:
    """The batches of sequences; images for pixels, windows of text for characters.

    Attributes:
        batch_size: Sequences per optimizer step, over all processes and accumulation steps.
        eval_batch_size: Sequences per batch of the evaluation; None means as many as the model processes at once in
            training.
        num_workers: Loading processes; 0 loads in the training process.
    """

    batch_size: int = within('[1, inf)', 128, 'sequences')
    eval_batch_size: int | None = within('[1, inf)', None, 'sequences')
    num_workers: int = within('[0, 1024]', 0, 'processes')

    def __post_init__(self) -> None:
        check_ranges(self, 'data')


@dataclass(frozen=True)
class PixelData(BatchData):
    """The images of CIFAR10 and their batches.

    Attributes:
        dir: A folder with `cifar-10-batches-py`, this folder, or an .npz with x_train and x_test.
        eval_split: Images to evaluate after each epoch and with --eval.
    """

    dir: str = ''
    eval_split: Literal['train', 'test'] = 'test'


@dataclass(frozen=True)
class CharData(BatchData):
    """The text and its batches.

    Attributes:
        file: enwik8, text8 or any other file of bytes, plain, .zip or .xz.
        vocabulary: `bytes`, which has 256 symbols, or `text8`, the letters a to z and the space.
        context: Characters in a window, T of the paper.
        eval_stride: Characters from one window of the evaluation to the next. Each is predicted once, from at least
            `context - eval_stride` characters before it. None means `context`: windows without overlap.
        eval_split: Text to evaluate after each epoch and with --eval. A run always ends with an evaluation on the test
            text.
    """

    file: str = ''
    vocabulary: Literal['bytes', 'text8'] = 'bytes'
    context: int = within('[1, inf)', 1024, 'characters')
    eval_stride: int | None = within('[1, inf)', None, 'characters')
    eval_split: Literal['train', 'valid', 'test'] = 'valid'

    def __post_init__(self) -> None:
        super().__post_init__()
        stride = self.eval_stride is None or self.eval_stride <= self.context
        wanted = f'at most data.context, which is {self.context}, or null for windows without overlap'
        require('data.eval_stride', self.eval_stride, stride, wanted)


@dataclass(frozen=True)
class RecallData(RecallTask):
    """The generated sequences and their batches: the fields of RecallTask, and these.

    Training examples depend on `run.seed`; validation and test examples are the same in every run.

    Attributes:
        epoch_size: Examples of an epoch. Every epoch draws new examples; in a small setting they repeat, also across
            splits.
        valid_size: Examples of the validation.
        test_size: Examples of the test.
        batch_size: Sequences per optimizer step, over all processes and accumulation steps.
        eval_batch_size: Sequences per batch of the evaluation; None means as many as the model processes at once in
            training.
        eval_split: Examples to evaluate after each epoch and with --eval. A run always ends with an evaluation on the
            test examples.
        goal: Accuracy of `eval_split` in percent after which the run ends; None for no such end.
    """

    epoch_size: int = within('[1, inf)', 16384, 'sequences')
    valid_size: int = within('[1, inf)', 1000, 'sequences')
    test_size: int = within('[1, inf)', 3000, 'sequences')
    batch_size: int = within('[1, inf)', 64, 'sequences')
    eval_batch_size: int | None = within('[1, inf)', None, 'sequences')
    eval_split: Literal['valid', 'test'] = 'valid'
    goal: float | None = within('(0, 100]', None, '%')

    # Not a key: an epoch is generated at once, so that each of several workers would generate all of it.
    num_workers = 0


@dataclass(frozen=True)
class SequenceSchedule:
    """Linear warm-up, then the inverse square root of the update or a cosine; the rate changes at every update.

    Attributes:
        epochs: Passes over the training data; for text, as many windows as fit without overlap; for associative recall,
            `data.epoch_size` new examples.
        kind: `inverse_sqrt`: the rate falls from its peak as sqrt(warmup_updates / update), independent of the length
            of the run. `cosine`: it falls to `min_lr` at the last update.
        warmup_updates: Updates until the peak.
        warmup_lr: Learning rate of the first update.
        min_lr: Learning rate at the end of the cosine; the other kind ends above it.
        max_updates: Updates of the whole run, to end it before `epochs`; None for all epochs.
    """

    epochs: int = within('[1, inf)', 200, 'epochs')
    kind: Literal['inverse_sqrt', 'cosine'] = 'inverse_sqrt'
    warmup_updates: int = within('[0, inf)', 4000, 'updates')
    warmup_lr: float = within('[0, 1e4]', 0.0)
    min_lr: float = within('[0, 1e4]', 0.0)
    max_updates: int | None = within('[1, inf)', None, 'updates')

    # Not a key: a schedule of images may have another value.
    step: ClassVar[str] = 'update'

    def __post_init__(self) -> None:
        check_ranges(self, 'schedule')
        least = 1 if self.kind == 'inverse_sqrt' else 0
        wanted = f'at least {least} with the kind {self.kind}'
        require('schedule.warmup_updates', self.warmup_updates, self.warmup_updates >= least, wanted)
        if self.max_updates is not None:
            wanted = f'at most schedule.max_updates, which is {self.max_updates}'
            require('schedule.warmup_updates', self.warmup_updates, self.warmup_updates <= self.max_updates, wanted)
        if self.kind == 'inverse_sqrt':
            require_default(self, 'schedule.min_lr', 'for inverse_sqrt')

    def total_updates(self, updates_per_epoch: int) -> int:
        """Return the number of updates of the whole run."""
        updates = self.epochs * updates_per_epoch
        return min(updates, self.max_updates or updates)


@dataclass(frozen=True)
class SequenceExperiment(Experiment):
    """One experiment with sequences; `model` is `{name: ..., **keyword arguments of the model}`."""

    model: dict[str, Any] = field(default_factory=lambda: {'name': 'aft_local_char'})
    data: Any = None
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    schedule: SequenceSchedule = field(default_factory=SequenceSchedule)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        self.check_batch_size(1)
        require_default(self.run, 'run.reset_head', 'for a sequence model')
        for name in ('warmup_lr', 'min_lr'):
            rate = getattr(self.schedule, name)
            require(f'schedule.{name}', rate, rate <= self.peak_lr, f'at most optim.lr, which is {self.peak_lr:g}')


@dataclass(frozen=True)
class PixelConfig(SequenceExperiment):
    """One experiment with pixels."""

    model: dict[str, Any] = field(default_factory=lambda: {'name': 'aft_local_pixel'})
    data: PixelData = field(default_factory=PixelData)
    augment: PixelAugmentation = field(default_factory=PixelAugmentation)


@dataclass(frozen=True)
class CharConfig(SequenceExperiment):
    """One experiment with characters."""

    data: CharData = field(default_factory=CharData)


@dataclass(frozen=True)
class RecallConfig(SequenceExperiment):
    """One experiment with associative recall."""

    data: RecallData = field(default_factory=RecallData)
