"""Accuracy of a classifier on a loader, and loading of checkpoints."""

import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.task.evaluator import ClassificationEvaluator
from torch import nn
from tqdm import tqdm

from aft_vision.data.native import Inputs, move
from aft_vision.devices import synchronize
from aft_vision.files import find_checkpoint
from aft_vision.layers import aft_mixers
from aft_vision.models.aft_vit import AFTVisionTransformer, checkpoint_filter_fn
from aft_vision.models.decoders import DECODERS
from aft_vision.models.deit_transfer import deit_to_aft
from aft_vision.models.state_dict import StateDictError, check_state_dict
from aft_vision.models.transfer_report import describe_transfer
from aft_vision.models.transfer_source import build_model, find_stated_grid, load_folder, set_license
from aft_vision.models.weight_files import load_torch_file
from aft_vision.modes import in_evaluation
from aft_vision.sizes import record_size

_logger = logging.getLogger(__name__)

CHECKPOINT_KEYS = {'model_name': str, 'model_kwargs': dict, 'state_dict': dict}


class ForeignFileError(ValueError):
    """An error of a file of torch that is no checkpoint of this package."""


def evaluate(
    model: nn.Module,
    loader: Any,
    device: torch.device | str = 'cpu',
    *,
    amp_dtype: torch.dtype | None = None,
    distributed: bool = False,
    progress: bool = False,
) -> dict[str, float]:
    """Measure loss, accuracy and speed of a classifier; every sample is counted exactly once.

    Args:
        model: Maps images (B, 3, H, W) to logits; evaluated in eval mode; its mode is restored afterwards.
        loader: Yields (images, class indices (B,)); for a model of native shapes, dicts of timm's NaFlex collator.
        amp_dtype: Autocast data type; None keeps the model's data type.
        distributed: Sum over the processes of the default group, each of which has its share of the samples; speed is
            this process's.
        progress: Show a progress bar on standard error.

    Returns:
        `top1` in percent, and `top5` of more than five classes, `loss` (mean cross-entropy), `samples`, and
        `images_per_second` of the forward pass, without loading and without the first batch if there are others.

    Raises:
        ValueError: the loader is empty.
    """
    return evaluate_all([model], loader, device, amp_dtype=amp_dtype, distributed=distributed, progress=progress)[0]


@torch.inference_mode()
def evaluate_all(
    models: Sequence[nn.Module],
    loader: Any,
    device: torch.device | str = 'cpu',
    *,
    amp_dtype: torch.dtype | None = None,
    distributed: bool = False,
    progress: bool = False,
    evaluator: Callable[[], Any] | None = None,
) -> list[dict[str, float]]:
    """Evaluate several models in one pass over the loader, otherwise as `evaluate`.

    Args:
        evaluator: Builds the evaluator of one model's outputs, with the interface of timm's evaluators; by default for
            classifiers.
    """
    device = torch.device(device)
    meters = [_Meter(model, device, evaluator() if evaluator else ClassificationEvaluator(device)) for model in models]
    batches = tqdm(loader, desc='evaluate', unit='batch', leave=False, disable=None if progress else True)
    with in_evaluation(*models):
        for images, targets in batches:
            # All images of the batch were corrupt and skipped.
            if not len(targets):
                continue
            images, targets = move(images, device, non_blocking=True), targets.to(device, non_blocking=True)
            for meter in meters:
                meter.update(images, targets, amp_dtype)
    return [meter.finish(distributed) for meter in meters]


