import bz2
import csv
import gzip
import lzma
import zipfile

import pytest

from aft_vision.fastformer.data.files import read_delimited, read_json, read_lines, read_parquet

JSON_LINES = '{"text": "a", "label": 1}\n\n{"text": "b\\n", "label": 2}\n'
RECORDS = [{'text': 'a', 'label': 1}, {'text': 'b\n', 'label': 2}]
COMPRESS = {'.gz': gzip.compress, '.xz': lzma.compress, '.bz2': bz2.compress}


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def values(records):
    return [record.values for record in records]


@pytest.mark.parametrize('ending', ['', *COMPRESS])
def test_json_lines_are_read_with_their_numbers(tmp_path, ending):
    path = write(tmp_path, f'x.jsonl{ending}', COMPRESS.get(ending, lambda data: data)(JSON_LINES.encode()))
    records = list(read_json(path))
    assert values(records) == RECORDS
    assert [record.location for record in records] == [f'{path}, line 1', f'{path}, line 3']


def test_the_only_file_of_a_zip_is_read(tmp_path):
    with zipfile.ZipFile(tmp_path / 'x.zip', 'w') as file:
        file.writestr('__MACOSX/x', b'')
        file.writestr('folder/x.jsonl', JSON_LINES)
    assert values(read_json(tmp_path / 'x.zip')) == RECORDS
    with zipfile.ZipFile(tmp_path / 'x.zip', 'a') as file:
        file.writestr('other', b'')
    with pytest.raises(ValueError, match=r'expected one file .* got 2: folder/x\.jsonl, other'):
        list(read_json(tmp_path / 'x.zip'))


@pytest.mark.parametrize(
    'text', ['[{"text": "a", "label": 1},\n\n {"text": "b\\n", "label": 2}\n]\n', '\n \n[ ]', '[]']
)
def test_a_json_list_is_read_with_the_numbers_of_its_items(tmp_path, text):
    path = write(tmp_path, 'x.json', '\ufeff' + text)
    records = list(read_json(path))
    expected = RECORDS if 'a' in text else []
    assert values(records) == expected
    assert [record.location for record in records] == [f'{path}, item {number}' for number in (1, 2)[: len(expected)]]


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ('{"a": 1}\n{"a": 1,, "b": 2}\n', 'line 2, column 9: not JSON: '),
        ('\n\n[{"a": 1},\n\n{"a": 1,,}]', 'line 5, column 9: not JSON: '),
        ('{"a": 1}\n{"a": "cut', 'line 2, column 7: not JSON: Unterminated string'),
        ('{"a": 1}\n17\n', 'line 2: expected a JSON object .* got int'),
        (b'{"a": "x"}\n{"a": "caf\xe9"}\n', 'line 2, byte 11: expected UTF-8, got 0xe9'),
        ('[{"a": 1},\n {"a": 2}', "line 2, column 10: not JSON: Expecting ',' delimiter"),
        ('[{"a": 1},\n "b"]', 'item 2: expected a JSON object .* got str'),
    ],
)
def test_damaged_json_is_named_with_line_and_column(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        list(read_json(write(tmp_path, 'x.json', content)))


@pytest.mark.parametrize('ending', COMPRESS)
def test_a_truncated_archive_is_named_with_the_last_line_read(tmp_path, ending):
    path = write(tmp_path, f'x{ending}', COMPRESS[ending](b'one line\n' * 100)[:-9])
    with pytest.raises(ValueError, match=r'is damaged after line \d+: '):
        list(read_lines(path))


@pytest.mark.parametrize('name', ['x.zip', 'x.gz', 'x.xz', 'x.bz2'])
def test_what_is_no_archive_is_named(tmp_path, name):
    with pytest.raises(ValueError, match=r'is damaged'):
        list(read_lines(write(tmp_path, name, b'this is no archive')))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r'expected a file, got .*absent'):
        list(read_lines(tmp_path / 'absent'))


def test_quoted_fields_hold_delimiters_quotes_and_line_ends(tmp_path):
    path = write(tmp_path, 'x.csv', '\ufefftext,label\r\n"a, ""b""\r\nc",1\r\n\r\nd,2\r\n')
    records = list(read_delimited(path))
    assert values(records) == [{'text': 'a, "b"\r\nc', 'label': '1'}, {'text': 'd', 'label': '2'}]
    assert [record.location for record in records] == [f'{path}, line 2', f'{path}, line 5']


def test_quotes_are_characters_where_nothing_is_quoted(tmp_path):
    path = write(tmp_path, 'x.tsv', 'N1\ta "b\r\nN2\t\n')
    expected = [{'id': 'N1', 'title': 'a "b'}, {'id': 'N2', 'title': ''}]
    assert values(read_delimited(path, '\t', ('id', 'title'), quoted=False)) == expected


def test_long_fields_are_read_and_the_limit_is_put_back(tmp_path):
    limit = csv.field_size_limit()
    path = write(tmp_path, 'x.csv', f'text\n{"a" * (limit + 1)}\n')
    first, second = read_delimited(path), read_delimited(path)
    for reader in (first, second):
        assert len(next(reader).values['text']) == limit + 1
        assert csv.field_size_limit() == limit


@pytest.mark.parametrize('quoted', [True, False])
@pytest.mark.parametrize('content', ['', '\n', 'id,title', 'id,title\n\n'])
def test_a_table_without_a_row_is_empty(tmp_path, content, quoted):
    assert values(read_delimited(write(tmp_path, 'x.csv', content), quoted=quoted)) == []


@pytest.mark.parametrize('quoted', [True, False])
def test_a_row_of_empty_fields_is_a_row(tmp_path, quoted):
    path = write(tmp_path, 'x.tsv', 'id\ttitle\n\n1\ta\n\t\n')
    expected = [{'id': '1', 'title': 'a'}, {'id': '', 'title': ''}]
    assert values(read_delimited(path, '\t', quoted=quoted)) == expected


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ('text,label\na,1\nb\n', r'line 3, column 2: expected 2 columns \(text, label\), got 1'),
        ('text,label\n"a\nb",1\nb,2,3\n', r'line 4, column 3: expected 2 columns \(text, label\), got 3'),
        ('text,label\na,1\n"b,2\nc,3\n', 'line 3: not a CSV .*unexpected end'),
        ('text,label\n"a"b,1\n', "line 2: not a CSV .*',' expected after '\"'"),
        ('text,text\na,1\n', 'line 1: expected column names that differ, got text, text'),
    ],
)
def test_a_damaged_csv_is_named_with_line_and_column(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        list(read_delimited(write(tmp_path, 'x.csv', content)))


def test_a_damaged_parquet_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r'expected a parquet file, got .*x\.parquet'):
        list(read_parquet(write(tmp_path, 'x.parquet', b'PAR1 no parquet PAR1'), ['text']))
    with pytest.raises(ValueError, match=r'expected a parquet file, got .*absent\.parquet'):
        list(read_parquet(tmp_path / 'absent.parquet', ['text']))
