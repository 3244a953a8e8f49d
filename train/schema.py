"""The sections and keys of an experiment, their defaults and their ranges."""

from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, Literal

from aft_vision.data import Augmentation, SizeSchedule, Source
from aft_vision.data.ranges import check_ranges, is_finite, within
from aft_vision.models.transfer_source import did_you_mean
from train.config_layers import as_yaml

# The batch size to which optim.lr refers.
LR_BATCH_SIZE = 512


@dataclass(frozen=True)
class DataConfig(Source):
    """The images and their batches: the fields of Source, and these.

    Attributes:
        img_size: (H, W) in pixels; null as for the weights of `run.init_from`, otherwise of the model.
        batch_size: Images per optimizer step, over all processes and accumulation steps.
        eval_batch_size: Images per validation batch; None means as many as the model processes at once in training.
        max_tokens: Limit of the patches of an update, over all processes and accumulation steps: every image keeps its
            own shape, at the largest size with at most `max_tokens / batch_size` patches, in training and in
            validation; the batches are timm's NaFlex batches. `img_size` is then the grid of position parameters and
            the size that the exported model names. None for images of `img_size`.
        train_sizes: Sides in pixels of square training images, instead of `img_size`; each update has one of them. None
            for only `img_size`.
        train_size_schedule: `constant` draws each of these sizes equally often; `progressive` goes from the first to
            the last over the epochs of the run, as timm's schedule of this name.
        eval_img_size: (H, W) in pixels of the validation images, if different.
        crop_pct: Side of the validation crop relative to the resized image; null as for `img_size`.
        num_workers: Decoding processes per loader.
        class_weights: `balanced` draws the images of each class equally often in training, of small classes
            several times in an epoch, as torch's WeightedRandomSampler with the inverse of their number; None draws
            every image once.
        match_classes: How the classes of weights are compared with the data set's: by `name`, where both have
            names, or only by `place`. Names in another order, or a part of them in evaluation, are put in order; with
            other names evaluation is an error, and training starts with a new classifier.
    """

    img_size: tuple[int, int] = within('[1, 65536]', (224, 224), 'px')
    batch_size: int = within('[1, inf)', 64, 'images')
    eval_batch_size: int | None = within('[1, inf)', None, 'images')
    max_tokens: int | None = within('[1, inf)', None, 'tokens')
    train_sizes: list[int] | None = within('[1, 65536]', None, 'px')
    train_size_schedule: Literal['constant', 'progressive'] = 'constant'
    eval_img_size: tuple[int, int] | None = within('[1, 65536]', None, 'px')
    crop_pct: float = within('(0, 1]', 0.875)
    num_workers: int = within('[0, 1024]', 2, 'processes')
    class_weights: Literal['balanced'] | None = None
    match_classes: Literal['name', 'place'] = 'name'

    def __post_init__(self) -> None:
        # Before Source, whose errors do not have the section.
        check_ranges(self, 'data')
        super().__post_init__()
        sizes = self.train_sizes
        require('data.train_sizes', sizes, sizes is None or len(set(sizes)) > 1, 'several sizes, or null for img_size')
        if sizes is None:
            require_default(self, 'data.train_size_schedule', 'without data.train_sizes')
        if self.max_tokens is not None:
            enough = f'at least one for each of the {self.batch_size} images of a batch'
            require('data.max_tokens', self.max_tokens, self.max_tokens >= self.batch_size, enough)
            sizes_given = ('data.train_sizes', 'data.eval_img_size')
            require_default(self, *sizes_given, 'with data.max_tokens, where images keep their shape')

    @property
    def classes_by_place(self) -> bool:
        """Return whether only the order of classes counts, not their names."""
        return self.match_classes == 'place'

    @property
    def source(self) -> Source:
        """Return only the location and the splits, which are all that loaders need of the section."""
        return Source(**{each.name: getattr(self, each.name) for each in fields(Source)})

    @property
    def training_sizes(self) -> list[tuple[int, int]]:
        """Return all sizes (H, W) of training images, in pixels."""
        return [self.img_size] if self.train_sizes is None else [(side, side) for side in self.train_sizes]

    @property
    def image_tokens(self) -> int | None:
        """Return the limit of the patches of an image, if images keep their own shapes."""
        return None if self.max_tokens is None else self.max_tokens // self.batch_size


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer.

    Attributes:
        name: An optimizer of `timm.optim.list_optimizers()`; with `args: {fallback_no_weight_decay: true}`, `nadamuon`
            and similar ones use AdamW for the parameters that the model exempts from decay.
        lr: Peak learning rate. For an image classifier it is per 512 images: the rate used is `lr * batch_size / 512`.
            For a pixel or character model it is the rate used.
        weight_decay: Weight decay of parameters with two or more dimensions that the model does not exempt.
        layer_decay: Factor of the learning rate from each block to the one before it; None for the same rate.
        args: Further keyword arguments of the optimizer, as `{betas: [0.9, 0.95]}`.
        accumulate: Accumulation steps of an update: micro-batches that each process splits its shard of a batch into.
        clip_grad: Largest gradient norm; None for no clipping.
    """

    name: str = 'adamw'
    lr: float = within('(0, 1e4]', 5e-4)
    weight_decay: float = within('[0, 1e4]', 0.05)
    layer_decay: float | None = within('(0, 1]', None)
    args: dict[str, Any] = field(default_factory=dict)
    accumulate: int = within('[1, inf)', 1, 'steps')
    clip_grad: float | None = within('(0, inf)', None)

    def __post_init__(self) -> None:
        check_ranges(self, 'optim')
        require('optim.args', self.args, is_finite(self.args), 'of finite numbers')


@dataclass(frozen=True)
class OptimConfig(OptimizerConfig):
    """The optimizer and the loss of an image classifier.

    Attributes:
        loss: Cross-entropy, or a binary cross-entropy for each class, averaged over them.
        bce_target_thresh: With the latter, mixed targets above this value count as 1 and the others as 0; None leaves
            them unchanged.
        label_smoothing: Fraction of the target spread over all classes.
    """

    loss: Literal['ce', 'bce'] = 'ce'
    bce_target_thresh: float | None = within('[0, 1)', None)
    label_smoothing: float = within('[0, 1)', 0.1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss != 'bce':
            require_default(self, 'optim.bce_target_thresh', 'without the loss bce')


@dataclass(frozen=True)
class DistillConfig:
    """A teacher to learn from in addition to the labels; weights and temperature as in `timm.task`.

    Attributes:
        teacher: A model of timm with its weights, or a checkpoint or exported folder of the trainer; None learns only
            from the labels.
        teacher_args: Keyword arguments of a teacher of timm, such as `{pretrained_cfg_overlay: {file: FILE}}` for your
            own weights.
        teacher_weights: A file of weights of a teacher of timm, or an installed package with one such file; tensors
            with other names are taken in their order if all shapes agree. None for the weights of its name.
        stored: A folder of the teacher's outputs, which train.store_teacher has written, in place of the teacher; None
            runs the teacher in each update. Crops and flips come from the folder.
        kind: Target of the student: the teacher's class (`hard`), its probabilities (`soft`), its pooled features
            (`feature`) or both (`soft_feature`); with `token_hard` and `token_soft` the student's distillation head
            learns it, and its other head learns the labels; with `blocks` each block of an AFT model learns one of
            a ViT, without labels.
        task_loss_weight: Factor of the loss of the labels; None for 1.
        distill_loss_weight: Factor of the loss of the teacher; None for `1 - task_loss_weight`, or 1 without that.
        temperature: Divides the logits of student and teacher in the soft kinds.
        feature_loss_weight: Factor of the features' error beside the divergence of the probabilities in the kind
            `soft_feature`, where the teacher's features have a layer norm.
    """

    teacher: str | None = None
    teacher_args: dict[str, Any] = field(default_factory=dict)
    teacher_weights: str | None = None
    stored: str | None = None
    kind: Literal['hard', 'soft', 'feature', 'soft_feature', 'blocks', 'token_hard', 'token_soft'] = 'hard'
    task_loss_weight: float | None = within('[0, inf)', None)
    distill_loss_weight: float | None = within('[0, inf)', None)
    temperature: float = within('(0, inf)', 1.0)
    feature_loss_weight: float = within('[0, inf)', 1.0)

    def __post_init__(self) -> None:
        check_ranges(self, 'distill')
        weights = ('distill.task_loss_weight', 'distill.distill_loss_weight')
        if self.teacher is None:
            own = () if self.stored is not None else ('distill.kind', *weights)
            require_default(self, 'distill.teacher_args', 'distill.teacher_weights', *own, 'without distill.teacher')
        live = self.stored is None or self.kind != 'blocks'
        require('distill.kind', self.kind, live, 'another one with distill.stored, which has no blocks')
        known = not {'num_classes', 'in_chans', 'device', 'dtype'} & self.teacher_args.keys()
        require('distill.teacher_args', self.teacher_args, known, 'without num_classes, in_chans, device and dtype')
        share = self.distill_loss_weight is not None or self.task_loss_weight is None or self.task_loss_weight <= 1
        require('distill.task_loss_weight', self.task_loss_weight, share, 'at most 1 without distill_loss_weight')
        unused = [*(weights if self.kind == 'blocks' else ())]
        unused += [] if self.kind == 'soft_feature' else ['distill.feature_loss_weight']
        unused += [] if 'soft' in self.kind else ['distill.temperature']
        require_default(self, *unused, f'for the kind {self.kind}, which has none')


@dataclass(frozen=True)
class RegularizeConfig:
    """Options that make the kernels of AFT-conv sparse.

    Attributes:
        kernel_entropy: Weight of the entropy of the kernels in the loss, summed over heads and layers (AFT Eq. 9); 0
            leaves it out. The paper uses 0.001.
        tau_end: Temperature of the Gumbel softmax at the last update (AFT Eq. 10), reached from `model.tau` by a
            constant factor per update; None keeps it constant.
    """

    kernel_entropy: float = within('[0, inf)', 0.0)
    tau_end: float | None = within('(0, inf)', None)

    def __post_init__(self) -> None:
        check_ranges(self, 'regularize')


@dataclass(frozen=True)
class EmaConfig:
    """The moving average of the weights, evaluated in addition to them.

    Attributes:
        decay: Weight of the past at each update; None for no average.
        warmup: Whether the decay rises from 0 to `decay` during the first updates, as 1 - (1 + update)^(-2/3).
    """

    decay: float | None = within('(0, 1)', None)
    warmup: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, 'ema')
        if self.decay is None:
            require_default(self, 'ema.warmup', 'without ema.decay')


@dataclass(frozen=True)
class ScheduleConfig:
    """Linear warm-up, then a cosine; learning rates are absolute.

    Attributes:
        epochs: Passes over the training images.
        min_updates: Smallest number of optimizer steps of the run: few images are passed over more often than `epochs`.
        warmup_epochs: Epochs of the warm-up, in which the rate rises.
        warmup_lr: Learning rate of the first step of the warm-up.
        min_lr: Learning rate at the end.
        step: When the rate changes: after each `update`, after each `epoch`, or as in DeiT's code (`deit`) after each
            epoch with a delay of one epoch, so that the first two epochs use `warmup_lr`.
    """

    # Not a key: only the schedule of the sequence models has it.
    max_updates: ClassVar[int | None] = None

    epochs: int = within('[1, inf)', 300, 'epochs')
    min_updates: int = within('[0, inf)', 0, 'updates')
    warmup_epochs: int = within('[0, inf)', 5, 'epochs')
    warmup_lr: float = within('[0, 1e4]', 1e-6)
    min_lr: float = within('[0, 1e4]', 1e-5)
    step: Literal['epoch', 'update', 'deit'] = 'epoch'

    def __post_init__(self) -> None:
        check_ranges(self, 'schedule')
        below = self.warmup_epochs < self.epochs
        require('schedule.warmup_epochs', self.warmup_epochs, below, f'below schedule.epochs, which is {self.epochs}')


def peak_rate(lr: float, batch_size: int = LR_BATCH_SIZE) -> float:
    """Return the highest learning rate of an image classifier, whose `lr` is per LR_BATCH_SIZE images."""
    return lr * batch_size / LR_BATCH_SIZE


@dataclass(frozen=True)
class RunConfig:
    """Options of the run itself.

    Attributes:
        dir: Folder of the run; None means `runs/` and the name of the config file; `runs/pixel/` for pixels,
            `runs/char/` for characters and `runs/recall/` for recall.
        overwrite: Allow a folder that already has a run.
        resume: `auto` continues the run of the folder from its newest undamaged checkpoint, or starts one; a path
            continues from that checkpoint, or the newest one of that folder, in a folder without a run. None starts a
            run.
        keep: Number of latest checkpoints to keep.
        save_minutes: Time between checkpoints within an epoch; None saves only after each epoch.
        imports: Modules or Python files to import first, such as one with a mixer of yours: of the file, its base
            and the command line, where `--import` adds to them.
        skip_nonfinite: Number of updates to skip whose loss or gradient is not finite; one more ends the run.
        init_from: A checkpoint or exported folder with initial weights; None for the model's own.
        reset_head: Start with a new classifier instead of the one of `init_from` or `model.pretrained`.
        seed: Seed of the weights, of the order of the images and of all randomness in training; in [0, 2**32).
        device: `auto` uses CUDA if available.
        cpu_threads: Threads of the model on a CPU; leave cores for the loading processes. None keeps torch's default,
            one per core, or per core of the limit of a container; evaluation leaves out the cores of other processes.
        amp: Autocast to bfloat16, or to float16 with a scaled loss, or none; `auto` is bfloat16 where the device
            multiplies it, else none.
        channels_last: Keep the channels of a pixel next to each other in memory, as timm's `--channels-last`: models of
            convolutions are often faster so. AFT-pyramids do it on a CPU without being asked.
        grad_checkpointing: Recompute the activations of each block in the backward pass, to save memory.
        compile: Compile the model with torch.compile for training, once for each of `data.train_sizes`, of which there
            are at most 8; evaluation stays eager.
        timeout_minutes: Longest time that a process waits for the others, before it ends with an error.
        tensorboard: Also write TensorBoard's event files.
        eval_every: Epochs between evaluations; the last epoch is always evaluated.
        max_seconds: Time for updates, with loading and without evaluation, after which the run ends as if complete,
            also within an epoch; None for no limit. With a larger value `resume` continues.
        throughput_batches: Batches to time the loader, the model and both before training, to find which limits the
            run; 0 skips this, as streamed data sets do.
    """

    dir: str | None = None
    overwrite: bool = False
    resume: str | None = None
    keep: int = within('[1, 100]', 2, 'checkpoints')
    save_minutes: float | None = within('(0, inf)', None, 'minutes')
    imports: list[str] = field(default_factory=list)
    skip_nonfinite: int = within('[0, inf)', 0, 'updates')
    init_from: str | None = None
    reset_head: bool = False
    seed: int = within('[0, 4294967296)', 0)
    device: str = 'auto'
    cpu_threads: int | None = within('[1, 4096]', None, 'threads')
    amp: Literal['none', 'auto', 'bfloat16', 'float16'] = 'none'
    channels_last: bool = False
    grad_checkpointing: bool = False
    compile: bool = False
    timeout_minutes: float = within('(0, 100000]', 10.0, 'minutes')
    tensorboard: bool = True
    eval_every: int = within('[1, inf)', 1, 'epochs')
    max_seconds: float | None = within('(0, inf)', None, 'seconds')
    throughput_batches: int = within('[0, inf)', 10, 'batches')

    def __post_init__(self) -> None:
        check_ranges(self, 'run')


class Experiment:
    """The sections of every experiment; the base class of the schemas."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    model: dict[str, Any]
    data: Any
    optim: Any
    ema: EmaConfig
    schedule: Any
    run: RunConfig

    @property
    def peak_lr(self) -> float:
        """Return the highest learning rate of the schedule."""
        return self.optim.lr

    @property
    def size_schedule(self) -> SizeSchedule | None:
        """Return the schedule of training image sizes, if there are several."""
        return None

    def check_batch_size(self, world_size: int) -> int:
        """Return the size of a micro-batch with this many processes.

        Raises:
            ValueError: the batch cannot be divided evenly.
        """
        return self._check_multiple(world_size, 1, 'a multiple', '')

    def _check_multiple(self, world_size: int, factor: int, multiple: str, remedy: str) -> int:
        batch, micro_batches = self.data.batch_size, self.optim.accumulate * world_size
        if batch % (factor * micro_batches):
            nearest = max(round(batch / (factor * micro_batches)), 1) * factor * micro_batches
            raise ValueError(
                f'expected data.batch_size to be {multiple} of optim.accumulate ({self.optim.accumulate}) times the '
                f'number of processes ({world_size}), got {batch}; set data.batch_size={nearest}{remedy}'
            )
        return batch // micro_batches