class _Meter:
    """A meter of one model's accuracy and time."""

    def __init__(self, model: nn.Module, device: torch.device, evaluator: Any) -> None:
        self.model, self.device, self.evaluator = model, device, evaluator
        self.timings: list[tuple[int, float]] = []
        self.outputs = 0

    def update(self, images: Inputs, targets: torch.Tensor, amp_dtype: torch.dtype | None) -> None:
        synchronize(self.device)
        start = time.perf_counter()
        with torch.autocast(self.device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
            logits = self.model(images)
        synchronize(self.device)
        self.timings.append((len(targets), time.perf_counter() - start))
        self.evaluator.update(logits, targets)
        if isinstance(self.evaluator, ClassificationEvaluator):
            self.outputs = logits.shape[-1]

    def finish(self, distributed: bool) -> dict[str, float]:
        metrics = {name: float(value) for name, value in self.evaluator.compute(distributed).items()}
        # Of five classes or fewer, all are among the first five.
        if 0 < self.outputs <= 5:
            metrics.pop('top5', None)
        samples = self.evaluator.counts[0].clone()
        if distributed:
            torch.distributed.all_reduce(samples)
        if not samples:
            raise ValueError('expected a loader with at least one sample, got an empty one')
        return {**metrics, 'images_per_second': _throughput(self.timings), 'samples': int(samples)}


def load_model(checkpoint: str | Path, device: torch.device | str = 'cpu', **kwargs: Any) -> nn.Module:
    """Rebuild the trained model of a checkpoint.

    Args:
        checkpoint: A file of the trainer (`last.pth`, `best.pth`), the folder of a run, for its `best.pth`, a
            directory exported with `timm.models.save_for_hf`, or the name of a model of timm with weights.
        kwargs: Arguments of the model instead of those that it was trained with, such as resample_bias=True.

    Returns:
        The model in eval mode.

    Raises:
        ValueError: the path does not exist, is not a checkpoint, is damaged, or has weights that do not match its
            model.
        ConnectionError: published weights cannot be downloaded; those inside the package need no network.
    """
    if not Path(checkpoint).exists() and timm.models.is_model_pretrained(str(checkpoint)):
        return build_model(str(checkpoint), pretrained=True, **kwargs).to(device).eval()
    checkpoint = find_checkpoint(checkpoint)
    if checkpoint.is_dir():
        return load_folder(checkpoint, **kwargs).to(device).eval()
    content = read_checkpoint(checkpoint)
    if content['model_name'] in DECODERS:
        raise ValueError(
            f'expected an image classifier, got {checkpoint} with {content["model_name"]}, a pixel or character model'
        )
    try:
        model = build_model(content['model_name'], **{**content['model_kwargs'], **kwargs})
    except ValueError as error:
        raise ValueError(f'{checkpoint}: {error}') from error
    load_matching_state_dict(model, content['state_dict'], source=str(checkpoint))
    # The preprocessing and the class names, as in an export.
    cfg: Any = model.pretrained_cfg
    data_config = content.get('data_config') or {}
    cfg.update(data_config)
    if 'input_size' in data_config and 'img_size' not in kwargs:
        record_size(model, data_config['input_size'][-2:])
    if content.get('class_names'):
        cfg['label_names'] = content['class_names']
    set_license(model, content.get('license'))
    return model.to(device).eval()


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a trainer's checkpoint onto the CPU without executing code from it.

    Raises:
        ValueError: the file does not exist, is damaged, or is not a checkpoint.
    """
    path = find_checkpoint(path)
    if not path.is_file():
        raise ValueError(
            f'expected a checkpoint file, an exported directory or a model with weights, got {path}, which does '
            'not exist'
        )
    content = load_torch_file(path)
    is_complete = isinstance(content, dict) and all(isinstance(content.get(k), t) for k, t in CHECKPOINT_KEYS.items())
    if not is_complete:
        found = ', '.join(list(map(str, content))[:5]) if isinstance(content, dict) else type(content).__name__
        raise ForeignFileError(
            f'expected a checkpoint with {", ".join(CHECKPOINT_KEYS)}, got {path} with {found}; '
            'python -m tools.transfer_deit converts the weights of a DeiT or ViT'
        )
    return content


def read_record(checkpoint: str | Path) -> dict[str, Any]:
    """Read a trainer's checkpoint; return {} for an exported folder or a name in timm, which have none.

    Raises:
        ValueError: the file is damaged or not a checkpoint.
    """
    return read_checkpoint(checkpoint) if find_checkpoint(checkpoint).is_file() else {}


def load_matching_state_dict(model: nn.Module, state_dict: dict[str, torch.Tensor], source: str) -> None:
    """Load weights that must match exactly.

    Raises:
        ValueError: names or shapes differ; the message lists the first differing keys of each kind.
    """
    try:
        check_state_dict(model, state_dict)
    except StateDictError as error:
        raise ValueError(f'{source}: {error}') from error
    model.load_state_dict(state_dict)


def initialize_model(model: nn.Module, checkpoint: str | Path, reset_head: bool = False, transfer: bool = True) -> None:
    """Initialise a model from a checkpoint, and resample parameters that depend on the image size.

    The licence of the checkpoint's weights becomes that of the model.

    Args:
        checkpoint: As in `load_model`, for a model of the same architecture. An AFT model also takes a DeiT or ViT of
            the same width and depth, whose weights are transferred (AFT Table 8). The name of the checkpoint's model
            decides.
        reset_head: Keep the model's own classifier.
        transfer: False accepts only the same architecture.

    Raises:
        ValueError: as `load_model`, or the checkpoint has another number of classes and the head is not reset.
    """
    state_dict, of_aft, grid, license = _read_start(checkpoint)
    cfg: Any = model.pretrained_cfg
    classifiers = (cfg['classifier'],) if isinstance(cfg['classifier'], str) else cfg['classifier']
    own = model.state_dict()
    heads = {key: own[key] for name in classifiers for key in (f'{name}.weight', f'{name}.bias') if key in own}
    # Before the filter, because a transfer keeps the model's own head if the numbers of classes differ.
    for key, head in heads.items():
        if not reset_head and key in state_dict and state_dict[key].shape[0] != head.shape[0]:
            raise ValueError(
                f'expected a checkpoint with {head.shape[0]} classes, as the data set has, got {checkpoint} with '
                f'{state_dict[key].shape[0]}; run.reset_head=true starts with a new classifier'
            )
    is_aft = bool(aft_mixers(model))
    filter_function = getattr(sys.modules[type(model).__module__], 'checkpoint_filter_fn', None)
    try:
        if is_aft and transfer and not of_aft:
            state_dict, report = deit_to_aft(state_dict, model, grid=grid)
            _logger.warning(describe_transfer(report, model))
        # The filter of an AFT model treats other keys as those of a ViT.
        elif isinstance(model, AFTVisionTransformer) and state_dict.keys() == own.keys():
            state_dict = checkpoint_filter_fn(state_dict, model, grid)
        elif filter_function is not None and not is_aft:
            state_dict = filter_function(state_dict, model)
    except StateDictError as error:
        raise ValueError(f'{checkpoint}: {error}') from error
    load_matching_state_dict(model, {**state_dict, **(heads if reset_head else {})}, source=str(checkpoint))
    set_license(model, license)


def _read_start(
    checkpoint: str | Path,
) -> tuple[dict[str, torch.Tensor], bool, tuple[int, int] | None, str | None]:
    """Return the weights of a checkpoint, whether of an AFT model, and their token grid and licence if known."""
    content = read_record(checkpoint)
    # Building the model only to get its class would cost time and random numbers.
    if content and timm.is_model(content['model_name']):
        of_aft = timm.models.model_entrypoint(content['model_name']).__module__.startswith('aft_vision.')
        grid = find_stated_grid(content['state_dict'], content['model_kwargs'])
        return content['state_dict'], of_aft, grid, content.get('license')
    source = load_model(checkpoint)
    grid = getattr(getattr(source, 'patch_embed', None), 'grid_size', None)
    cfg: Any = source.pretrained_cfg
    return source.state_dict(), bool(aft_mixers(source)), grid, cfg.get('license')


def check_classes(model: nn.Module, class_names: Sequence[str], data: str) -> None:
    """Raise a ValueError unless the data set has the classes of the model, in the same order."""
    if len(class_names) != model.num_classes:
        raise ValueError(
            f'expected {model.num_classes} classes in {data}, as many as the model has, got {len(class_names)}'
        )
    cfg: Any = model.pretrained_cfg
    trained = cfg.get('label_names') or class_names
    if len(trained) != len(class_names):
        # Names of another classifier, which was replaced.
        return
    differing = [(old, new) for old, new in zip(trained, class_names, strict=True) if old != new]
    # Some data sets have numbers instead of class names.
    numbered = [str(index) for index in range(len(class_names))]
    if differing and numbered not in (list(trained), list(class_names)):
        raise ValueError(f'expected the classes of the model in {data}, got {differing[0][1]} for {differing[0][0]}')


def _throughput(timings: list[tuple[int, float]]) -> float:
    """Return images per second, without the first batch, which includes the warm-up; NaN without batches."""
    if not timings:
        return math.nan
    measured = timings[1:] or timings
    return sum(count for count, _ in measured) / max(sum(seconds for _, seconds in measured), 1e-9)
