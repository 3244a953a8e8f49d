import os
from pathlib import Path

import numpy as np
import pytest
from helpers import unpack_data
from text_files import write_mind, write_mind_behaviors

from aft_vision.fastformer.data.impressions import Behaviors, ClickSamples
from aft_vision.fastformer.data.mind import News, read_mind_behaviors, read_mind_news

ROW = '1\tU1\t11/13/2019 8:36:57 AM\t{}\t{}\n'


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('mind')
    write_mind(folder)
    return write_mind_behaviors(folder)


@pytest.fixture(scope='module')
def news(folder) -> News:
    return read_mind_news(folder)


def read_row(tmp_path: Path, news: News, history: str, shown: str, **options: object) -> Behaviors:
    (tmp_path / 'behaviors.tsv').write_text(ROW.format(history, shown))
    return read_mind_behaviors(tmp_path, news.rows, **options)


def test_news_have_their_titles_with_quotes(folder, news):
    rows = [line.split('\t') for line in (folder / 'news.tsv').read_text().splitlines()]
    assert news.ids == [row[0] for row in rows]
    assert news.texts == [row[3] for row in rows]
    assert any('"' in text for text in news.texts)
    assert news.rows['N3'] == 2


def test_columns_of_the_text_are_joined_and_empty_ones_passed_over(folder):
    rows = [line.split('\t') for line in (folder / 'news.tsv').read_text().splitlines()]
    texts = read_mind_news(folder, ['category', 'title', 'abstract']).texts
    assert texts == [' '.join(filter(None, (row[1], row[3], row[4]))) for row in rows]
    assert any(not row[4] for row in rows)


def test_impressions_are_what_the_file_says(folder, news):
    found = read_mind_behaviors(folder, news.rows)
    lines = [line.split('\t') for line in (folder / 'behaviors.tsv').read_text().splitlines()]
    assert len(found) == len(lines) == 80
    assert found.labels is not None
    assert found.users == [user for _, user, *_ in lines]
    for number, (name, _, _, history, shown) in enumerate(lines):
        assert found.impression_ids[number] == name
        assert [news.ids[row] for row in found.histories[number]] == history.split()
        pairs = [part.split('-') for part in shown.split()]
        assert [news.ids[row] for row in found.candidates[number]] == [name for name, _ in pairs]
        first = found.candidates.starts[number]
        assert found.labels[first : first + len(pairs)].tolist() == [int(label) for _, label in pairs]
    assert (found.histories.sizes == 0).sum() == 10


def test_times_are_seconds_of_the_clock_and_go_with_their_rows(tmp_path, news):
    times = ['11/13/2019 12:00:01 AM', '11/13/2019 12:00:01 PM', '11/14/2019 1:30:00 AM', '1/1/1970 12:01:00 AM']
    lines = [f'{number}\tU{number % 2}\t{time}\tN1\tN2-1\n' for number, time in enumerate(times)]
    (tmp_path / 'behaviors.tsv').write_text(''.join(lines))
    found = read_mind_behaviors(tmp_path, news.rows)
    assert (found.seconds - found.seconds[0]).tolist()[:3] == [0, 12 * 3600, 25 * 3600 + 1799]
    assert found.seconds[3] == 60
    some = found.select(np.array([2, 1]))
    assert some.seconds.tolist() == found.seconds[[2, 1]].tolist()
    assert some.users == ['U0', 'U1']


def test_the_last_clicks_are_kept(tmp_path, news):
    history = ' '.join(f'N{number}' for number in range(1, 61))
    for limit in (50, 3):
        found = read_row(tmp_path, news, history, 'N1-1 N2-0', max_behaviors=limit)
        assert [news.ids[row] for row in found.histories[0]] == history.split()[-limit:]
    with pytest.raises(ValueError, match='max_behaviors must be at least 1, got 0'):
        read_row(tmp_path, news, history, 'N1-1 N2-0', max_behaviors=0)


