"""Checkpoints that are never half-written, and the export that timm loads."""

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn


def save_checkpoint(content: dict[str, Any], path: str | Path) -> None:
    """Write `content` to `path`; whatever goes wrong, the file that was there before stays whole.

    Args:
        content: Tensors and plain containers only, so that `torch.load(weights_only=True)` reads it.

    Raises:
        OSError: the disk is full, or the file cannot be written for another reason.
    """
    path = Path(path)
    temporary = path.with_name(f'.{path.name}.tmp')
    try:
        with temporary.open('wb') as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        # torch hides the reason behind a RuntimeError of its own.
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f'could not write {path}; what was there before is whole: {reason}') from reason
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(path.parent)


def export_model(
    model: nn.Module, directory: str | Path, class_names: Sequence[str], data_config: dict[str, Any] | None = None
) -> None:
    """Write config.json and model.safetensors, which `timm.create_model('local-dir:DIR', pretrained=True)` loads.

    After `import aft_vision`, transformers' AutoModelForImageClassification loads the folder too.

    Args:
        class_names: In the order of the logits.
        data_config: The preprocessing to record: `input_size`, `crop_pct`, `mean`, `std`, `interpolation`.
    """
    directory = Path(directory)
    temporary = directory.with_name(f'.{directory.name}.tmp')
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        timm.models.save_for_hf(
            model,
            str(temporary),
            model_config={'label_names': list(class_names)},
            safe_serialization=True,
            data_config=data_config,
        )
        _name_classes_once(temporary / 'config.json')
        directory.mkdir(parents=True, exist_ok=True)
        for file in temporary.iterdir():
            os.replace(file, directory / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _sync_directory(directory)


def _name_classes_once(config: Path) -> None:
    # timm 1.0.31 writes num_classes among the model's arguments too, and transformers 5 would pass it twice.
    content = json.loads(config.read_text(encoding='utf-8'))
    content.get('model_args', {}).pop('num_classes', None)
    config.write_text(json.dumps(content, indent=2), encoding='utf-8')


def _sync_directory(directory: Path) -> None:
    """Make a rename survive a power cut, where the system allows it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
