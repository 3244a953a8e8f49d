import gzip
import json
import lzma
import os
from collections import Counter
from itertools import islice
from pathlib import Path

import pandas as pd
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from aft_vision.fastformer.data import from_dataset, label_maps, read_hub, read_table
from aft_vision.fastformer.data.files import Record, read_json
from aft_vision.fastformer.data.table import collect, draw_rows

ROWS = [('good, "very"', 'pos', 'A'), ('bad\nfilm', 'neg', ''), ('fine', 'pos', 'B')]
FRAME = pd.DataFrame(ROWS, columns=['review', 'sentiment', 'title'])


def write(folder, name):
    path = folder / name
    options = dict(index=False)
    if '.jsonl' in name:
        path.write_text(FRAME.to_json(orient='records', lines=True))
    elif '.json' in name:
        path.write_text(FRAME.to_json(orient='records'))
    elif '.parquet' in name:
        FRAME.to_parquet(path)
    else:
        FRAME.to_csv(path, sep='\t' if '.tsv' in name else ',', **options)
    if name.endswith(('.gz', '.xz')) and 'json' in name:
        path.write_bytes((gzip if name.endswith('.gz') else lzma).compress(path.read_bytes()))
    return path


def contents(dataset):
    names = dataset.features['label'].names
    return [(row['text'], names[row['label']]) for row in dataset]


@pytest.mark.parametrize(
    'name', ['x.csv', 'x.csv.gz', 'x.csv.xz', 'x.json', 'x.jsonl', 'x.jsonl.gz', 'x.jsonl.xz', 'x.parquet']
)
def test_every_format_gives_the_same_rows(tmp_path, name):
    dataset = read_table(write(tmp_path, name), 'review', 'sentiment')
    assert contents(dataset) == [row[:2] for row in ROWS]
    assert dataset.features == Features(text=Value('string'), label=ClassLabel(names=['neg', 'pos']))


def test_columns_are_joined_and_empty_ones_passed_over(tmp_path):
    dataset = read_table(write(tmp_path, 'x.csv'), ['title', 'review'], 'sentiment')
    assert dataset['text'][:] == ['A good, "very"', 'bad\nfilm', 'B fine']


def test_a_tsv_is_read_without_quotes_by_default(tmp_path):
    path = tmp_path / 'x.tsv'
    path.write_text('text\tlabel\n"a b\tx\n')
    assert contents(read_table(path)) == [('"a b', 'x')]


def records(*rows):
    return [Record(f'x, line {number}', dict(text=text, label=label)) for number, (text, label) in enumerate(rows, 1)]


def gather(*rows, **options):
    return collect(records(*rows), ['text'], 'label', **options)


def test_numbers_are_classes_in_the_order_of_numbers():
    dataset = gather(('a', 10), ('b', 9.0), ('c', '2'))
    assert dataset.features['label'].names == ['2', '9', '10']
    assert dataset['label'][:] == [2, 1, 0]
    # No numbers that have an order.
    assert gather(('a', 'inf'), ('b', '10'), ('c', '2')).features['label'].names == ['10', '2', 'inf']


def test_given_names_set_the_order_and_keep_classes_without_rows():
    dataset = gather(('a', 'x'), ('b', 'z'), label_names=('z', 'y', 'x'))
    assert dataset.features['label'].names == ['z', 'y', 'x']
    assert dataset['label'][:] == [2, 0]


def test_names_can_be_given_by_value():
    dataset = gather(('a', 1.0), ('b', '0'), ('c', 1), label_names={0: 'neg', 1: 'pos'})
    assert contents(dataset) == [('a', 'pos'), ('b', 'neg'), ('c', 'pos')]


def test_label_maps_are_what_a_configuration_takes():
    expected = dict(num_labels=2, id2label={0: 'neg', 1: 'pos'}, label2id={'neg': 0, 'pos': 1})
    assert label_maps(gather(('a', 'pos'), ('b', 'neg'))) == expected


@pytest.mark.parametrize(
    ('rows', 'options', 'message'),
    [
        ([('a', 'x'), ('b', 'y')], {'label_names': ('x', 'z')}, "line 2, column 'label': .* x, z, got 'y'"),
        ([('a', 'x'), (7, 'x')], {}, "line 2, column 'text': expected a text, got 7"),
        ([('a', 'x'), (None, 'x')], {}, "line 2, column 'text': expected a text, got None"),
        ([('a', None)], {}, "line 1, column 'label': expected a label, got None"),
        ([('a', '')], {}, "line 1, column 'label': expected a label, got ''"),
        ([('a', float('nan'))], {}, "line 1, column 'label': expected a label, got nan"),
        ([('a', ['x'])], {}, "line 1, column 'label': expected a label, got"),
        ([], {}, 'expected complete rows of the columns text, label, got none'),
    ],
)
def test_a_row_of_another_kind_is_named(rows, options, message):
    with pytest.raises(ValueError, match=message):
        gather(*rows, **options)


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path):
    for name, place in (('x.csv', 'line 1'), ('x.tsv', 'line 1'), ('x.jsonl', 'line 1'), ('x.parquet', 'row 1')):
        with pytest.raises(ValueError, match=f'{place}: expected the columns review, stars, got review, sentiment'):
            read_table(write(tmp_path, name), 'review', 'stars')


