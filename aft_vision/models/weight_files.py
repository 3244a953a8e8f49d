"""Files of weights: packaged ones, and files of torch.save, whose checksums are checked."""

import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from aft_vision.errors import first_line

# Weights inside the package: NAME.safetensors with its model card NAME.md, by the name and tag of timm.
PACKAGED = Path(__file__).parents[1] / 'weights'


def packaged_weights(name: str) -> str | None:
    """Return the path of packaged weights, such as of aft_conv_nano.imagenette; None if there are none."""
    path = PACKAGED / f'{name}.safetensors'
    return str(path) if path.is_file() else None


def packaged_cfg(name: str, classes: Sequence[str]) -> dict[str, Any]:
    """Return what timm's configuration says of packaged weights, which were trained on squares of 96 px.

    Args:
        name: such as aft_conv_nano.imagenette.
        classes: their synsets, in the order of the logits.
    """
    return {
        'file': packaged_weights(name),
        'input_size': (3, 96, 96),
        'num_classes': len(classes),
        'label_names': classes,
        'crop_pct': 1.0,
        # The licence of the images is for non-commercial research.
        'license': 'other',
    }


def forget_classes(model: nn.Module, pretrained: bool, classes: Sequence[str]) -> None:
    """Remove the names of the classes of packaged weights from the configuration of a model that has none of them."""
    cfg: Any = model.pretrained_cfg
    # Other names were given by the caller.
    known = pretrained and getattr(model, 'num_classes', None) == len(classes)
    if not known and cfg.get('label_names') == classes:
        del cfg['label_names']


def load_torch_file(path: str | Path) -> Any:
    """Read a `torch.save` file, or one of safetensors, onto the CPU without executing code from it.

    Raises:
        ValueError: it is damaged, of another kind, or holds more than tensors and plain containers.
    """
    try:
        if Path(path).suffix == '.safetensors':
            return load_file(path)
        # Files of torch before 1.6 are not zip files and have no checksums.
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                damaged = file.testzip()
            if damaged is not None:
                raise ValueError(f'the checksum of {damaged} in it is wrong')
        return torch.load(path, map_location='cpu', weights_only=True)
    except (MemoryError, PermissionError):
        raise
    # Bytes of another kind make the unpickler raise almost anything.
    except Exception as error:
        others = _other_contents(path) if isinstance(error, pickle.UnpicklingError) else []
        if not others:
            # The unpickler's reason is advice to execute the code of the file, or a byte that it does not know.
            reason = '' if isinstance(error, pickle.UnpicklingError | KeyError) else f': {first_line(error)}'
            raise ValueError(
                f'expected a whole file of weights, got {path}, which is damaged or of another kind{reason}'
            ) from error
        # timm lets this one through, which is a plain container.
        way_out = (
            'torch.save(timm.models.load_state_dict(FILE, use_ema=False), NEW_FILE) keeps only its weights'
            if others == ['argparse.Namespace']
            else 'save only its weights'
        )
        raise ValueError(
            f'expected a file of only weights, got {path} with {", ".join(others)}, and nothing but tensors is read '
            f'from a file; {way_out}'
        ) from error


def _other_contents(path: str | Path) -> list[str]:
    try:
        return list(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    # It reads only zip files, the format of every torch since 1.6.
    except (RuntimeError, ValueError, pickle.UnpicklingError):
        return []