@dataclass(frozen=True)
class Config(Experiment):
    """One experiment; `model` is `{name: ..., **keyword arguments of the model}`."""

    model: dict[str, Any] = field(default_factory=lambda: {'name': 'aft_conv_tiny'})
    data: DataConfig = field(default_factory=DataConfig)
    augment: Augmentation = field(default_factory=Augmentation)
    optim: OptimConfig = field(default_factory=OptimConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    regularize: RegularizeConfig = field(default_factory=RegularizeConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        self.check_batch_size(1)
        peak = self.peak_lr
        for name in ('warmup_lr', 'min_lr'):
            rate = getattr(self.schedule, name)
            require(f'schedule.{name}', rate, rate <= peak, f'at most the peak rate {peak:g}, which optim.lr makes')
        if self.data.train_size_schedule == 'progressive':
            require_default(self.schedule, 'schedule.min_updates', 'with data.train_size_schedule')
        if self.run.init_from is None and not self.model.get('pretrained'):
            require_default(self.run, 'run.reset_head', 'without run.init_from or model.pretrained')
        mixes = self.distill.stored is None or not self.augment.mixes
        require('augment.mix_prob', self.augment.mix_prob, mixes, '0 with distill.stored')
        sizes = self.data.train_sizes
        # For more, torch.compile runs without a graph.
        few = not self.run.compile or sizes is None or len(set(sizes)) <= 8
        require('data.train_sizes', sizes, few, 'at most 8 sizes with run.compile=true, which compiles each')
        if self.data.max_tokens is not None:
            require_default(self.distill, 'distill.teacher', 'distill.stored', 'with data.max_tokens')
            require_default(self.run, 'run.compile', 'with data.max_tokens, whose batches differ in shape')

    @property
    def peak_lr(self) -> float:
        return peak_rate(self.optim.lr, self.data.batch_size)

    @property
    def size_schedule(self) -> SizeSchedule | None:
        if self.data.train_sizes is None:
            return None
        return SizeSchedule(tuple(self.data.training_sizes), self.data.train_size_schedule, self.schedule.epochs)

    def check_batch_size(self, world_size: int) -> int:
        """Return the size of a micro-batch, which must be even if images are mixed."""
        if not self.augment.mixes:
            return super().check_batch_size(world_size)
        return self._check_multiple(
            world_size, 2, 'an even multiple', ', or augment.mix_prob=0, because mixup and cutmix pair images'
        )


def unknown(key: str, value: Any, valid: Iterable[str], expected: str) -> str:
    """Return the message of an error: the value of a key is none of the valid names, and which is meant."""
    return f'{key} = {value!r} is not {expected}{did_you_mean(str(value), valid)}'


def require(key: str, value: Any, holds: bool, expected: str) -> None:
    """Raise a ValueError that names the key and the value, unless the condition holds."""
    if not holds:
        raise ValueError(f'expected {key} to be {expected}, got {value!r}')


def require_default(section: Any, *keys_and_when: str) -> None:
    """Raise a ValueError unless keys of a section, as `section.key`, have their defaults; last comes when they must."""
    *keys, when = keys_and_when
    for key in keys:
        name = key.rpartition('.')[2]
        default, value = default_of(type(section).__dataclass_fields__[name]), getattr(section, name)
        require(key, value, value == default, f'{as_yaml(default)} {when}')


def default_of(each: 'Field[Any]') -> Any:
    """Return the default of a field of a dataclass."""
    return each.default if each.default_factory is MISSING else each.default_factory()
