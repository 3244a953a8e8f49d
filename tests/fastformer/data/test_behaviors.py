import json

import pyarrow as pa
import pytest
import torch
from text_files import BEHAVIOR_TYPES, write_behaviors

from aft_vision.fastformer.data.behaviors import (
    Behavior,
    BehaviorCollator,
    BehaviorTable,
    Request,
    read_behaviors,
    split_behaviors,
)
from aft_vision.fastformer.tokenize import train_tokenizer

GOOD = {'label': 1, 'ad': 'cheap flights', 'behaviors': [{'type': 'search', 'text': 'Oslo'}]}


def requests(labels: list[int], users: int = 0) -> list[Request]:
    """Request i has i behaviours."""
    return [
        Request(label, f'ad {i}', [Behavior('page', f'text {j}') for j in range(i)], f'u{i % users}' if users else '')
        for i, label in enumerate(labels)
    ]


def test_json_lines_become_numbers_of_texts_and_types(tmp_path):
    path, table = write_behaviors(tmp_path / 'b.jsonl', rows=30), BehaviorTable()
    dataset = read_behaviors(path, table)
    assert set(table.types) == set(BEHAVIOR_TYPES)
    for row, line in zip(dataset, path.read_text().splitlines(), strict=True):
        behaviors = [
            {'type': table.types[kind], 'text': table.texts[number]}
            for number, kind in zip(row['behaviors'], row['behavior_types'], strict=True)
        ]
        found = {'label': row['label'], 'ad': table.texts[row['ad']], 'behaviors': behaviors, 'user': row['user']}
        assert found == json.loads(line)
    assert len(table.texts) == len(set(table.texts))
    assert {0} < {len(row) for row in dataset['behaviors']}


def test_a_second_file_shares_the_numbers_of_the_first(tmp_path):
    table = BehaviorTable()
    first = read_behaviors(write_behaviors(tmp_path / 'a.jsonl', rows=10), table)
    texts = table.texts
    again = read_behaviors(write_behaviors(tmp_path / 'b.jsonl.gz', rows=10), table)
    assert table.texts == texts
    assert again.to_dict() == first.to_dict()


def test_the_last_behaviours_are_kept():
    table = BehaviorTable()
    dataset = table.collect(requests([0, 1, 0, 1, 0]), max_behaviors=2)
    kept = [[table.texts[number] for number in row] for row in dataset['behaviors']]
    assert kept == [[], ['text 0'], ['text 0', 'text 1'], ['text 1', 'text 2'], ['text 2', 'text 3']]
    with pytest.raises(ValueError, match='max_behaviors must be at least 1, or None, got 0'):
        table.collect(requests([0, 1]), max_behaviors=0)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'label': 2}, "line 2, column 'label': expected 0 or 1, got 2"),
        ({'label': True}, "line 2, column 'label': expected 0 or 1, got True"),
        ({'label': '1'}, "line 2, column 'label': expected 0 or 1, got '1'"),
        ({'ad': None}, "line 2, column 'ad': expected a text, got None"),
        ({'user': 1.5}, "line 2, column 'user': expected a text or a whole number, got 1.5"),
        ({'behaviors': 'Oslo'}, "line 2, column 'behaviors': expected a list, got 'Oslo'"),
        ({'behaviors': ['Oslo']}, r"column 'behaviors\[0\]': expected an object with the keys type, text, got 'Oslo'"),
        ({'behaviors': [{'type': 'a', 'text': ''}, {'type': 'a'}]}, r"column 'behaviors\[1\]': expected an obj"),
        ({'behaviors': [{'type': 1, 'text': 'a'}]}, r"column 'behaviors\[0\].type': expected a text, got 1"),
        ({'behaviors': [{'type': 'a', 'text': ['b']}]}, r"column 'behaviors\[0\].text': expected a text, got \['b'\]"),
    ],
)
def test_what_is_damaged_is_named(tmp_path, change, message):
    path = tmp_path / 'b.jsonl'
    path.write_text(json.dumps(GOOD) + '\n' + json.dumps({**GOOD, **change}) + '\n')
    with pytest.raises(ValueError, match=message):
        read_behaviors(path, BehaviorTable())


def test_missing_keys_and_empty_files_are_named(tmp_path):
    path = tmp_path / 'b.jsonl'
    path.write_text(json.dumps(GOOD) + '\n{"label": 1, "ad": "x"}\n')
    with pytest.raises(ValueError, match='line 2: expected the columns label, ad, behaviors, got label, ad'):
        read_behaviors(path, BehaviorTable())
    path.write_text('')
    with pytest.raises(ValueError, match='expected requests with an ad and a label, got none'):
        read_behaviors(path, BehaviorTable())


def test_the_last_rows_are_the_last_part():
    dataset = BehaviorTable().collect(requests([0, 1] * 20))
    parts = split_behaviors(dataset, 'last', fractions={'train': 0.7, 'validation': 0.1, 'test': 0.2})
    assert [len(part) for part in parts.values()] == [28, 4, 8]
    assert [len(row) for part in parts.values() for row in part['behaviors']] == list(range(40))


