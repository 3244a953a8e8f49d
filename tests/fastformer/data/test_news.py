import os

import pytest
from helpers import unpack_data
from text_files import MIND_CATEGORIES, write_ag_news, write_mind

from aft_vision.fastformer.data import read_ag_news, read_mind_topic


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
        (2 * ('N1\tnews' + '\t' * 6 + '\n'), "line 2, column 'news_id': expected each name once, got 'N1' again"),
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


@pytest.mark.parametrize('split', ['train', 'test'])
def test_ag_news_is_read_with_the_names_of_its_classes(tmp_path, split):
    dataset = read_ag_news(write_ag_news(tmp_path, rows=8) / f'{split}.csv')
    assert dataset.features['label'].names == ['World', 'Sports', 'Business', 'Sci/Tech']
    assert dataset['label'][:] == [0, 1, 2, 3] * 2
    assert all(' "Live" ' in text for text in dataset['text'])


def test_ag_news_takes_the_names_beside_it_and_has_its_own(tmp_path):
    folder = write_ag_news(tmp_path)
    (folder / 'classes.txt').write_text('W\nS\nB\nT\n')
    assert read_ag_news(folder / 'test.csv').features['label'].names == list('WSBT')
    (folder / 'classes.txt').unlink()
    assert read_ag_news(folder / 'test.csv').features['label'].names[3] == 'Sci/Tech'


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ('"1","a","b"\n"5","a","b"\n', "line 2, column 'class': expected one of 1, 2, 3, 4, got '5'"),
        ('"1","a","b"\n"2","a"\n', r'line 2, column 3: expected 3 columns \(class, title, description\), got 2'),
        ('"Class Index","Title","Description"\n', "line 1, column 'class': .* got 'Class Index'"),
    ],
)
def test_what_is_not_ag_news_is_named(tmp_path, content, message):
    (tmp_path / 'train.csv').write_text(content)
    with pytest.raises(ValueError, match=message):
        read_ag_news(tmp_path / 'train.csv')


def test_news_whose_class_reads_nan_have_none(tmp_path):
    (tmp_path / 'news.tsv').write_text('N1\tnan\t\ta\tb\t\t\t\nN2\tsports\t\tc\td\t\t\t\n')
    (tmp_path / 'train.csv').write_text('nan,a,b\n2,c,d\n')
    for read, name in ((read_mind_topic, 'news.tsv'), (read_ag_news, 'train.csv')):
        assert read(tmp_path / name, drop_incomplete=True)['text'][:] == ['c d']
        with pytest.raises(ValueError, match=r'line 1, .*expected a label, got nan'):
            read(tmp_path / name)


@pytest.mark.skipif('AFT_DATA' not in os.environ, reason='needs AFT_DATA with mind_subset.tar.xz')
def test_real_news_are_read(tmp_path):
    dataset = read_mind_topic(unpack_data('mind_subset.tar.xz', tmp_path) / 'mind' / 'news.tsv')
    assert len(dataset) == 2000
    assert dataset.features['label'].num_classes == 15
    names = dataset.features['label'].names
    assert sum(label == names.index('kids') for label in dataset['label']) == 3