def test_the_test_split_has_no_labels(tmp_path, news):
    found = read_mind_behaviors(write_mind_behaviors(tmp_path, labelled=False), news.rows)
    assert found.labels is None
    labelled = read_mind_behaviors(write_mind_behaviors(tmp_path), news.rows)
    assert found.candidates.values.tolist() == labelled.candidates.values.tolist()
    with pytest.raises(ValueError, match='expected impressions with labels, got none'):
        ClickSamples(found)


def test_what_an_excerpt_lacks_is_left_out_on_request(tmp_path, news):
    found = read_row(tmp_path, news, 'N99 N2 N98 N3', 'N97-1 N5-0 N6-1', drop_missing=True, max_behaviors=1)
    assert [news.ids[row] for row in found.histories[0]] == ['N3']
    assert [news.ids[row] for row in found.candidates[0]] == ['N5', 'N6']
    assert found.labels.tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"line 1, column 'history': expected one of 60 news, got 'N99'; drop_missing"):
        read_row(tmp_path, news, 'N99', 'N5-0')


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ('N1\tautos\tx\ttitle\n', r'line 1, column 5: expected 5 columns \(impression_id, user_id, .*got 4'),
        (ROW.format('N1', 'N2-1') + ROW.format('N1', 'N2-2'), "line 2, column 'impressions': .* N1-1, got 'N2-2'"),
        (ROW.format('N1', 'N2-1 N3'), "line 1, column 'impressions': expected N1-0 or N1-1, got 'N3'"),
        (ROW.format('N1', 'N2-1') + ROW.format('N1', 'N2'), "line 2, .*got 'N2'"),
        (ROW.format('N1', 'N2') + ROW.format('N1', 'N2-1'), "line 2, column 'impressions': .*got 'N2-1'"),
        (ROW.format('N1', 'N99-1'), "line 1, column 'impressions': expected one of 60 news, got 'N99'"),
        (
            ROW.format('N1', 'N2-1').replace('11/13', '13/11'),
            "'time': expected such as .*, got '13/11/2019",
        ),
        (ROW.format('N1', ''), "line 1, column 'impressions': expected candidates, got none"),
        ('', 'expected impressions in .*behaviors.tsv, got none'),
    ],
)
def test_what_is_no_behaviors_tsv_is_named(tmp_path, news, content, message):
    (tmp_path / 'behaviors.tsv').write_text(content)
    with pytest.raises(ValueError, match=message):
        read_mind_behaviors(tmp_path / 'behaviors.tsv', news.rows)


def test_labels_behind_a_row_without_them_are_named_where_news_may_be_missing(tmp_path, news):
    (tmp_path / 'behaviors.tsv').write_text(ROW.format('N1', 'N2 N99') + ROW.format('N1', 'N99 N2-1'))
    with pytest.raises(ValueError, match=r"line 2, column 'impressions': expected N1 without a label.*got 'N2-1'"):
        read_mind_behaviors(tmp_path, news.rows, drop_missing=True)


def test_columns_that_are_no_text_are_refused(folder):
    with pytest.raises(ValueError, match=r'expected columns of title, .*, got url'):
        read_mind_news(folder, ['url'])
    with pytest.raises(ValueError, match='got none'):
        read_mind_news(folder, [])


@pytest.mark.skipif('AFT_DATA' not in os.environ, reason='needs AFT_DATA with mind_subset.tar.xz')
def test_real_impressions_are_read(tmp_path):
    news = read_mind_news(unpack_data('mind_subset.tar.xz', tmp_path) / 'mind')
    found = read_mind_behaviors(tmp_path / 'mind', news.rows, drop_missing=True)
    assert (len(news), len(found)) == (2000, 5000)
    # The impressions that keep a clicked and another news with a text.
    assert len(set(ClickSamples(found).impressions.tolist())) == 119
    with pytest.raises(ValueError, match=r"line 1, column 'history': expected one of 2000 news"):
        read_mind_behaviors(tmp_path / 'mind', news.rows)
