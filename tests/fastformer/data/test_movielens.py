import os
from pathlib import Path

import numpy as np
import pytest
from helpers import unpack_ratings
from text_files import write_movielens

from aft_vision.fastformer.data.movielens import read_movielens


def watched(folder: Path) -> dict[str, list[str]]:
    """The films of each user by time, of u.data."""
    rows = [line.split('\t') for line in (folder / 'u.data').read_text().splitlines()]
    order = sorted(range(len(rows)), key=lambda i: (int(rows[i][3]), i))
    return {user: [rows[i][1] for i in order if rows[i][0] == user] for user in {row[0] for row in rows}}


def test_every_film_is_an_impression_after_those_before_it(tmp_path):
    folder = write_movielens(tmp_path)
    news, parts = read_movielens(folder, max_behaviors=3, negatives=6)
    expected = watched(folder)
    for part, places in (('train', slice(1, -2)), ('validation', slice(-2, -1)), ('test', slice(-1, None))):
        found = parts[part]
        wanted = [(user, place) for user, films in expected.items() for place in range(len(films))[places]]
        assert sorted(found.impression_ids) == sorted(f'{user}-{place}' for user, place in wanted)
        for number, name in enumerate(found.impression_ids):
            user, place = name.split('-')
            films = expected[user]
            assert [news.ids[row] for row in found.histories[number]] == films[: int(place)][-3:]
            shown = [news.ids[row] for row in found.candidates[number]]
            first = found.candidates.starts[number]
            labels = found.labels[first : first + 7]
            assert [film for film, label in zip(shown, labels, strict=True) if label] == [films[int(place)]]
            assert len(set(shown)) == 7
            assert set(shown) & set(films[: int(place) + 1]) == {films[int(place)]}


def test_films_that_are_watched_later_are_shown_as_others_are(tmp_path):
    folder = write_movielens(tmp_path)
    news, parts = read_movielens(folder, negatives=6)
    last = {user: films[-1] for user, films in watched(folder).items()}
    found = parts['train']
    # Leaving them out in training would tell which ones are tested.
    assert any(
        last[name.split('-')[0]] in {news.ids[row] for row in found.candidates[number]}
        for number, name in enumerate(found.impression_ids)
    )


def test_the_watched_film_stands_anywhere_among_the_candidates(tmp_path):
    parts = read_movielens(write_movielens(tmp_path, users=40), negatives=3)[1]
    places = np.flatnonzero(parts['test'].labels) % 4
    assert set(places.tolist()) == {0, 1, 2, 3}


def test_both_layouts_give_the_same_impressions(tmp_path):
    found = [read_movielens(write_movielens(tmp_path / str(i), original=i == 0), negatives=5) for i in range(2)]
    (news, parts), (other, others) = found
    assert news.ids == other.ids
    assert news.texts[0] == 'Film 0, Thé (1995) Action'
    assert other.texts[0] == 'Film 0, Thé 1995 Action'
    for part in parts:
        assert np.array_equal(parts[part].candidates.values, others[part].candidates.values)
        assert np.array_equal(parts[part].histories.values, others[part].histories.values)


def test_candidates_depend_on_the_seed(tmp_path):
    folder = write_movielens(tmp_path)
    first, same, other = (read_movielens(folder, negatives=5, seed=seed)[1]['test'] for seed in (0, 0, 1))
    assert np.array_equal(first.candidates.values, same.candidates.values)
    assert not np.array_equal(first.candidates.values, other.candidates.values)


def test_no_more_candidates_than_films(tmp_path):
    parts = read_movielens(write_movielens(tmp_path), negatives=99)[1]
    assert parts['test'].candidates.sizes.max() < 40


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('u.data', '1\t1\t5\n', r'u.data, line 1, column 4: expected 4 columns \(user_id, .*got 3'),
        ('u.data', '1\t1\t5\tnoon\n', "line 1, column 'timestamp': expected seconds"),
        ('u.data', '1\t1\t5\tnan\n', "line 1, column 'timestamp': expected seconds"),
        ('u.data', '1\t1\t6\t3\n', "line 1, column 'rating': expected 1, 2, 3, 4, 5, got '6'"),
        ('u.data', '1\t99\t5\t3\n', "line 1, column 'item_id': expected one of 40 films, got '99'"),
        ('u.item', '1|Film|x\n', r'u.item, line 1, column 4: expected 24 columns'),
        ('ml-100k.inter', 'user_id:token\titem:token\n1\t1\n', r'line 1: .* item_id, .*got user_id, item'),
        ('ml-100k.item', 'item_id:token\ttitle:token_seq\n1\tA\n', r'line 1: .* movie_title, .*got item_id, title'),
    ],
)
def test_what_is_no_movielens_is_named(tmp_path, name, content, message):
    write_movielens(tmp_path, original=name.startswith('u'))
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_movielens(tmp_path)


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r'expected u.data and u.item, or ml-100k.inter and ml-100k.item, in'):
        read_movielens(tmp_path)


@pytest.mark.skipif('AFT_DATA' not in os.environ, reason='needs AFT_DATA with ctr_samples.tar.xz')
def test_the_real_films_are_read(tmp_path):
    news, parts = read_movielens(unpack_ratings(tmp_path, 10_000), negatives=4)
    assert (len(news), news.texts[0]) == (1682, "Toy Story 1995 Animation Children's Comedy")
    # 10,000 ratings of 385 users, less the first film of each; 379 have a second one, and 373 a third.
    assert [len(parts[part]) for part in ('train', 'validation', 'test')] == [8_863, 373, 379]
