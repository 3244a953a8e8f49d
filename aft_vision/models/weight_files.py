"""Weight files with checksums: nothing else would detect a flipped bit."""

import json
import pickle
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from aft_vision.errors import first_line
from aft_vision.files import replacing

# Bytes per read.
CHUNK = 2**22
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
        # That of the images is for non-commercial research.
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
    """Read a `torch.save` file onto the CPU without executing code from it.

    Raises:
        ValueError: it is damaged, of another kind, or holds more than tensors and plain containers.
    """
    try:
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


def add_checksum(path: str | Path) -> None:
    """Write the checksum of the tensors of a safetensors file into its header."""
    path = Path(path)
    with path.open('rb') as file:
        header = _read_header(file)
        # transformers accepts a file with metadata only with this entry.
        known = {'format': 'pt', **header.get('__metadata__', {})}
        header['__metadata__'] = {**known, 'crc32': f'{_checksum(file):08x}'}
        _read_header(file)
        tensors = file.read()
    encoded = json.dumps(header, separators=(',', ':')).encode()
    # Tensors begin at a multiple of eight bytes.
    encoded += b' ' * (-len(encoded) % 8)
    with replacing(path) as written:
        written.write_bytes(len(encoded).to_bytes(8, 'little') + encoded + tensors)


def check_checksum(path: str | Path) -> None:
    """Check a safetensors file written by `add_checksum`; accept files without a checksum.

    Raises:
        ValueError: the file is truncated, or its checksum is wrong.
    """
    with Path(path).open('rb') as file:
        expected = _read_header(file).get('__metadata__', {}).get('crc32')
        if expected is not None and f'{_checksum(file):08x}' != expected:
            raise ValueError(f'expected a whole file of weights, got {path}, whose checksum is wrong')


def check_checksums(folder: str | Path) -> None:
    """Check every safetensors file of a folder, as `check_checksum` does."""
    for path in sorted(Path(folder).glob('*.safetensors')):
        check_checksum(path)


def _read_header(file: IO[bytes]) -> dict[str, Any]:
    file.seek(0)
    length = int.from_bytes(file.read(8), 'little')
    try:
        # A damaged length is up to 2**64.
        header = json.loads(file.read(min(length, 100 * 2**20)))
        header.get('__metadata__', {}).get('crc32')
        return header
    except (ValueError, AttributeError) as error:
        raise ValueError(f'expected a whole file of weights, got {file.name}, whose header is damaged') from error


def _checksum(file: IO[bytes]) -> int:
    found = 0
    while chunk := file.read(CHUNK):
        found = zlib.crc32(chunk, found)
    return found
