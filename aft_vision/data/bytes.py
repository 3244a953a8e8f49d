"""Text as sequences of bytes: enwik8, text8 and other files, split into training, validation and test."""

import lzma
import re
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Training, validation and test part of enwik8 and of text8, in bytes.
PARTS = (90_000_000, 5_000_000, 5_000_000)
TEXT8 = b' abcdefghijklmnopqrstuvwxyz'
VOCABULARIES = {'bytes': 256, 'text8': len(TEXT8)}
# First bytes of archives: gzip, bzip2, zip, xz, Zstandard.
PACKED = re.compile(rb'\x1f\x8b|BZh[1-9]1AY&SY|PK\x03\x04|\xfd7zXZ|\x28\xb5\x2f\xfd')


class Text(NamedTuple):
    """A file of characters as tokens (n,) uint8, in three parts.

    Attributes:
        note: How the parts were made; '' for the first 90M, 5M and 5M bytes.
    """

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    note: str = ''


def read_text(path: str | Path, vocabulary: str = 'bytes') -> Text:
    """Read and split a file: the first 90M, 5M and 5M bytes, or 90 %, 5 % and 5 % of a shorter file.

    Args:
        path: The file, a .zip with only this file or with a file of the archive's name, or an .xz; nothing is
            downloaded.
        vocabulary: `bytes`: a token is the value of a byte. `text8`: 0 is the space, 1 to 26 are a to z.

    Raises:
        ValueError: the file is missing or damaged, has fewer than 20 bytes, or a byte is not in the vocabulary.
    """
    path = Path(path)
    if vocabulary not in VOCABULARIES:
        raise ValueError(f'expected the vocabulary {" or ".join(VOCABULARIES)}, got {vocabulary!r}')
    if not path.is_file():
        raise ValueError(f'expected a file of text, got {path}, which is none')
    content = read_bytes(path)
    if len(content) < 20:
        raise ValueError(f'expected at least 20 bytes in {path}, which is 1 for each test part, got {len(content)}')
    return split_text(encode(content, vocabulary, str(path)))


def read_bytes(path: Path) -> bytes:
    """Read a file, and unpack a .zip or .xz.

    Raises:
        ValueError: the file is damaged, or packed otherwise.
    """
    try:
        suffix = path.suffix.lower()
        if suffix == '.zip':
            content = _read_zip(path)
        elif suffix == '.xz':
            content = lzma.decompress(path.read_bytes())
        else:
            content = path.read_bytes()
    # RuntimeError: an encrypted archive; NotImplementedError, one of its kind: an unknown compression.
    except (zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(f'expected a whole file, got {path}: {error}') from error
    if PACKED.match(content):
        raise ValueError(f'expected a text, plain, .zip or .xz, got {path}, which is packed: unpack it')
    return content


def encode(content: bytes, vocabulary: str, source: str = 'the text') -> np.ndarray:
    """Map bytes to tokens (n,) uint8.

    Args:
        source: Name of the text in errors.

    Raises:
        ValueError: a byte is not in the vocabulary.
    """
    values = np.frombuffer(content, dtype=np.uint8)
    if vocabulary == 'bytes':
        return values
    # One above the largest token marks bytes outside the vocabulary.
    table = np.full(256, len(TEXT8), dtype=np.uint8)
    table[list(TEXT8)] = range(len(TEXT8))
    tokens = table[values]
    outside = int(tokens.argmax())
    if tokens[outside] == len(TEXT8):
        raise ValueError(
            f'expected bytes of the {len(TEXT8)} symbols of {vocabulary} (space, a to z) in {source}, '
            f'got {values[outside]} ({chr(values[outside])!r}) at byte {outside}'
        )
    return tokens


def decode(tokens: np.ndarray, vocabulary: str) -> bytes:
    """Undo `encode`."""
    symbols = np.arange(256, dtype=np.uint8) if vocabulary == 'bytes' else np.frombuffer(TEXT8, dtype=np.uint8)
    return symbols[tokens].tobytes()


def split_text(tokens: np.ndarray) -> Text:
    """Split tokens (n,) into the three parts, proportionally if there are fewer than 100M."""
    count, whole = len(tokens), sum(PARTS)
    note = ''
    train, valid = PARTS[0], PARTS[0] + PARTS[1]
    if count < whole:
        train, valid = count * 90 // 100, count * 95 // 100
        note = (
            f'{count:,} characters, not {whole:,}: the first 90 % ({train:,}) train, the next 5 % ({valid - train:,}) '
            f'validate, the last 5 % ({count - valid:,}) test'
        )
    elif count > whole:
        note = f'{count:,} characters, of which the first {whole:,} are used'
    return Text(tokens[:train], tokens[train:valid], tokens[valid : min(count, whole)], note)


def _read_zip(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        files = [name for name in archive.namelist() if not name.endswith('/')]
        named = [name for name in files if name == path.stem]
        if len(named or files) != 1:
            raise ValueError(f'expected 1 file, or one called {path.stem}, in {path}, got {len(files)}')
        return archive.read((named or files)[0])