@pytest.mark.parametrize(
    ('name', 'content'), [('x.jsonl', '\n'), ('x.json', '[]'), ('x.csv', 'text,label\n'), ('x.tsv', '')]
)
def test_a_file_without_rows_is_named(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf'expected rows in .*{name}, got none'):
        read_table(tmp_path / name)


def test_a_file_of_an_unknown_kind_is_named(tmp_path):
    with pytest.raises(ValueError, match=r'ends in \.csv, .* got .*x\.txt\.gz'):
        read_table(tmp_path / 'x.txt.gz')


def test_incomplete_rows_are_left_out_if_asked(caplog):
    dataset = gather(('a', 'x'), (None, 'x'), ('b', None), ('c', ''), ('', 'y'), drop_incomplete=True)
    assert contents(dataset) == [('a', 'x')]
    assert 'left out 4 of 5 rows' in caplog.text
    assert contents(gather(('a', 'x'), (' ', 'y'))) == [('a', 'x'), (' ', 'y')]
    rows = [Record('x, line 1', dict(label='x')), *records(('a', 'y'))]
    assert contents(collect(rows, ['text'], 'label', drop_incomplete=True)) == [('a', 'y')]
    with pytest.raises(ValueError, match='expected the columns body, label, got text, label'):
        collect(records(('a', 'x')), ['body'], 'label', drop_incomplete=True)
    with pytest.raises(ValueError, match='expected the columns text, class, got text, label'):
        collect(records(('a', 'x'), (None, 'x')), ['text'], 'class', drop_incomplete=True)
    with pytest.raises(ValueError, match='expected complete rows of the columns text, label, got none'):
        collect(records((None, 'x'), ('a', None)), ['text'], 'label', drop_incomplete=True)


def test_rows_of_a_missing_number_or_a_blank_label_are_incomplete(tmp_path):
    nan = float('nan')
    rows = [('a', 1.0), ('b', nan), (nan, 2.0), (None, 2.0), ('c', 3)]
    frame = pd.DataFrame(rows, columns=['text', 'label'])
    frame.to_parquet(tmp_path / 'x.parquet')
    (tmp_path / 'x.jsonl').write_text(''.join(json.dumps(dict(text=t, label=n)) + '\n' for t, n in rows))
    (tmp_path / 'x.csv').write_text('text,label\na,1\nb, \n,2\nc,\n" ",2\nc,3\n')
    for name in ('x.parquet', 'x.jsonl', 'x.csv'):
        assert contents(read_table(tmp_path / name, drop_incomplete=True)) == [('a', '1'), ('c', '3')]
    with pytest.raises(ValueError, match="line 3, column 'label': expected a label, got ' '"):
        read_table(tmp_path / 'x.csv')
    with pytest.raises(ValueError, match="line 1, column 'label': expected a label, got \\['x'\\]"):
        gather(('a', ['x']), drop_incomplete=True)


@pytest.mark.parametrize('name', ['x.csv', 'x.tsv', 'x.json', 'x.jsonl', 'x.parquet'])
def test_a_row_with_one_of_its_texts_is_complete_in_every_format(tmp_path, name):
    rows = [('A', 'a', 'x'), ('B', None, 'y'), (None, 'c', 'x'), (None, None, 'y'), ('E', 'e', None)]
    frame = pd.DataFrame(rows, columns=['title', 'body', 'label'])
    if name.endswith(('.csv', '.tsv')):
        frame.to_csv(tmp_path / name, index=False, sep='\t' if 'tsv' in name else ',')
    elif name.endswith('.parquet'):
        frame.to_parquet(tmp_path / name)
    else:
        frame.to_json(tmp_path / name, orient='records', lines='jsonl' in name)
    dataset = read_table(tmp_path / name, ['title', 'body'], drop_incomplete=True)
    assert contents(dataset) == [('A a', 'x'), ('B', 'y'), ('c', 'x')]


