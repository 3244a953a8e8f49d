import contextlib
import fcntl
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from helpers import link_photographs

from train.checkpoint import lock_run, save_checkpoint
from train.imagenet import main


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
    with pytest.raises(OSError, match=r'could not write .*last\.pth; the files from before are whole: .*too large'):
        save_checkpoint({'epoch': 2, 'state_dict': {'a': torch.zeros(100_000)}}, tmp_path / 'last.pth')
    assert torch.load(tmp_path / 'last.pth', weights_only=True) == {'epoch': 1}
    assert [path.name for path in tmp_path.iterdir()] == ['last.pth']


def test_the_content_reaches_the_disk_before_the_name(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr('os.fsync', lambda descriptor: events.append('fsync'))
    monkeypatch.setattr('os.replace', lambda source, target: events.append('replace'))
    save_checkpoint({'epoch': 1}, tmp_path / 'last.pth')
    assert events == ['fsync', 'replace', 'fsync']


def test_two_processes_that_write_one_checkpoint_write_files_of_their_own(tmp_path, monkeypatch):
    save, nested = torch.save, []

    def save_between(content: dict[str, int], file: IO[bytes]) -> None:
        save(content, file)
        if not nested:
            nested.append(True)
            save_checkpoint({'epoch': 2, 'x': torch.zeros(1000)}, tmp_path / 'last.pth')

    monkeypatch.setattr(torch, 'save', save_between)
    save_checkpoint({'epoch': 1}, tmp_path / 'last.pth')
    assert torch.load(tmp_path / 'last.pth', weights_only=True) == {'epoch': 1}
    assert [path.name for path in tmp_path.iterdir()] == ['last.pth']


# What a loader starts its processes with.
FORK = multiprocessing.get_context('fork')


def hold(folder: Path, started: Connection) -> None:
    """A run with a loading process, which waits until it is killed."""
    with lock_run(folder):
        worker = FORK.Process(target=time.sleep, args=(60,))
        worker.start()
        started.send(worker.pid)
        time.sleep(60)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[multiprocessing.process.BaseProcess, int]]:
    """A process that trains in a folder, and its loading process."""
    started, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=hold, args=(tmp_path, sender))
    process.start()
    assert started.poll(60)
    worker = started.recv()
    yield process, worker
    process.kill()
    process.join()
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)


def test_a_folder_is_locked_until_its_run_is_killed(tmp_path, holder):
    process, worker = holder
    with pytest.raises(FileExistsError, match=rf'other run is going on, got .*, where process {process.pid} of .*'):
        lock_run(tmp_path).__enter__()
    assert process.is_alive()
    left = [tmp_path / '.last.pth.0.tmp', tmp_path / '.export.0.tmp' / 'model.safetensors']
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b'half')
    process.kill()
    process.join()
    # Its loading process lives on.
    os.kill(worker, 0)
    with lock_run(tmp_path):
        assert not any(path.exists() for path in left)
        assert [path.name for path in tmp_path.iterdir()] == ['.lock']
    assert not list(tmp_path.iterdir())


def test_a_folder_can_be_locked_again_after_an_error(tmp_path):
    with pytest.raises(KeyError), lock_run(tmp_path / 'run'):
        raise KeyError
    with lock_run(tmp_path / 'run'):
        pass


@pytest.mark.parametrize('third', [False, True])
def test_a_lock_whose_owner_removes_it_after_it_was_opened_is_refused(tmp_path, monkeypatch, third):
    lockf, lock = fcntl.lockf, tmp_path / 'run' / '.lock'

    def lock_removed(*args: Any) -> None:
        lock.unlink()
        if third:
            lock.touch()
        lockf(*args)

    monkeypatch.setattr(fcntl, 'lockf', lock_removed)
    with pytest.raises(FileExistsError, match=r'no other run is going on, got .*run, where .*; try again'):
        lock_run(tmp_path / 'run').__enter__()
    # That of a third process stays; a folder that was new and is empty does not.
    assert lock.exists() == lock.parent.exists() == third


def test_a_run_in_a_folder_where_another_trains_is_refused(tmp_path, holder):
    config, photographs = tmp_path / 'x.yaml', link_photographs(tmp_path / 'photographs', 2, 1, classes=2)
    config.write_text('augment: {repeats: 1}\nschedule: {epochs: 1, warmup_epochs: 0}\n')
    small = [f'data.dir={photographs}', 'data.batch_size=4', 'data.img_size=[32,32]', 'data.num_workers=0']
    with pytest.raises(FileExistsError, match=r'no other run is going on'):
        main(['--quiet', '--config', str(config), *small, 'optim.lr=0.1', f'run.dir={tmp_path}'])
    assert not (tmp_path / 'config.yaml').exists()
