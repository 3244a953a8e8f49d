"""The sections and keys shared by the experiments of all tasks; each task adds keys to `data`."""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Literal

from transformers.activations import ACT2FN

from aft_vision.data.ranges import check_ranges, within
from aft_vision.errors import IMPORT_HINT
from aft_vision.fastformer import ENCODERS, PRESETS, FastformerConfig
from train.config_layers import as_yaml
from train.model_section import arguments_schema, check_arguments, refuse_reserved
from train.schema import Experiment, require, unknown

RESERVED_KEYS = {
    'vocab_size': 'the training texts decide, up to data.vocab_size',
    'max_position_embeddings': 'data.max_length says how long a text is',
    'max_target_positions': 'data.max_summary_length says how long a summary is',
    **dict.fromkeys(
        ('pad_token_id', 'bos_token_id', 'eos_token_id', 'decoder_start_token_id'), 'the tokenizer decides its tokens'
    ),
}
# Keys of `data` that name separate files, or folders, of a split.
OWN_PATHS = {'validation': 'valid_path', 'test': 'test_path'}


@dataclass(frozen=True)
class TextData:
    """The examples, the processing of their texts, and their batches; a task adds keys.

    Attributes:
        kind: Kind of the data at `path`; each task supports some kinds.
        path: A file or folder, or the name of a data set on the hub.
        test_share, valid_share: Shares of the examples, if the data have no such split.
        split_seed: Seed of the random splits and of other draws from the data; the same for all `run.seeds`.
        tokenizer: `nltk` or `wordpunct` words, or byte pairs.
        vocab_size: Maximal size of the vocabulary, including special tokens.
        min_frequency: Minimal count of a word in the training texts.
        lowercase: Whether case is ignored.
        max_length: Tokens of a text; longer texts are truncated.
        glove: GloVe vectors for the words, of the width of the embedding; None for random ones.
        batch_size: Examples per optimizer step, over all processes and accumulation steps.
        eval_batch_size: Examples per batch of the evaluation; None means as many as the model processes at once in
            training.
        eval_split: Examples that --eval evaluates.
        num_workers: Loading processes; 0 loads in the training process.
    """

    # Kinds of data that a key is for, if it is not for all; for others it keeps its default.
    kinds_of_key: ClassVar[dict[str, tuple[str, ...]]] = {}

    kind: str = ''
    path: str = ''
    test_share: float = within('(0, 1)', 0.1)
    valid_share: float = within('(0, 1)', 0.1)
    split_seed: int = within('[0, 4294967296)', 0)
    tokenizer: Literal['nltk', 'wordpunct', 'bpe'] = 'wordpunct'
    vocab_size: int = within('[1, inf)', 50_000, 'words')
    min_frequency: int = within('[1, inf)', 1)
    lowercase: bool = True
    max_length: int = within('[1, inf)', 512, 'tokens')
    glove: str | None = None
    batch_size: int = within('[1, inf)', 64, 'examples')
    eval_batch_size: int | None = within('[1, inf)', None, 'examples')
    eval_split: Literal['train', 'validation', 'test'] = 'test'
    num_workers: int = within('[0, 1024]', 0, 'processes')

    def __post_init__(self) -> None:
        check_ranges(self, 'data')
        words = self.glove is None or self.tokenizer != 'bpe'
        require('data.glove', self.glove, words, 'null with data.tokenizer=bpe, whose pieces are not words')
        both = self.test_share + self.valid_share
        require('data.test_share + data.valid_share', both, both < 1, 'below 1')
        for key in fields(self):
            kinds, value = self.kinds_of_key.get(key.name, ()), getattr(self, key.name)
            default = key.default if key.default_factory is MISSING else key.default_factory()
            valid = not kinds or self.kind in kinds or value == default
            require(f'data.{key.name}', value, valid, f'{as_yaml(default)} except for {", ".join(kinds)}')

    def own_paths(self) -> dict[str, str]:
        """Return the paths of the splits that have one of their own."""
        paths = {split: getattr(self, key, None) for split, key in OWN_PATHS.items()}
        return {split: path for split, path in paths.items() if path is not None}

    def drawn_shares(self, own: Collection[str]) -> dict[str, float]:
        """Return the shares of `train` and of the splits to draw from it: those without data of their own."""
        shares = {'validation': self.valid_share, 'test': self.test_share}
        drawn = {split: share for split, share in shares.items() if split not in own}
        return {'train': 1 - sum(drawn.values()), **drawn}


