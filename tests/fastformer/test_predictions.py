"""The leaderboard's file: what is written, that it is read back, and what is no such file."""

import json
import zipfile

import numpy as np
import pytest
from text_files import read_predictions

from aft_vision.fastformer.metrics import ranking_metrics
from aft_vision.fastformer.predictions import write_predictions

SCORES, SIZES = [0.5, -1.0, 2.0, 3.0, 1.0, 1.0, 0.0], [3, 4]


def test_a_line_is_an_impression_and_ranks_in_the_order_of_the_candidates(tmp_path):
    path = write_predictions(tmp_path / 'new' / 'prediction.txt', ['7', '9'], SCORES, SIZES)
    assert path.read_text() == '7 [2,3,1]\n9 [1,2,3,4]\n'


@pytest.mark.parametrize('name', ['prediction.txt', 'prediction.zip'])
def test_what_is_written_is_read(tmp_path, name):
    draw = np.random.default_rng(0)
    sizes = draw.integers(1, 40, 50)
    scores, labels = draw.normal(size=sizes.sum()), draw.integers(0, 2, sizes.sum())
    ids, found, counts = read_predictions(
        write_predictions(tmp_path / name, [str(i) for i in range(50)], scores, sizes)
    )
    assert ids == [str(i) for i in range(50)]
    assert counts == sizes.tolist()
    # Without equal scores, ranks say all that the figures depend on.
    assert ranking_metrics(found, labels, sizes) == ranking_metrics(scores, labels, sizes)


def test_a_zip_holds_the_one_file_that_the_leaderboard_takes(tmp_path):
    first, again = (write_predictions(tmp_path / f'{i}.zip', ['7', '9'], SCORES, SIZES) for i in range(2))
    assert first.read_bytes() == again.read_bytes()
    with zipfile.ZipFile(first) as archive:
        assert archive.namelist() == ['prediction.txt']
        for line in archive.read('prediction.txt').decode().splitlines():
            # The scorer's own reading of a line.
            _, ranks = line.split()
            assert sorted(json.loads(ranks)) == list(range(1, len(json.loads(ranks)) + 1))


def test_impressions_without_candidates_or_none_at_all_are_written(tmp_path):
    path = write_predictions(tmp_path / 'a.txt', ['7', '8'], [1.0], [0, 1])
    assert path.read_text() == '7 []\n8 [1]\n'
    assert write_predictions(tmp_path / 'b.txt', [], [], []).read_text() == ''


@pytest.mark.parametrize(('names', 'scores'), [(['7'], SCORES), (['7', '9'], SCORES[1:])])
def test_lengths_that_do_not_fit_are_refused(tmp_path, names, scores):
    with pytest.raises(ValueError, match=r'expected|longer'):
        write_predictions(tmp_path / 'prediction.txt', names, scores, SIZES)
