from itertools import chain

import numpy as np
import pytest
import torch

from aft_vision.fastformer.data.impressions import (
    Behaviors,
    ClickSamples,
    NewsCollator,
    Ragged,
    split_impressions,
    tokenize_texts,
)
from aft_vision.fastformer.tokenize import train_tokenizer

HISTORIES = [[1, 2], [], [5], [3, 4, 1], [0]]
CANDIDATES = [[7, 8, 9], [1, 2, 3, 4, 5, 6], [4, 5], [8, 9], [6]]
LABELS = [[1, 0, 0], [0, 1, 0, 0, 1, 0], [1, 0], [1, 1], [1]]


def make_behaviors(labelled: bool = True) -> Behaviors:
    labels = np.array([*chain(*LABELS)], dtype=np.int8) if labelled else None
    names = [f'i{number}' for number in range(len(HISTORIES))]
    return Behaviors(names, Ragged.from_rows(HISTORIES), Ragged.from_rows(CANDIDATES), labels)


def test_rows_of_different_lengths_come_back():
    rows = Ragged.from_rows(HISTORIES)
    assert [row.tolist() for row in rows] == HISTORIES
    assert [row.tolist() for row in rows.select(np.array([3, 1, 0]))] == [HISTORIES[i] for i in (3, 1, 0)]
    assert len(Ragged.from_rows([])) == 0


def test_impressions_are_selected_with_their_labels():
    found = make_behaviors().select(np.array([3, 1]))
    assert found.impression_ids == ['i3', 'i1']
    assert [row.tolist() for row in found.candidates] == [CANDIDATES[3], CANDIDATES[1]]
    assert found.labels.tolist() == LABELS[3] + LABELS[1]
    assert make_behaviors(labelled=False).select(np.array([0])).labels is None


def test_parts_divide_the_impressions_at_random():
    whole = Behaviors([str(i) for i in range(50)], *(Ragged.from_rows([[0]] * 50),) * 2, None)
    first, same, other = (split_impressions(whole, [0.8, 0.1, 0.1], seed) for seed in (0, 0, 1))
    assert [len(part) for part in first] == [40, 5, 5]
    assert sorted(chain(*(part.impression_ids for part in first))) == sorted(whole.impression_ids)
    assert first[1].impression_ids == same[1].impression_ids != other[1].impression_ids
    with pytest.raises(ValueError, match=r'expected impressions for splits of \[0.98, 0.01, 0.01\], got 50'):
        split_impressions(whole, [0.98, 0.01, 0.01])


def test_every_click_with_a_negative_is_a_sample():
    samples = ClickSamples(make_behaviors(), negatives=2)
    assert samples.impressions.tolist() == [0, 1, 1, 2]
    assert [samples[i]['candidates'][0] for i in range(4)] == [7, 2, 5, 4]
    assert [samples[i]['history'].tolist() for i in range(4)] == [HISTORIES[i] for i in (0, 1, 1, 2)]


def test_negatives_are_of_the_impression_and_repeat_only_where_there_are_too_few():
    samples = ClickSamples(make_behaviors(), negatives=4)
    for epoch in range(20):
        few, all_four, one = (samples[epoch * len(samples) + i]['candidates'][1:].tolist() for i in (0, 1, 3))
        assert sorted(all_four) == [1, 3, 4, 6]
        assert set(few) == {8, 9}
        assert len(few) == 4
        assert one == [5] * 4


def test_negatives_depend_on_the_seed_the_epoch_and_the_sample_alone():
    samples, again, other = (ClickSamples(make_behaviors(), 2, seed) for seed in (0, 0, 1))
    drawn = [samples[i]['candidates'].tolist() for i in range(40)]
    assert [again[i]['candidates'].tolist() for i in reversed(range(40))] == drawn[::-1]
    assert [other[i]['candidates'].tolist() for i in range(40)] != drawn
    # Each of the four negatives is drawn as often: 20 epochs, two samples, two of four.
    counts = np.bincount(np.concatenate([samples[i]['candidates'][1:] for e in range(500) for i in [4 * e + 1]]))
    assert np.abs(counts[[1, 3, 4, 6]] - 250).max() < 50


def test_impressions_that_teach_nothing_are_refused():
    with pytest.raises(ValueError, match='expected an impression with a clicked and another candidate'):
        ClickSamples(make_behaviors().select(np.array([3, 4])))


def test_a_news_stands_in_a_batch_once():
    tokens = Ragged.from_rows([[10 + i] * (1 + i % 3) for i in range(10)])
    samples = ClickSamples(make_behaviors(), negatives=3)
    batch = NewsCollator(tokens, pad_token_id=0)([samples[i] for i in range(4)])
    rows = [row[mask.bool()].tolist() for row, mask in zip(batch['input_ids'], batch['attention_mask'], strict=True)]
    assert len({tuple(row) for row in rows}) == len(rows)
    assert not batch['input_ids'][~batch['attention_mask'].bool()].any()
    for i in range(4):
        for name in ('history', 'candidates'):
            found = [rows[row] for row in batch[name][i].tolist() if row >= 0]
            assert found == [tokens[row].tolist() for row in samples[i][name]]
    assert batch['history'].tolist()[1:3] == [[-1, -1]] * 2
    assert batch['labels'].tolist() == [0] * 4
    assert all(value.dtype == torch.int64 for value in batch.values())


def test_a_batch_of_users_without_clicks_has_a_place_for_one():
    tokens = Ragged.from_rows([[5]] * 10)
    samples = ClickSamples(make_behaviors(), negatives=1)
    assert NewsCollator(tokens, 0)([samples[1]])['history'].tolist() == [[-1]]


def test_a_text_without_words_is_one_unknown_token():
    tokenizer = train_tokenizer(['red blue'])
    with pytest.raises(ValueError, match=r'expected a tokenizer with a padding token, got one without; set'):
        NewsCollator(Ragged.from_rows([]), pad_token_id=None)
    assert len(tokenize_texts([], tokenizer)) == 0
    found = tokenize_texts(['red red blue', '', 'blue'], tokenizer, max_length=2)
    red, blue = tokenizer.convert_tokens_to_ids(['red', 'blue'])
    assert [row.tolist() for row in found] == [[red, red], [tokenizer.unk_token_id], [blue]]
