"""Word embeddings from GloVe text files; words without a vector are drawn at random."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from aft_vision.fastformer.data.files import read_lines

# Standard deviation of the rows if fewer than two words are found, which have no covariance.
DEFAULT_STD = 0.02


class Coverage(NamedTuple):
    """Counts of the rows of an embedding: found in the file, drawn, and of padding."""

    found: int
    drawn: int
    padding: int


def load_glove(
    model_or_embedding: PreTrainedModel | nn.Embedding,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path,
    seed: int = 0,
) -> Coverage:
    """Fill an embedding with the vectors of its words, in place; later initialisation by transformers keeps them.

    Words that the file lacks, special tokens and rows beyond the vocabulary are drawn from the normal distribution
    with mean and covariance of the words found; padding is zero. A word that is in the file only in lower case takes
    that vector.

    Args:
        model_or_embedding: Its input embedding is filled, so it needs as many columns as the file has numbers a line.
        tokenizer: Whose words the rows stand for.
        path: A GloVe text file, or a .zip or .gz of it.
        seed: Seed of the rows that are drawn.

    Raises:
        ValueError: the file is damaged or of another width, or the embedding has fewer rows than there are words.
    """
    model = model_or_embedding
    embedding: Any = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else model
    rows, dim = embedding.weight.shape
    vocabulary = tokenizer.get_vocab()
    largest = max(vocabulary.values())
    if largest >= rows:
        raise ValueError(f'expected an embedding of {largest + 1} rows or more, as the tokenizer has ids, got {rows}')
    special = set(tokenizer.all_special_ids)
    words = {word: index for word, index in vocabulary.items() if index not in special}
    padding = tokenizer.pad_token_id if embedding.padding_idx is None else embedding.padding_idx
    matrix, coverage = glove_matrix(words, rows, read_glove(path, words, dim), dim, padding, seed)
    with torch.no_grad():
        embedding.weight.copy_(torch.from_numpy(matrix))
    # transformers.initialization reads it: without it, a later post_init() would initialise the rows again.
    embedding.weight._is_hf_initialized = True
    return coverage


def read_glove(path: str | Path, words: Iterable[str], dim: int) -> dict[str, np.ndarray]:
    """Stream a GloVe text file and keep the vectors (dim,) float32 of some words and of their lower-cased spellings.

    Raises:
        ValueError: the file is damaged, which names the line, or has another width.
    """
    wanted = {spelling.encode(): spelling for word in words for spelling in (word, word.lower())}
    vectors: dict[str, np.ndarray] = {}
    for location, token, numbers in _split_lines(Path(path), dim):
        word = wanted.get(token)
        if word is not None and word not in vectors:
            vectors[word] = _parse_vector(location, numbers)
    return vectors


def glove_matrix(
    words: dict[str, int], rows: int, vectors: dict[str, np.ndarray], dim: int, padding: int | None, seed: int
) -> tuple[np.ndarray, Coverage]:
    """Make an embedding (rows, dim) float32 of the vectors, and draw the rows of what has none.

    Args:
        words: The row of each word.
        padding: The row that is zero; None for none.
    """
    matrix = np.zeros((rows, dim))
    is_drawn = np.ones(rows, dtype=bool)
    for word, row in words.items():
        vector = vectors.get(word, vectors.get(word.lower()))
        if vector is not None and row != padding:
            matrix[row], is_drawn[row] = vector, False
    known = matrix[~is_drawn]
    if padding is not None:
        is_drawn[padding] = False
    drawn = int(is_drawn.sum())
    generator = np.random.default_rng(seed)
    if len(known) < 2:
        matrix[is_drawn] = generator.normal(0, DEFAULT_STD, (drawn, dim))
    else:
        covariance = np.cov(known, rowvar=False).reshape(dim, dim)
        matrix[is_drawn] = generator.multivariate_normal(known.mean(axis=0), covariance, drawn, method='eigh')
    return matrix.astype(np.float32), Coverage(len(known), drawn, int(padding is not None))


def _split_lines(path: Path, dim: int) -> Iterator[tuple[str, bytes, bytes]]:
    """Stream location, token and numbers of the lines; a token may hold spaces, so lines are split from the right."""
    for number, line in read_lines(path):
        line = line.rstrip(b' \r\n')
        spaces = line.count(b' ')
        if number == 1 and spaces != dim:
            raise ValueError(f'expected a GloVe file of a token and {dim} numbers a line, got {spaces} in {path}')
        location = f'{path}, line {number}'
        if spaces < dim:
            raise ValueError(f'{location}: expected a token and {dim} numbers, got {spaces + 1} fields')
        end = line.index(b' ') if spaces == dim else len(line.rsplit(b' ', dim)[0])
        yield location, line[:end], line[end + 1 :]


def _parse_vector(location: str, numbers: bytes) -> np.ndarray:
    try:
        vector = np.array([float(number) for number in numbers.split(b' ')], dtype=np.float32)
    except ValueError as error:
        raise ValueError(f'{location}: expected numbers after the token: {error}') from error
    if not np.isfinite(vector).all():
        raise ValueError(f'{location}: expected finite numbers after the token')
    return vector
