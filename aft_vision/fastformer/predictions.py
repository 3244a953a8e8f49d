"""Predictions in the format of MIND's leaderboard: `impression_id [r1,r2,...]`, the rank of each candidate.

Ranks count from 1, in the order of the candidates in behaviors.tsv. The scorer splits a line at its spaces, so there is
none inside the brackets.
"""

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .data.files import read_text_lines
from .metrics import rank_candidates

MEMBER = 'prediction.txt'


class Predictions(NamedTuple):
    """The ranks of all candidates (n,), one impression after another, and how many each impression has (I,)."""

    impression_ids: list[str]
    ranks: np.ndarray
    sizes: np.ndarray

    @property
    def scores(self) -> np.ndarray:
        """Return 1 / rank (n,), the scores that the leaderboard's scorer takes."""
        return 1 / self.ranks


def write_predictions(path: str | Path, impression_ids: Sequence[str], scores: ArrayLike, sizes: ArrayLike) -> Path:
    """Write the ranks of candidates, the largest score first; of equal ones the earlier first.

    Args:
        path: A text file, or a .zip that will hold prediction.txt, as the leaderboard takes it.
        impression_ids: (I,)
        scores: (n,), of the candidates of all impressions, one impression after another.
        sizes: (I,), how many candidates each impression has; they sum to n.

    Raises:
        ValueError: lengths that do not fit, or a score that is NaN.
    """
    path, sizes = Path(path), np.asarray(sizes)
    if len(impression_ids) != len(sizes):
        raise ValueError(f'expected as many impression_ids as sizes ({len(sizes)}), got {len(impression_ids)}')
    ranks = np.split(rank_candidates(scores, sizes), np.cumsum(sizes)[:-1]) if len(sizes) else []
    rows = zip(impression_ids, ranks, strict=True)
    text = ''.join(f'{name} [{",".join(map(str, row.tolist()))}]\n' for name, row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == '.zip':
        with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
            # Without the time of writing, so that equal predictions are equal files.
            archive.writestr(zipfile.ZipInfo(MEMBER), text, zipfile.ZIP_DEFLATED)
    else:
        path.write_text(text, encoding='utf-8')
    return path


def read_predictions(path: str | Path) -> Predictions:
    """Read such a file, or the .zip of it, as strictly as the leaderboard's scorer does.

    Raises:
        ValueError: a line is not an impression and its ranks from 1; names the line.
    """
    impression_ids: list[str] = []
    ranks: list[int] = []
    sizes: list[int] = []
    for number, line in read_text_lines(path):
        place, parts = f'{path}, line {number}', line.split()
        if len(parts) != 2:
            raise ValueError(f'{place}: expected an impression and [r1,r2,...] without spaces, got {len(parts)} parts')
        row = _parse_ranks(place, parts[1])
        impression_ids.append(parts[0])
        ranks.extend(row)
        sizes.append(len(row))
    return Predictions(impression_ids, np.array(ranks, dtype=np.int64), np.array(sizes, dtype=np.int64))


def _parse_ranks(place: str, text: str) -> list[int]:
    try:
        ranks = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f'{place}: expected ranks like [2,1,3], got {text:.80}') from error
    if not isinstance(ranks, list) or sorted(map(str, ranks)) != sorted(map(str, range(1, len(ranks) + 1))):
        raise ValueError(f'{place}: expected each rank from 1 on once, got {text:.80}')
    return ranks
