import json
import os
from collections import Counter
from pathlib import Path

import pytest
from text_files import TOPIC_WORDS, write_amazon, write_jmars

from aft_vision.fastformer.data import read_amazon, read_jmars


def assert_texts_are_of_their_classes(dataset, topics=None):
    """The words of a synthetic text say what it is about."""
    for row in dataset:
        found = {word.strip('.').lower() for word in row['text'].split()}
        topic = row['label'] if topics is None else topics[row['label']]
        assert found & set(TOPIC_WORDS[topic])


@pytest.mark.parametrize(('name', 'year'), [('reviews_Electronics_5.json.gz', 2014), ('Electronics.jsonl', 2023)])
def test_amazon_reviews_of_both_layouts_are_read(tmp_path, name, year):
    path = write_amazon(tmp_path / name, rows=20, year=year)
    dataset = read_amazon(path)
    assert dataset.features['label'].names == ['1', '2', '3', '4', '5']
    assert dataset['label'][:] == [0, 1, 2, 3, 4] * 4
    assert_texts_are_of_their_classes(dataset)
    assert len(read_amazon(path, sample=7)) == 7


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ({'body': 'a', 'stars': 5}, 'columns reviewText or text, overall or rating, got body, stars'),
        ({'reviewText': 'a', 'overall': 6.0}, "line 1, column 'overall': expected one of 1, 2, 3, 4, 5, got '6'"),
        ({'overall': 5.0}, 'line 1: expected the columns reviewText, overall, got overall'),
        (None, 'got an empty file'),
    ],
)
def test_another_layout_is_not_amazon(tmp_path, content, message):
    path = tmp_path / 'x.json'
    path.write_text('' if content is None else json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_amazon(path)


def test_jmars_has_ten_classes(tmp_path):
    dataset = read_jmars(write_jmars(tmp_path / 'data.json', rows=20))
    assert dataset.features['label'].names == [str(rating) for rating in range(1, 11)]
    assert dataset['label'][:] == [*range(10)] * 2
    assert_texts_are_of_their_classes(dataset)


def test_a_small_part_of_jmars_may_lack_ratings(tmp_path):
    path = write_jmars(tmp_path / 'data.json', rows=200)
    for count in (3, 150):
        assert len(read_jmars(path, sample=count)) == count


@pytest.mark.parametrize('options', [{}, {'text': 'text'}])
def test_the_binary_imdb_is_not_called_imdb_10(tmp_path, options):
    path = tmp_path / 'imdb.jsonl'
    ratings = [*range(1, 5), *range(7, 11)]
    path.write_text('\n'.join(json.dumps(dict(label=r // 6, rating=r, text='a')) for r in 13 * ratings))
    with pytest.raises(ValueError, match='aclImdb is the binary IMDB, not IMDB-10'):
        read_jmars(path, **options)
    with pytest.raises(ValueError, match='aclImdb is the binary IMDB, not IMDB-10'):
        read_jmars(tmp_path)


@pytest.mark.skipif('AFT_DATA' not in os.environ, reason='needs AFT_DATA with amazon_multidomain, imdb_test.jsonl.xz')
def test_real_reviews_are_read():
    folder = Path(os.environ['AFT_DATA'])
    dataset = read_amazon(folder / 'amazon_multidomain.jsonl.xz')
    assert Counter(dataset['label']) == {0: 2421, 1: 1579, 3: 1121, 4: 2879}
    assert dataset[0]['text'].startswith('THis book was horrible.')
    with pytest.raises(ValueError, match='not IMDB-10'):
        read_jmars(folder / 'imdb_test.jsonl.xz')
