"""Measured choices: what is chosen, kept and shared between processes, and where nothing is measured."""

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aft_vision.ops.common import choice
from aft_vision.ops.common.choice import choices_path, describe_choices, fastest, measure_choices, recorded


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the choices of a test in a folder of its own."""
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path / 'extensions'))
    monkeypatch.setattr(choice, 'time', SimpleNamespace(perf_counter=lambda: Ways.clock))
    choices_path.cache_clear()
    yield
    choices_path.cache_clear()


class Ways(dict[str, Callable[[], object]]):
    """Ways that take these milliseconds by a clock of their own, and count their calls."""

    clock = 0.0

    def __init__(self, **ms: float) -> None:
        super().__init__()
        self.calls = 0
        for name, each in ms.items():
            self[name] = lambda each=each: self.run(each)

    def run(self, ms: float) -> None:
        self.calls += 1
        Ways.clock += 1e-3 * ms


def forget() -> None:
    """Read the file again, as another process."""
    choice._records.clear()


def test_the_fastest_way_is_chosen_once_and_kept():
    ways = Ways(slow=6, fast=1, middle=4)
    assert fastest('product', (3, 4), ways) == 'fast'
    assert ways.calls >= 9
    forget()
    others = Ways(slow=1, fast=6, middle=6)
    assert fastest('product', (3, 4), others) == 'fast'
    assert others.calls == 0
    (kept,) = recorded().values()
    assert kept['chosen'] == 'fast'
    assert set(kept['ms']) == set(ways)
    assert kept['ms']['slow'] > kept['ms']['middle'] > kept['ms']['fast'] == 1


def test_a_choice_is_described_by_the_time_of_each_way():
    fastest('product of this test', (5, 7), Ways(slow=6, fast=1))
    (line,) = [line for line in describe_choices() if line.startswith('product of this test 5 7')]
    assert ': fast (slow ' in line
    assert line.count(' ms') == 2


def test_another_subject_shape_or_number_of_threads_is_measured_by_itself():
    threads = torch.get_num_threads()
    try:
        for subject, shape, count in (('a', (1,), 1), ('b', (1,), 1), ('a', (2,), 1), ('a', (1,), 2)):
            torch.set_num_threads(count)
            ways = Ways(one=1, two=3)
            assert fastest(subject, shape, ways) == 'one'
            assert ways.calls > 0
    finally:
        torch.set_num_threads(threads)
    assert len(recorded()) == 4


def test_the_first_way_stays_unless_another_is_clearly_faster():
    assert fastest('product', (1,), Ways(first=5, second=4.9)) == 'first'


@pytest.mark.parametrize(('share', 'is_kept'), [(0.2, True), (0.4, False)])
def test_what_is_measured_on_a_busy_machine_is_not_kept(share: float, is_kept: bool):
    ways = Ways(slow=3, fast=1)
    # Most calls of one way are interrupted.
    ways['fast'] = lambda: ways.run(1 if ways.calls % 10 == 1 else 1 + share)
    assert fastest('product', (1,), ways) == 'fast'
    calls = ways.calls
    assert fastest('product', (1,), ways) == 'fast'
    assert ways.calls == calls
    forget()
    assert bool(recorded()) is is_kept


def test_choices_of_other_kernels_are_not_read(monkeypatch: pytest.MonkeyPatch):
    fastest('product', (1,), Ways(slow=3, fast=1))
    monkeypatch.setattr(choice, 'sources_hash', lambda: 'of another version')
    choices_path.cache_clear()
    assert fastest('product', (1,), Ways(slow=1, fast=3)) == 'slow'


def test_nothing_is_measured_where_it_is_forbidden():
    measure_choices(False)
    try:
        ways = Ways(slow=3, fast=1)
        assert fastest('product', (1,), ways) == 'slow'
        assert ways.calls == 0
        assert not recorded()
    finally:
        measure_choices(True)
    assert fastest('product', (1,), Ways(slow=3, fast=1)) == 'fast'
    measure_choices(False)
    try:
        assert fastest('product', (1,), Ways(slow=3, fast=1)) == 'fast'
    finally:
        measure_choices(True)


def test_a_single_way_is_not_measured():
    ways = Ways(only=1)
    assert fastest('product', (1,), ways) == 'only'
    assert ways.calls == 0


def choose_in_fork(queue: 'multiprocessing.Queue[tuple[str, int]]') -> None:
    ways = Ways(slow=3, fast=1)
    queue.put((fastest('product', (1,), ways), ways.calls))


def test_a_forked_process_measures_nothing():
    context = multiprocessing.get_context('fork')
    queue = context.Queue()
    process = context.Process(target=choose_in_fork, args=(queue,))
    process.start()
    assert queue.get() == ('slow', 0)
    process.join()


@pytest.mark.parametrize(
    'content', ['', '{"a": ', '[1]', '{"a": 1}', '{"a": {"ms": 3}}', '{"a": {"chosen": "b"}}', '\0\0']
)
def test_a_damaged_file_is_measured_again(content: str):
    fastest('product', (1,), Ways(slow=3, fast=1))
    choices_path().write_text(content)
    forget()
    assert fastest('product', (1,), Ways(slow=1, fast=3)) == 'slow'
    forget()
    assert fastest('product', (1,), Ways(slow=3, fast=1)) == 'slow'


def test_a_choice_of_another_process_stays():
    fastest('product', (1,), Ways(slow=3, fast=1))
    known = recorded().copy()
    forget()
    recorded()
    # Both measured the same at the same time; the first one to write decides.
    choice._records[choices_path()] = {}
    assert fastest('product', (1,), Ways(slow=1, fast=3)) == 'fast'
    assert recorded() == known


def test_a_way_that_no_longer_exists_is_measured_again():
    fastest('product', (1,), Ways(slow=3, fast=1))
    assert fastest('product', (1,), Ways(slow=3, other=1)) == 'other'


@pytest.mark.parametrize('fault', ['no home', 'no folder'])
def test_where_nothing_can_be_written_this_process_alone_remembers(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail() -> Path:
        raise RuntimeError('Could not determine home directory.')

    (tmp_path / 'file').touch()
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', '' if fault == 'no home' else str(tmp_path / 'file'))
    monkeypatch.setattr(Path, 'home', fail)
    choices_path.cache_clear()
    assert fastest('product', (1,), Ways(slow=3, fast=1)) == 'fast'
    ways = Ways(slow=1, fast=3)
    assert fastest('product', (1,), ways) == 'fast'
    assert ways.calls == 0