@dataclass(frozen=True)
class TextOptimizer:
    """The optimizer of transformers' Trainer.

    Attributes:
        name: An optimizer of transformers; `adamw_torch` without weight decay is Adam.
        lr: Peak learning rate.
        weight_decay: Weight decay of all parameters except biases and normalisation.
        beta1, beta2, eps: Parameters of Adam and similar optimizers.
        accumulate: Accumulation steps of an update: micro-batches that each process splits its shard of a batch into.
        clip_grad: Largest gradient norm; None for no clipping.
    """

    name: str = 'adamw_torch'
    lr: float = within('(0, 1e4]', 1e-3)
    weight_decay: float = within('[0, 1e4]', 0.0)
    beta1: float = within('[0, 1)', 0.9)
    beta2: float = within('[0, 1)', 0.999)
    eps: float = within('[0, 1]', 1e-8)
    accumulate: int = within('[1, inf)', 1, 'steps')
    clip_grad: float | None = within('(0, inf)', None)

    def __post_init__(self) -> None:
        check_ranges(self, 'optim')


@dataclass(frozen=True)
class TextSchedule:
    """Length of a run, and its learning rate.

    Attributes:
        epochs: Passes over the training texts.
        kind: The rate after the warm-up: the same, or falling to 0 at the last update.
        warmup_updates: Updates in which the rate rises from 0 to its peak.
        max_updates: Updates of the whole run instead of `epochs`; None uses `epochs`.
    """

    epochs: int = within('[1, inf)', 3, 'epochs')
    kind: Literal['constant_with_warmup', 'linear', 'cosine'] = 'constant_with_warmup'
    warmup_updates: int = within('[0, inf)', 0, 'updates')
    max_updates: int | None = within('[1, inf)', None, 'updates')

    def __post_init__(self) -> None:
        check_ranges(self, 'schedule')
        if self.max_updates is not None:
            wanted = f'at most schedule.max_updates, which is {self.max_updates}'
            require('schedule.warmup_updates', self.warmup_updates, self.warmup_updates <= self.max_updates, wanted)


@dataclass(frozen=True)
class TextRunConfig:
    """Place and manner of the runs.

    Attributes:
        dir: Folder of the runs; None means `runs/fastformer/` and the name of the config file.
        overwrite: Allow a folder that already holds runs, which are removed.
        resume: `auto` keeps finished seeds, continues an interrupted one from its last checkpoint, and starts the
            others. None starts all.
        imports: Modules or Python files to import first, such as one with an encoder of yours: those of the file, its
            base and the command line, where `--import` adds to them.
        seeds: Seeds of the weights, the order of the texts and dropout; one run for each.
        keep: Number of checkpoints to keep: the latest and, with two or more, the best; 1 keeps both if they differ.
        save_updates: Updates between checkpoints within an epoch; None saves only after each epoch.
        log_updates: Updates between lines of the training loss.
        init_from: A folder with a saved model and its tokenizer, to start training from or for --eval. The `model`
            section must agree with it, and `data.glove` must be null; the saved tokenizer is used, whatever `data`
            sets.
        device: `auto` uses an accelerator if available.
        cpu_threads: Threads of the model on a CPU; None leaves torch's choice, one per core.
        attention: Implementation in the Transformer, and in a language model that encodes texts: torch's fused
            attention, or one that stores its weights.
        amp: Autocast to bfloat16, or to float16 with a scaled loss, or none.
        grad_checkpointing: Recompute the activations of each layer in the backward pass, to save memory.
        compile: Compile the model with torch.compile.
        tensorboard: Write TensorBoard's event files.
    """

    dir: str | None = None
    overwrite: bool = False
    resume: Literal['auto'] | None = None
    imports: list[str] = field(default_factory=list)
    seeds: list[int] = within('[0, 4294967296)', [0, 1, 2, 3, 4])
    keep: int = within('[1, inf)', 1, 'checkpoints')
    save_updates: int | None = within('[1, inf)', None, 'updates')
    log_updates: int = within('[1, inf)', 50, 'updates')
    init_from: str | None = None
    device: Literal['auto', 'cpu'] = 'auto'
    cpu_threads: int | None = within('[1, 4096]', None, 'threads')
    attention: Literal['sdpa', 'eager'] = 'sdpa'
    amp: Literal['none', 'bfloat16', 'float16'] = 'none'
    grad_checkpointing: bool = False
    compile: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, 'run')
        different = 0 < len(self.seeds) == len(set(self.seeds))
        require('run.seeds', self.seeds, different, 'one seed or several different ones')


