"""Predictions in the format of MIND's leaderboard: `impression_id [r1,r2,...]`, the rank of each candidate.

Ranks count from 1, in the order of the candidates in behaviors.tsv. The scorer splits a line at its spaces, so there is
none inside the brackets.
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from .metrics import rank_candidates

MEMBER = 'prediction.txt'


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
