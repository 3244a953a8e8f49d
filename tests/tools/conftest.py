from collections.abc import Iterator

import pytest
from helpers import draw_coarsely

from tools.benchmark import compare


@pytest.fixture
def unmetered(monkeypatch):
    """No meter of memory, which runs every call twice more, once under the profiler."""
    monkeypatch.setattr(compare, 'peak_memory', lambda call, device: 2**20)


@pytest.fixture(scope='module')
def coarse_pictures() -> Iterator[None]:
    """Pictures of few pixels."""
    with pytest.MonkeyPatch.context() as patch:
        draw_coarsely(patch)
        yield