@pytest.mark.parametrize('others', [('1.5', '0.0'), ('pos', 'neg')])
@pytest.mark.parametrize('nan', ['nan', 'NaN', ' nan '])
@pytest.mark.parametrize(('name', 'delimiter'), [('x.csv', ','), ('x.tsv.gz', '\t')])
def test_a_label_of_a_csv_that_reads_nan_is_missing_unless_it_is_named(tmp_path, nan, others, name, delimiter):
    path, rows = tmp_path / name, [('text', 'label'), ('a', others[0]), ('b', nan), ('c', others[1])]
    pd.DataFrame(rows).to_csv(path, sep=delimiter, index=False, header=False)
    dataset = read_table(path, drop_incomplete=True)
    assert contents(dataset) == [('a', others[0]), ('c', others[1])]
    with pytest.raises(ValueError, match=r"line 3, column 'label': expected a label, got nan; drop_incomplete"):
        read_table(path)
    named = read_table(path, label_names={nan: 'bread', others[0]: 'x', others[1]: 'y'})
    assert contents(named) == [('a', 'x'), ('b', 'bread'), ('c', 'y')]


@pytest.mark.parametrize('name', ['x.json', 'x.jsonl', 'x.parquet', 'hub'])
@pytest.mark.parametrize('drop_incomplete', [False, True])
def test_a_text_that_reads_nan_is_a_class_where_numbers_are_none(tmp_path, name, drop_incomplete):
    frame = pd.DataFrame([('a', 'nan'), ('b', 'yue'), ('c', 'nan')], columns=['text', 'label'])
    if name == 'hub':
        dataset = from_dataset(Dataset.from_pandas(frame), drop_incomplete=drop_incomplete)
    else:
        if name == 'x.parquet':
            frame.to_parquet(tmp_path / name)
        else:
            frame.to_json(tmp_path / name, orient='records', lines=name == 'x.jsonl')
        dataset = read_table(tmp_path / name, drop_incomplete=drop_incomplete)
    assert contents(dataset) == [('a', 'nan'), ('b', 'yue'), ('c', 'nan')]


def test_a_sample_keeps_the_order_follows_the_seed_and_keeps_the_classes():
    rows = [(str(number), number % 7) for number in range(1000)]
    first, same, other = (gather(*rows, sample=5, seed=seed) for seed in (1, 1, 2))
    drawn = [int(text) for text in first['text']]
    assert drawn == sorted(drawn)
    assert len(set(drawn)) == 5
    assert first['text'][:] == same['text'][:] != other['text'][:]
    assert first.features['label'].num_classes == 7
    assert len(gather(*rows, sample=2000)) == 1000


def test_every_row_is_as_likely_in_a_sample():
    rows = [(str(number), 'x') for number in range(10)]
    drawn = Counter(row for seed in range(3000) for row in draw_rows(rows, 3, seed))
    # 900 expected, with a deviation of about 25.
    assert all(abs(drawn[row] - 900) < 100 for row in rows)


def test_a_data_set_of_the_hub_keeps_the_names_of_its_classes(tmp_path):
    rows = [json.dumps(dict(text=text, label=label)) for text, label in (('a', 1), ('b', 0))]
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data' / 'train.jsonl').write_text('\n'.join(rows))
    features = Features(text=Value('string'), label=ClassLabel(names=['World', 'Sports']))
    options = dict(cache_dir=str(tmp_path / 'cache'), features=features)
    dataset = read_hub(str(tmp_path / 'data'), load_options=options)
    assert contents(dataset) == [('a', 'Sports'), ('b', 'World')]
    assert dataset.features['label'].names == ['World', 'Sports']


def test_a_class_label_of_minus_one_is_no_label():
    features = Features(text=Value('string'), label=ClassLabel(names=['neg', 'pos']))
    dataset = Dataset.from_dict(dict(text=['a', 'b'], label=[1, -1]), features=features)
    with pytest.raises(ValueError, match="row 2, column 'label': expected a label, got None"):
        from_dataset(dataset)
    assert contents(from_dataset(dataset, drop_incomplete=True)) == [('a', 'pos')]
    with pytest.raises(ValueError, match='the data set: expected the columns body, label, got text, label'):
        from_dataset(dataset, 'body')


@pytest.mark.skipif('AFT_DATA' not in os.environ, reason='needs AFT_DATA with imdb_test and ag_news_test.jsonl.xz')
def test_real_files_are_read():
    folder = Path(os.environ['AFT_DATA'])
    names = dict(enumerate(('World', 'Sports', 'Business', 'Sci/Tech')))
    news = read_table(folder / 'ag_news_test.jsonl.xz', ['title', 'text'], label_names=names)
    assert Counter(news['label']) == dict.fromkeys(range(4), 1900)
    assert news[0]['text'].startswith('Fears for T N pension after talks Unions representing workers')
    first = islice(read_json(folder / 'imdb_test.jsonl.xz'), 100)
    reviews = collect(first, ['text'], 'rating')
    assert set(reviews.features['label'].names) <= {'1', '2', '3', '4', '7', '8', '9', '10'}
    assert len(reviews) == 100
