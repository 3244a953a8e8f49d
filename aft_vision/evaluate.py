"""Accuracy of a classifier on a loader, and the model that a checkpoint holds."""

import contextlib
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import timm
import torch
from timm.task.evaluator import ClassificationEvaluator, evaluation_sample_limit
from torch import nn
from tqdm import tqdm

from aft_vision.models.aft_vit import StateDictError, check_state_dict

CHECKPOINT_KEYS = ('model_name', 'model_kwargs', 'state_dict')


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    loader: Any,
    device: torch.device | str = 'cpu',
    *,
    amp_dtype: torch.dtype | None = None,
    progress: bool = False,
) -> dict[str, float]:
    """Measure loss, accuracy and speed of a classifier; every sample counts exactly once.

    Args:
        model: Maps images (B, 3, H, W) to logits; evaluated in eval mode and returned to the mode it came in.
        loader: Yields (images, class indices (B,)).
        amp_dtype: Autocast data type; None runs in the model's own.
        progress: Show a progress bar on standard error.

    Returns:
        `top1` and `top5` in percent, `loss` (mean cross-entropy), `samples`, and `images_per_second` of the forward
        pass alone: without the loading, and without the first batch if there are others.

    Raises:
        ValueError: the loader is empty.
    """
    device = torch.device(device)
    evaluator = ClassificationEvaluator(device, max_samples=evaluation_sample_limit(loader))
    was_training = model.training
    model.eval()
    timings: list[tuple[int, float]] = []
    for images, targets in tqdm(loader, desc='evaluate', unit='batch', leave=False, disable=not progress):
        # All of its images were corrupt and skipped.
        if not len(images):
            continue
        images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        _synchronize(device)
        start = time.perf_counter()
        with torch.autocast(device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
            logits = model(images)
        _synchronize(device)
        timings.append((len(images), time.perf_counter() - start))
        evaluator.update(logits, targets)
    model.train(was_training)
    if not evaluator.num_samples:
        raise ValueError('expected a loader with at least one sample, got an empty one')
    metrics = {name: float(value) for name, value in evaluator.compute().items()}
    return {**metrics, 'images_per_second': _throughput(timings), 'samples': evaluator.num_samples}


def load_model(checkpoint: str | Path, device: torch.device | str = 'cpu') -> nn.Module:
    """Rebuild the trained model that a checkpoint holds.

    Args:
        checkpoint: A file written by the trainer (`last.pth`, `best.pth`), or a directory exported with
            `timm.models.save_for_hf`.

    Returns:
        The model in eval mode.

    Raises:
        ValueError: the path does not exist, is no checkpoint or a damaged one, or its weights do not fit its model.
    """
    checkpoint = Path(checkpoint)
    if checkpoint.is_dir():
        if not (checkpoint / 'config.json').is_file():
            raise ValueError(f'expected an exported model with a config.json in {checkpoint}, got none')
        return timm.create_model(f'local-dir:{checkpoint}', pretrained=True).to(device).eval()
    content = read_checkpoint(checkpoint)
    model = timm.create_model(content['model_name'], **content['model_kwargs'])
    load_matching_state_dict(model, content['state_dict'], source=str(checkpoint))
    return model.to(device).eval()


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a trainer's checkpoint onto the CPU, executing nothing that it contains.

    Raises:
        ValueError: the file does not exist, is damaged, or is something else.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f'expected a checkpoint file or an exported directory, got {path}, which does not exist')
    try:
        content = torch.load(path, map_location='cpu', weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f'expected a whole checkpoint, got {path}, which is truncated or of another kind: {reason}'
        ) from error
    missing = [key for key in CHECKPOINT_KEYS if not isinstance(content, dict) or key not in content]
    if missing:
        found = ', '.join(list(map(str, content))[:5]) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f'expected a checkpoint with {", ".join(CHECKPOINT_KEYS)}, got {path} with {found}')
    return content


def load_matching_state_dict(model: nn.Module, state_dict: dict[str, torch.Tensor], source: str) -> None:
    """Load weights that must fit exactly.

    Raises:
        ValueError: names or shapes differ; the message lists the first differing keys of each kind.
    """
    try:
        check_state_dict(model, state_dict)
    except StateDictError as error:
        raise ValueError(f'{source}: {error}') from error
    model.load_state_dict(state_dict)


def initialize_model(model: nn.Module, checkpoint: str | Path, reset_head: bool = False) -> None:
    """Start a model from the weights of a checkpoint; those that depend on the image size are resampled.

    Args:
        checkpoint: As of `load_model`, of a model of the same architecture.
        reset_head: Leave the model's classifier as it is.

    Raises:
        ValueError: as `load_model`, or the checkpoint has another number of classes and the head is not reset.
    """
    content = {} if Path(checkpoint).is_dir() else read_checkpoint(checkpoint)
    state_dict = content.get('state_dict') or load_model(checkpoint).state_dict()
    filter_function = getattr(sys.modules[type(model).__module__], 'checkpoint_filter_fn', None)
    if filter_function is not None:
        state_dict = filter_function(state_dict, model)
    cfg: Any = model.pretrained_cfg
    classifiers = (cfg['classifier'],) if isinstance(cfg['classifier'], str) else cfg['classifier']
    own = model.state_dict()
    for key in [f'{name}.{kind}' for name in classifiers for kind in ('weight', 'bias')]:
        if reset_head and key in own:
            state_dict[key] = own[key]
        elif key in own and key in state_dict and state_dict[key].shape[0] != own[key].shape[0]:
            raise ValueError(
                f'expected a checkpoint with {own[key].shape[0]} classes, as the data set has, got {checkpoint} with '
                f'{state_dict[key].shape[0]}; run.reset_head=true starts with a new classifier'
            )
    load_matching_state_dict(model, state_dict, source=str(checkpoint))


def reset_peak_memory(device: torch.device | str) -> None:
    """Start a new measurement of `peak_memory_mb`, where the system can: on CUDA, and on the CPU under Linux."""
    if torch.device(device).type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path('/proc/self/clear_refs').write_text('5')


def peak_memory_mb(device: torch.device | str) -> float:
    """Peak allocation on the device, or the peak resident memory of this process on a CPU, in MB of 2**20 bytes."""
    if torch.device(device).type == 'cuda':
        return torch.cuda.max_memory_allocated(device) / 2**20
    with contextlib.suppress(OSError):
        for line in Path('/proc/self/status').read_text().splitlines():
            if line.startswith('VmHWM:'):
                return int(line.split()[1]) / 2**10
    # Unix alone has it, so it is not imported with the module.
    import resource

    # macOS counts bytes, the others kilobytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == 'darwin' else 2**10)


def _synchronize(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def _throughput(timings: list[tuple[int, float]]) -> float:
    """Images per second, without the first batch, which pays for warming up."""
    measured = timings[1:] or timings
    return sum(count for count, _ in measured) / max(sum(seconds for _, seconds in measured), 1e-9)
