import os

import pytest
from helpers import unpack_data
from text_files import MIND_CATEGORIES, write_mind

from aft_vision.fastformer.data import read_mind_topic


def test_mind_gives_titles_and_abstracts_with_their_categories(tmp_path):
    folder = write_mind(tmp_path, rows=12)
    dataset = read_mind_topic(folder)
    rows = [line.split('\t') for line in (folder / 'news.tsv').read_text().splitlines()]
    assert dataset.features['label'].names == list(MIND_CATEGORIES)
    assert dataset['label'][:] == [*range(6)] * 2
    assert dataset['text'][:] == [f'{row[3]} {row[4]}'.strip() for row in rows]
    assert '"' in dataset[0]['text']


def test_mind_takes_bodies_where_there_are_some(tmp_path):
    folder = write_mind(tmp_path, rows=12)
    dataset = read_mind_topic(folder / 'news.tsv', docs=folder / 'docs.tsv')
    assert [text.startswith('Body: ') for text in dataset['text']] == [True, False] * 6
    titles = read_mind_topic(folder, text=['title'])['text'][:]
    assert dataset[1]['text'].startswith(titles[1] + ' ')
    both = read_mind_topic(folder, folder / 'docs.tsv', text=['title', 'body'])
    assert both[0]['text'].startswith(titles[0] + ' Body: ')
    assert both[1]['text'] == titles[1]


def test_a_news_in_several_files_counts_once(tmp_path):
    folders = [write_mind(tmp_path / str(rows), rows=rows) for rows in (6, 18)]
    assert len(read_mind_topic(folders)) == 18
    assert read_mind_topic(tmp_path)[:] == read_mind_topic(sorted(folders))[:]


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ('1\tU1\t11/13/2019 8:36:57 AM\tN1\tN2-1', r'line 1, column 6: expected 8 columns \(news_id, .* got 5'),
        ('\t'.join('abcdefgh') + '\n\n' + '\t'.join('abcdefghi'), 'line 3, column 9: expected 8 columns .* got 9'),
        ('N1\t' + '\t' * 6, "line 1, column 'category': expected a label, got ''"),
    ],
)
def test_what_is_no_news_tsv_is_named(tmp_path, content, message):
    (tmp_path / 'news.tsv').write_text(content)
    with pytest.raises(ValueError, match=message):
        read_mind_topic(tmp_path)


def test_mind_rejects_other_bodies_and_columns(tmp_path):
    folder = write_mind(tmp_path)
    with pytest.raises(ValueError, match=r'news\.tsv, line 1, column 7: expected 6 columns .*body\), got 8'):
        read_mind_topic(folder, docs=folder / 'news.tsv')
    with pytest.raises(ValueError, match='docs for a body, got title, body'):
        read_mind_topic(folder, text=['title', 'body'])
    with pytest.raises(ValueError, match=r'expected columns of title, abstract, body, .* got url'):
        read_mind_topic(folder, text=['url'])


def test_news_whose_class_reads_nan_have_none(tmp_path):
    (tmp_path / 'news.tsv').write_text('N1\tnan\t\ta\tb\t\t\t\nN2\tsports\t\tc\td\t\t\t\n')
    assert read_mind_topic(tmp_path, drop_incomplete=True)['text'][:] == ['c d']
    with pytest.raises(ValueError, match=r'line 1, .*expected a label, got nan'):
        read_mind_topic(tmp_path)


@pytest.mark.skipif('AFT_DATA' not in os.environ, reason='needs AFT_DATA with mind_subset.tar.xz')
def test_real_news_are_read(tmp_path):
    dataset = read_mind_topic(unpack_data('mind_subset.tar.xz', tmp_path) / 'mind' / 'news.tsv')
    assert len(dataset) == 2000
    assert dataset.features['label'].num_classes == 15
    names = dataset.features['label'].names
    assert sum(label == names.index('kids') for label in dataset['label']) == 3