@dataclass(frozen=True)
class TextConfig(Experiment):
    """One experiment with texts; `model` is `{preset: ..., **keyword arguments of FastformerConfig}`.

    Each task has a subclass, with a `data` section of its own.

    Attributes:
        task: A name of `tasks.TASKS`, which decides the rest.
    """

    # The configuration of the task's model, whose fields `model` may have, except the reserved ones, with the reason.
    model_config: ClassVar[type[FastformerConfig]] = FastformerConfig
    reserved: ClassVar[Mapping[str, str]] = RESERVED_KEYS
    # Meanings of further keys of `model`, which are texts.
    more_keys: ClassVar[Mapping[str, str]] = {}

    task: str = 'classification'
    model: dict[str, Any] = field(default_factory=dict)
    data: TextData = field(default_factory=TextData)
    optim: TextOptimizer = field(default_factory=TextOptimizer)
    schedule: TextSchedule = field(default_factory=TextSchedule)
    run: TextRunConfig = field(default_factory=TextRunConfig)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.check_batch_size(1)

    @classmethod
    @cache
    def model_schema(cls) -> type:
        """Return the keys of the `model` section as a dataclass: ours, without those of transformers."""
        ours = [each for each in reversed(cls.model_config.__mro__) if issubclass(each, FastformerConfig)]
        hints = {name: hint for each in ours for name, hint in each.__annotations__.items()}
        texts = {'preset': 'A column of the Table 9 presets, which the other keys change.', **cls.more_keys}
        reserved = {key: f'Not for an experiment: {reason}.' for key, reason in cls.reserved.items()}
        defaults = {name: as_yaml(getattr(cls.model_config, name, None)) for name in hints}
        return arguments_schema({**dict.fromkeys(texts, str), **hints}, ours, {**reserved, **texts}, defaults)

    def check_model(self) -> dict[str, Any]:
        """Return the `model` section, `{preset: ..., **keyword arguments of FastformerConfig}`, in its types.

        Raises:
            ValueError: an unknown key, a value of the wrong type, or values that exclude each other.
        """
        refuse_reserved(self.model, self.reserved)
        checked = check_arguments(self.model, self.model_schema())
        named = (
            ('preset', PRESETS, 'a preset'),
            ('encoder_mixer', ENCODERS, 'an encoder'),
            ('hidden_act', ACT2FN, 'a function'),
        )
        for key, names, what in named:
            if checked.get(key) is not None and checked[key] not in names:
                hint = f'; {IMPORT_HINT}' if key == 'encoder_mixer' else ''
                raise ValueError(unknown(f'model.{key}', checked[key], names, what) + hint)
        fields = {key: value for key, value in checked.items() if key not in self.more_keys}
        try:
            text_model_config(fields, self.data.max_length, self.model_config)
        except ValueError as error:
            raise ValueError(f'model: {error}') from error
        return checked


def stated_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the `model` section on top of its preset of Table 9, if any."""
    preset = model.get('preset')
    own = {key: value for key, value in model.items() if key != 'preset'}
    return {**({} if preset is None else PRESETS[preset].model), **own}


def text_model_config(
    model: Mapping[str, Any], max_length: int, config_class: type[FastformerConfig] = FastformerConfig, **more: Any
) -> FastformerConfig:
    """Create the FastformerConfig of the `model` section: its preset of Table 9, if any, changed by its other keys.

    Args:
        max_length: Maximal tokens of a text.
        config_class: That class, or the task's subclass of it.
        more: What the data decide.

    Raises:
        ValueError: values that exclude each other.
    """
    return config_class(**{**stated_model(model), 'max_position_embeddings': max_length, **more})
