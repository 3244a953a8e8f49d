import json
import os
from collections import Counter
from itertools import islice
from pathlib import Path

import pandas as pd
import pytest
from datasets import Dataset, Features, Value
from tokenizers.processors import TemplateProcessing

from aft_vision.fastformer.data import read_hub_summaries, read_summaries, split_summaries, tokenize_dataset
from aft_vision.fastformer.data.files import read_json
from aft_vision.fastformer.data.summaries import collect_summaries
from aft_vision.fastformer.tokenize import train_tokenizer

ROWS = [
    dict(split='train', id='1', article='One "day", it\nrained.', highlights='It rained .\nAll day .'),
    dict(split='train', id='2', article='Nothing else, é.', highlights='Nothing .'),
    dict(split='test', id='3', article='A third text.', highlights='Third .'),
]
PAIRS = [(row['article'], row['highlights']) for row in ROWS]


def write(path, rows=ROWS):
    if path.suffix == '.parquet':
        pd.DataFrame(rows).to_parquet(path)
    elif path.suffix == '.csv':
        pd.DataFrame(rows).to_csv(path, index=False)
    else:
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


FEATURES = Features(text=Value('string'), summary=Value('string'))


def pairs(dataset):
    return [(row['text'], row['summary']) for row in dataset]


@pytest.mark.parametrize('name', ['x.jsonl', 'x.csv', 'x.parquet'])
def test_every_format_is_read_with_its_line_ends(tmp_path, name):
    path = write(tmp_path / name)
    assert pairs(read_summaries(path, 'article', 'highlights')) == PAIRS
    assert pairs(read_summaries(path, 'article', 'highlights', split='train')) == PAIRS[:2]
    assert pairs(read_summaries(path, 'article', 'highlights', split='test')) == PAIRS[2:]
    assert read_summaries(path, 'article', 'highlights').features == FEATURES


def test_a_copy_of_a_hub_data_set_is_read(tmp_path):
    folder = tmp_path / 'copy'
    folder.mkdir()
    write(folder / 'test.parquet')
    options = dict(load_options=dict(cache_dir=str(tmp_path / 'cache')))
    found = read_hub_summaries(str(folder), 'article', 'highlights', split='test', **options)
    assert pairs(found) == PAIRS
    with pytest.raises(ValueError, match='the data set: expected the columns body, highlights, got split, id, article'):
        read_hub_summaries(str(folder), 'body', 'highlights', split='test', **options)


def test_leading_lines_that_are_no_part_of_a_text_are_left_out(tmp_path):
    texts = ['A title\n\nBody, one.\n\nTwo.\n', '\n A title\r\nBody.', 'A title\n\n ', ' One line ']
    path = write(tmp_path / 'x.jsonl', [dict(text=text, summary='s') for text in texts])
    options = dict(drop_incomplete=True)
    assert read_summaries(path, **options)['text'][:] == texts
    assert read_summaries(path, skip_lines=1, **options)['text'][:] == ['Body, one.\n\nTwo.\n', 'Body.']
    assert read_summaries(path, skip_lines=2, **options)['text'][:] == ['Two.\n']
    with pytest.raises(ValueError, match=r'line 3: expected a text, got a blank one'):
        read_summaries(path, skip_lines=1)