def test_the_last_part_begins_with_an_impression():
    rows = [Request(i % 2, 'ad', [], '', impression) for i, impression in enumerate([0] * 6 + [1] * 5 + [2] * 9)]
    fractions = {'train': 0.3, 'validation': 0.2, 'test': 0.5}
    parts = split_behaviors(BehaviorTable().collect(rows), 'last', fractions=fractions)
    assert [part['impression'][:] for part in parts.values()] == [[0] * 6, [1] * 5, [2] * 9]


def test_behaviours_have_room_for_more_than_two_billion():
    dataset = BehaviorTable().collect(requests([0, 1]))
    for column in ('behaviors', 'behavior_types'):
        assert dataset.data.schema.field(column).type == pa.large_list(pa.int32())


def test_parts_by_user_have_no_user_in_common():
    dataset = BehaviorTable().collect(requests([0, 0, 1] * 40, users=20))
    parts = split_behaviors(dataset, 'user', seed=1)
    users = [set(part['user']) for part in parts.values()]
    assert [len(each) for each in users] == [16, 2, 2]
    assert len(set.union(*users)) == 20
    assert sum(map(len, parts.values())) == 120
    same = split_behaviors(dataset, 'user', seed=1)
    assert same['test']['user'] == parts['test']['user']


def test_parts_at_random_have_the_same_share_of_labels():
    parts = split_behaviors(BehaviorTable().collect(requests([0, 0, 0, 1] * 25)), 'random')
    assert {name: len(part) for name, part in parts.items()} == {'train': 80, 'validation': 10, 'test': 10}
    shares = [sum(part['label']) / len(part) for part in parts.values()]
    assert max(shares) - min(shares) <= 0.1


def test_parts_that_cannot_be_measured_are_errors():
    dataset = BehaviorTable().collect(requests([0, 1] * 20 + [1] * 4))
    with pytest.raises(ValueError, match="both labels in the split 'test', got 4 of 4 with the label 1"):
        split_behaviors(dataset, 'last')
    with pytest.raises(ValueError, match="got rows without a 'user'"):
        split_behaviors(dataset, 'user')
    with pytest.raises(ValueError, match="a division of random, last, user, got 'first'"):
        split_behaviors(dataset, 'first')
    with pytest.raises(ValueError, match=r'expected users for each of .*, got 2 in all'):
        split_behaviors(BehaviorTable().collect(requests([0, 1] * 20, users=2)), 'user')


@pytest.fixture
def table() -> BehaviorTable:
    table = BehaviorTable()
    table.collect(
        [
            Request(0, 'a b c d', []),
            Request(1, 'a', [Behavior('page', 'b c'), Behavior('ad', '')]),
            Request(1, 'd c', [Behavior('ad', 'b c')] * 3),
        ]
    )
    return table


def test_a_batch_has_every_text_once(table):
    tokenizer = train_tokenizer(filter(None, table.texts))
    collate = BehaviorCollator(table, tokenizer, ['ad', 'view', 'page'], max_length=3)
    rows = [
        {'label': 1, 'ad': 1, 'behaviors': [2, 3], 'behavior_types': [0, 1], 'user': ''},
        {'label': 0, 'ad': 2, 'behaviors': [], 'behavior_types': [], 'user': ''},
    ]
    batch = collate(rows)
    # The Trainer takes the batch's size from what comes first.
    assert next(iter(batch)) == 'labels'
    assert batch['labels'].tolist() == [1, 0]
    assert batch['ad'].tolist() == [0, 1]
    assert batch['behaviors'].tolist() == [[1, 2], [-1, -1]]
    assert batch['behavior_types'].tolist() == [[2, 0], [0, 0]]
    words = [tokenizer.convert_ids_to_tokens(ids) for ids in batch['input_ids'].tolist()]
    assert words == [['a', '<pad>'], ['b', 'c'], ['<unk>', '<pad>']]
    assert batch['attention_mask'].tolist() == [[1, 0], [1, 1], [1, 0]]
    # Cut off after three words; a batch without a behaviour has one that is padding.
    batch = collate([{'label': 0, 'ad': 0, 'behaviors': [], 'behavior_types': [], 'user': ''}])
    assert tokenizer.decode(batch['input_ids'][0]) == 'a b c'
    assert batch['behaviors'].tolist() == [[-1]]
    assert all(value.dtype == torch.int64 for name, value in batch.items() if name != 'labels')


def test_a_type_that_the_model_does_not_know_is_an_error(table):
    tokenizer = train_tokenizer(filter(None, table.texts))
    with pytest.raises(ValueError, match='behaviours of the types ad, search, got page too'):
        BehaviorCollator(table, tokenizer, ['ad', 'search'], max_length=3)
