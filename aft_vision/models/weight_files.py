"""Files of weights whose bytes are checked: a flipped bit would change a weight, and nothing else would notice."""

import json
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import torch

# Bytes that are read at once.
CHUNK = 2**22


def load_torch_file(path: str | Path) -> Any:
    """Read a file of `torch.save` onto the CPU, executing nothing that it contains.

    Raises:
        ValueError: its bytes are not those that were written; of other damage, whatever `torch.load` raises.
    """
    # Files of torch before 1.6 are no zip files, and have no checksums.
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
        if damaged is not None:
            raise ValueError(f'the checksum of {damaged} in it is wrong')
    return torch.load(path, map_location='cpu', weights_only=True)


def add_checksum(path: str | Path) -> None:
    """Write the checksum of the tensors of a safetensors file into its header."""
    path = Path(path)
    with path.open('rb') as file:
        header = _read_header(file)
        # transformers takes a file with metadata only if it says this.
        known = {'format': 'pt', **header.get('__metadata__', {})}
        header['__metadata__'] = {**known, 'crc32': f'{_checksum(file):08x}'}
        _read_header(file)
        tensors = file.read()
    encoded = json.dumps(header, separators=(',', ':')).encode()
    # Its tensors begin at a multiple of eight bytes.
    encoded += b' ' * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, 'little') + encoded + tensors)


def check_checksum(path: str | Path) -> None:
    """Check a safetensors file that `add_checksum` has been given; others are taken as they are.

    Raises:
        ValueError: the file is cut, or its bytes are not those that were written.
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
