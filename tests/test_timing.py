import pytest
import torch

from aft_vision import timing
from aft_vision.timing import compare_rounds, time_interleaved, time_rounds

CPU = torch.device('cpu')


class Clock:
    """A clock that calls turn on by what they take."""

    def __init__(self):
        self.now, self.log = 0.0, []

    def call(self, name, *seconds):
        """Takes the next of these times, and the last one from then on."""
        left = list(seconds)

        def run():
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing.time, 'perf_counter', lambda: clock.now)
    return clock


def test_ratios_are_medians_within_rounds(clock):
    # The machine is twice as slow in the second round, for both; the first two of each come before the rounds.
    slow = clock.call('slow', 9.0, 9.0, 4.0, 8.0, 5.0, 4.0)
    fast = clock.call('fast', 9.0, 9.0, 1.0, 2.0, 2.0, 2.0)
    first, second = time_interleaved([slow, fast], CPU, rounds=4)
    assert (first.seconds, first.ratio, first.quartiles) == (4.5, 1.0, (1.0, 1.0))
    assert second.seconds == 2.0
    # Ratios 4, 4, 2.5 and 2.
    assert second.ratio == pytest.approx(3.25)
    assert second.quartiles == pytest.approx((2.375, 4.0))


def test_the_calls_take_turns_and_none_always_comes_first(clock):
    calls = [clock.call(name, 1.0) for name in 'abc']
    time_interleaved(calls, CPU, rounds=3, warmup=2)
    assert ''.join(clock.log) == 'aaabbbccc' + 'abc' + 'bca' + 'cab'


def test_a_short_call_is_repeated_and_its_time_is_that_of_one(clock):
    (found,) = time_interleaved([clock.call('a', 2**-10)], CPU, rounds=1)
    assert len(clock.log) == 2 + 21
    assert found == (2**-10, 1.0, (1.0, 1.0))


def test_a_first_call_that_compiles_does_not_say_how_often_a_call_is_repeated(clock):
    compiled, plain = clock.call('a', 60.0, 2**-10), clock.call('b', 2**-10)
    assert time_rounds([compiled, plain], CPU, rounds=1) == [[2**-10], [2**-10]]
    assert clock.log.count('a') == clock.log.count('b') == 2 + 21


def test_rounds_are_compared_one_by_one():
    # Ratios 2, 1 and 4.
    assert compare_rounds([1.0, 3.0, 0.5], [2.0, 3.0, 2.0]) == (1.0, 2.0, (1.5, 3.0))


@pytest.mark.parametrize(('min_seconds', 'repeats'), [(1.0, 2), (0.0, 1)])
def test_the_time_that_a_call_is_repeated_for_may_be_chosen(clock, min_seconds, repeats):
    time_interleaved([clock.call('a', 0.5)], CPU, rounds=2, min_seconds=min_seconds)
    assert len(clock.log) == 2 + 2 * repeats


@pytest.mark.parametrize(('calls', 'rounds', 'warmup'), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nothing_to_time_is_rejected(calls, rounds, warmup):
    with pytest.raises(ValueError, match=f'got {calls} calls, {rounds} rounds and {warmup}'):
        time_interleaved([int] * calls, CPU, rounds, warmup=warmup)


@pytest.mark.gpu
def test_calls_on_a_cuda_device_are_waited_for():
    device = torch.device('cuda')
    x = torch.ones(512, 512, device=device)
    timings = time_interleaved([lambda: x @ x @ x @ x @ x, lambda: x @ x], device, rounds=3)
    assert all(timing.seconds > 0 for timing in timings)