@pytest.mark.parametrize(
    ('content', 'options', 'message'),
    [
        ('{"text": 3, "summary": "b"}\n', {}, r"line 1, column 'text': expected a text, got 3"),
        ('{"text": "a", "summary": null}\n', {}, r"line 1, column 'summary': expected a text, got None"),
        ('{"text": "a", "summary": " "}\n', {}, r'line 1: expected a summary, got a blank one'),
        ('{"text": "a", "summary": " "}\n', {'drop_incomplete': True}, 'expected complete rows of the columns'),
        ('{"text": "a", "summary": "b"}\n', {'split': 'test'}, 'expected the columns split, got text, summary'),
        (
            '{"text": "a", "summary": "b", "part": "x"}\n',
            {'split': 'test', 'split_column': 'part'},
            r"expected rows with part = 'test' in .*x\.jsonl, got none",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path, content, options, message):
    path = tmp_path / 'x.jsonl'
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_summaries(path, **options)


def numbers(count):
    return Dataset.from_dict({'text': [str(i) for i in range(count)], 'summary': [f's{i}' for i in range(count)]})


def test_parts_hold_every_row_once_and_follow_the_seed():
    parts = split_summaries(numbers(100), seed=1)
    assert {name: len(part) for name, part in parts.items()} == {'train': 80, 'validation': 10, 'test': 10}
    rows = [int(text) for part in parts.values() for text in part['text']]
    assert sorted(rows) == list(range(100)) != rows
    assert split_summaries(numbers(100), seed=1)['test']['text'][:] == parts['test']['text'][:]
    assert split_summaries(numbers(100), seed=2)['test']['text'][:] != parts['test']['text'][:]


def test_rows_of_equal_text_or_summary_go_to_one_part():
    # Rows 0 to 3 are joined by the text of 0 and 2, the summary of 2 and 1, and the text of 1 and 3, spaces apart.
    texts = ['a  b', 'c\n', 'a b', 'c', *map(str, range(4, 40))]
    summaries = ['p', 'q r', 'q  r', 's', *(f's{i // 2}' for i in range(4, 40))]
    dataset = Dataset.from_dict({'text': texts, 'summary': summaries})
    groups = [set(range(4)), *({i, i + 1} for i in range(4, 40, 2))]
    for seed in range(10):
        parts = split_summaries(dataset, seed)
        rows = [{texts.index(text) for text in part['text']} for part in parts.values()]
        assert all(any(group <= part for part in rows) for group in groups)
        assert set.union(*rows) == set(range(40))
        assert sum(map(len, rows)) == 40
        assert 30 <= len(rows[0]) <= 34
    with pytest.raises(ValueError, match=r'got 40 in all, 1 groups of equal text or summary'):
        split_summaries(dataset.map(lambda row: {'summary': 's'}))


def test_parts_without_a_row_or_of_other_sums_are_errors():
    with pytest.raises(ValueError, match=r'expected rows for each of .* got 3 in all'):
        split_summaries(numbers(3))
    for fractions in ({'train': 0.7, 'test': 0.2}, {'train': 1.2, 'test': -0.2}, {'train': 1.0, 'test': 0.0}, {}):
        with pytest.raises(ValueError, match='expected two or more fractions above 0 that add up to 1, got '):
            split_summaries(numbers(9), fractions=fractions)


def test_tokens_of_a_summary_end_with_the_end_token_even_where_it_is_cut():
    dataset = Dataset.from_dict({'text': ['a b c d', ''], 'summary': ['a b c', 'd'], 'id': [7, 8]})
    tokenizer = train_tokenizer(['a b c d'])
    a, b, c, d = tokenizer.convert_tokens_to_ids(list('abcd'))
    assert tokenize_dataset(dataset, tokenizer, max_summary_length=9)[:] == {
        'id': [7, 8],
        'input_ids': [[a, b, c, d], [tokenizer.unk_token_id]],
        'labels': [[a, b, c, 2], [d, 2]],
    }
    cut = tokenize_dataset(dataset, tokenizer, max_length=2, max_summary_length=3)
    assert cut['input_ids'][:] == [[a, b], [3]]
    assert cut['labels'][:] == [[a, b, 2], [d, 2]]


def test_a_tokenizer_that_adds_the_end_itself_adds_it_once_and_one_without_is_an_error():
    dataset = Dataset.from_dict({'text': ['a'], 'summary': ['a b c']})
    tokenizer = train_tokenizer(['a b c'])
    a, b, c = tokenizer.convert_tokens_to_ids(list('abc'))
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single='<s> $A </s>', special_tokens=[('<s>', start), ('</s>', end)]
    )
    assert tokenize_dataset(dataset, tokenizer, max_summary_length=9)['labels'][:] == [[start, a, b, c, end]]
    assert tokenize_dataset(dataset, tokenizer, max_summary_length=4)['labels'][:] == [[start, a, b, end]]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r'expected a tokenizer with an end token \(eos_token\), got one without'):
        tokenize_dataset(dataset, tokenizer, max_summary_length=9)


@pytest.mark.skipif('AFT_DATA' not in os.environ, reason='needs AFT_DATA with the three files of summaries')
def test_real_files_are_read():
    folder = Path(os.environ['AFT_DATA'])
    path = folder / 'cnn_dailymail_1k.jsonl.xz'
    parts = {name: read_summaries(path, 'article', 'highlights', name) for name in ('train', 'validation', 'test')}
    sizes = {name: len(part) for name, part in parts.items()}
    assert sizes == {'train': 200, 'validation': 500, 'test': 500}
    assert Counter(len(text.splitlines()) for text in parts['test']['summary']).most_common(1)[0][0] in (2, 3, 4)
    news = read_summaries(folder / 'bbc_news_summary.jsonl.xz', 'article', 'summary')
    assert len(news) == 2225
    assert news[0]['text'].startswith('Ad sales boost Time Warner profit\n')
    parts = split_summaries(news.select(range(600)))
    for name in ('text', 'summary'):
        found = [{' '.join(value.split()) for value in part[name]} for part in parts.values()]
        assert len(set.union(*found)) == sum(map(len, found))
    articles = collect_summaries(islice(read_json(folder / 'sumpubmed_600.jsonl.xz'), 5), ['text'], 'abstract')
    assert len(articles) == 5
    assert all(len(text) > 500 for text in articles['summary'])
