import os

import pytest
from helpers import unpack_data, unpack_ratings
from text_files import write_mind, write_mind_behaviors, write_movielens

from aft_vision.fastformer.data.behaviors import BehaviorTable
from aft_vision.fastformer.data.interactions import read_mind_clicks, read_ratings


@pytest.mark.parametrize('original', [True, False], ids=['GroupLens', 'RecBole'])
def test_ratings_have_what_was_rated_in_earlier_seconds_and_come_in_the_order_of_time(tmp_path, original):
    folder, table = write_movielens(tmp_path, original=original), BehaviorTable()
    dataset = read_ratings(folder, table, max_behaviors=None)
    lines = (folder / ('u.data' if original else 'ml-100k.inter')).read_text().splitlines()
    ratings = [tuple(map(int, line.split('\t'))) for line in lines[not original :]]
    ratings.sort(key=lambda rating: rating[3])
    assert 0 < sum(dataset['label']) < len(dataset) == len(ratings)
    for row, (user, item, stars, seconds) in zip(dataset, ratings, strict=True):
        assert (row['user'], row['label']) == (str(user), int(stars >= 4))
        assert table.texts[row['ad']].startswith(f'Film {item - 1}, Thé ')
        earlier = [rating for rating in ratings if rating[0] == user and rating[3] < seconds]
        found = [table.texts[number].partition(',')[0] for number in row['behaviors']]
        assert found == [f'Film {rating[1] - 1}' for rating in earlier]
        assert [table.types[kind] for kind in row['behavior_types']] == [f'rated {rating[2]}' for rating in earlier]
    assert max(map(len, read_ratings(folder, BehaviorTable(), max_behaviors=2)['behaviors'])) == 2


def clock(time: str) -> tuple[int, int]:
    """Day and hour of `11/9/2019 1:36:57 AM`, all of one month."""
    date, hour, half = time.split()
    return int(date.split('/')[1]), int(hour.split(':')[0]) % 12 + 12 * (half == 'PM')


def test_the_candidates_of_mind_are_requests_with_the_clicks_before(tmp_path):
    folder, table = write_mind_behaviors(write_mind(tmp_path)), BehaviorTable()
    dataset = read_mind_clicks(folder, table, max_behaviors=3)
    titles = {line.split('\t')[0]: line.split('\t')[3] for line in (folder / 'news.tsv').read_text().splitlines()}
    rows = [line.split('\t') for line in (folder / 'behaviors.tsv').read_text().splitlines()]
    expected = []
    for number, (_, user, _, history, shown) in enumerate(sorted(rows, key=lambda row: clock(row[2]))):
        clicks = [titles[name] for name in history.split()][-3:]
        expected += [(int(each[-1]), titles[each[:-2]], clicks, user, number) for each in shown.split()]
    found = [
        (
            *(row['label'], table.texts[row['ad']], [table.texts[number] for number in row['behaviors']]),
            *(row['user'], row['impression']),
        )
        for row in dataset
    ]
    assert found == expected
    assert len({user for *_, user, _ in found}) > 20
    assert table.types == ['click']


def test_mind_without_labels_and_unknown_news_are_errors(tmp_path):
    folder = write_mind_behaviors(write_mind(tmp_path), labelled=False)
    with pytest.raises(ValueError, match=r'expected candidates with labels \(N1-0 N2-1\) in .* got none'):
        read_mind_clicks(folder, BehaviorTable())
    (folder / 'behaviors.tsv').write_text('1\tU1\t11/9/2019 1:36:57 AM\tN999\tN1-1 N998-0\n')
    with pytest.raises(ValueError, match=r"behaviors\.tsv, line 1, column 'history': .* got 'N999'"):
        read_mind_clicks(folder, BehaviorTable())
    dataset = read_mind_clicks(folder, BehaviorTable(), drop_missing=True)
    assert (dataset['label'][:], dataset['behaviors'][:]) == ([1], [[]])


@pytest.mark.skipif('AFT_DATA' not in os.environ, reason='needs AFT_DATA with ctr_samples and mind_subset.tar.xz')
def test_the_real_files_are_read(tmp_path):
    unpack_data('mind_subset.tar.xz', tmp_path)
    table = BehaviorTable()
    ratings = read_ratings(unpack_ratings(tmp_path, 10_000), table, max_behaviors=5)
    assert (len(ratings), sum(ratings['label'])) == (10_000, 3_388 + 2_293)
    assert table.texts[ratings[-1]['ad']] == 'Wings of Desire 1987 Comedy Drama Romance'
    assert sorted(table.types) == [f'rated {stars}' for stars in range(1, 6)]
    (folder,) = {path.parent for path in tmp_path.rglob('behaviors.tsv') if 'kim' not in str(path)}
    news = read_mind_clicks(folder, BehaviorTable(), drop_missing=True)
    assert 0 < sum(news['label']) < len(news)
