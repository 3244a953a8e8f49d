import resource
import signal
from collections.abc import Iterator

import pytest
import torch

from train.checkpoint import save_checkpoint


def test_a_checkpoint_is_read_without_running_code(tmp_path):
    save_checkpoint({'state_dict': {'a': torch.ones(2)}, 'epoch': 3}, tmp_path / 'last.pth')
    content = torch.load(tmp_path / 'last.pth', weights_only=True)
    assert content['epoch'] == 3
    torch.testing.assert_close(content['state_dict']['a'], torch.ones(2))
    assert [path.name for path in tmp_path.iterdir()] == ['last.pth']


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file grows beyond 100 kB, as on a disk that becomes full while it is written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_previous_checkpoint_whole(tmp_path, full_disk):
    save_checkpoint({'epoch': 1}, tmp_path / 'last.pth')
    with pytest.raises(OSError, match=r'could not write .*last\.pth; what was there before is whole: .*too large'):
        save_checkpoint({'epoch': 2, 'state_dict': {'a': torch.zeros(100_000)}}, tmp_path / 'last.pth')
    assert torch.load(tmp_path / 'last.pth', weights_only=True) == {'epoch': 1}
    assert [path.name for path in tmp_path.iterdir()] == ['last.pth']


def test_the_content_reaches_the_disk_before_the_name(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr('os.fsync', lambda descriptor: events.append('fsync'))
    monkeypatch.setattr('os.replace', lambda source, target: events.append('replace'))
    save_checkpoint({'epoch': 1}, tmp_path / 'last.pth')
    assert events == ['fsync', 'replace', 'fsync']
