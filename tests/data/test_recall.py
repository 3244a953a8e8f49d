import math
from collections import Counter
from typing import Any

import pytest
import torch

from aft_vision.data import IGNORED, RecallDataset, RecallTask, Shard, sequence_eval_loader, sequence_train_loader

TASK = RecallTask(pairs=8, context=64, vocab_size=64)


def examples(task: RecallTask, count: int, *where: Any) -> list[tuple[list[int], list[int]]]:
    tokens, answers = task.examples(*(where or ('train',))[:1], count, *where[1:])
    return list(zip(tokens.tolist(), answers.tolist(), strict=True))


def epoch(loader, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    loader.sampler.set_epoch(number)
    tokens, targets = zip(*loader, strict=True)
    return torch.cat(tokens), torch.cat(targets)


@pytest.mark.parametrize('task', [TASK, RecallTask(pairs=16), RecallTask(pairs=1, context=5, vocab_size=4)])
def test_an_answer_is_the_value_of_the_key_before_it_and_nothing_else_is_one(task):
    half = task.vocab_size // 2
    for tokens, answers in examples(task, 50):
        keys, values = tokens[: 2 * task.pairs : 2], tokens[1 : 2 * task.pairs : 2]
        assert len(tokens) == len(answers) == task.context
        assert len(set(keys)) == len(set(values)) == task.pairs
        assert set(keys) <= set(range(1, half))
        assert set(values) <= set(range(half, task.vocab_size))
        places = [place for place, answer in enumerate(answers) if answer]
        assert sorted(tokens[place - 1] for place in places) == sorted(keys)
        assert [answers[place] for place in places] == [values[keys.index(tokens[place - 1])] for place in places]
        # No answer is to be read, and what follows the pairs is a query or the filler.
        assert not any(tokens[place] for place in places)
        assert sum(map(bool, tokens[2 * task.pairs :])) == task.pairs
        assert min(places) > 2 * task.pairs


def test_an_example_depends_on_split_seed_epoch_and_number_alone(monkeypatch):
    whole = examples(TASK, 20)
    assert examples(TASK, 20) == whole
    assert examples(TASK, 7) == whole[:7]
    for other in (('valid',), ('train', 1), ('train', 0, 1)):
        assert not any(
            tokens == known for (tokens, _), (known, _) in zip(examples(TASK, 20, *other), whole, strict=True)
        )
    monkeypatch.setattr('aft_vision.data.recall.CHUNK', 6)
    assert examples(TASK, 20) == whole


def test_examples_of_a_large_setting_repeat_neither_in_a_split_nor_across_splits():
    count = 5000
    found = {tuple(tokens) for split in ('train', 'valid', 'test') for tokens, _ in examples(TASK, count, split)}
    assert len(found) == 3 * count


@pytest.mark.parametrize('power', [0.01, 0.5, 1.0])
def test_the_places_of_queries_follow_a_power_law(power):
    task = RecallTask(pairs=1, context=18, vocab_size=8, power=power)
    count = 10000
    drawn = Counter(answers.index(max(answers)) for _, answers in examples(task, count))
    assert set(drawn) <= set(range(3, 18, 2))
    weights = [i ** (power - 1) for i in range(1, 9)]
    for number, weight in enumerate(weights):
        expected = weight / sum(weights)
        bound = 4.5 * math.sqrt(expected * (1 - expected) / count)
        assert drawn[3 + 2 * number] / count == pytest.approx(expected, abs=bound)


def test_the_order_of_the_queries_is_independent_of_that_of_the_keys():
    count = 10000
    for task in (RecallTask(pairs=2, context=64, vocab_size=16), RecallTask(pairs=2, context=8, vocab_size=16)):
        first = [next(filter(None, tokens[4:])) == tokens[0] for tokens, _ in examples(task, count)]
        assert sum(first) / count == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(count))


def test_every_key_and_value_is_drawn_equally_often():
    count = 10000
    found = Counter(token for tokens, _ in examples(TASK, count) for token in tokens[: 2 * TASK.pairs])
    for symbols in (range(1, 32), range(32, 64)):
        expected = count * TASK.pairs / len(symbols)
        for symbol in symbols:
            assert found[symbol] == pytest.approx(expected, abs=5 * math.sqrt(expected))


def test_a_loader_has_targets_at_the_answers_and_new_examples_in_every_epoch():
    loader = sequence_train_loader(RecallDataset(TASK, 'train', 32, seed=3), 8, seed=3)
    tokens, targets = epoch(loader)
    assert tokens.shape == targets.shape == (32, 64)
    assert tokens.dtype == targets.dtype == torch.int64
    assert (targets != IGNORED).sum(1).tolist() == [TASK.pairs] * 32
    drawn = {tuple(row) for row in tokens.tolist()}
    expected = {tuple(tokens) for tokens, _ in examples(TASK, 32, 'train', 3)}
    assert drawn == expected
    assert not drawn & {tuple(row) for row in epoch(loader, 1)[0].tolist()}
    assert torch.equal(epoch(loader)[1], targets)


def test_processes_share_the_examples_of_an_evaluation():
    shards = [sequence_eval_loader(RecallDataset(TASK, 'test', 7), 2, shard=Shard(rank, 3)) for rank in range(3)]
    found = [tuple(row) for loader in shards for tokens, _ in loader for row in tokens.tolist()]
    assert sorted(found) == sorted(tuple(tokens) for tokens, _ in examples(TASK, 7, 'test'))


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (dict(pairs=17), r'data\.pairs to be at most 16, which data\.context = 64 has place for, got 17'),
        (dict(pairs=8, vocab_size=16), r'data\.pairs to be at most 7, which data\.vocab_size = 16 .*, got 8'),
        (dict(vocab_size=31), r'data\.vocab_size to be even, got 31'),
        (dict(pairs=0), r'data\.pairs to be at least 1, .*got 0'),
        (dict(power=0.0), r'data\.power to be in \(0, 1\], got 0\.0'),
    ],
)
def test_a_setting_that_has_no_examples_is_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        RecallTask(**arguments)


def test_a_split_that_does_not_exist_is_rejected():
    with pytest.raises(ValueError, match='not in tuple'):
        TASK.examples('tain', 1)
