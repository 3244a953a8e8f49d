"""Devices by name, and their peak memory."""

import mmap
import sys

import pytest
import torch

from aft_vision.devices import peak_memory_mb, reset_peak_memory, resolve_device


@pytest.mark.parametrize('name', ['gpu', 'meta', 'cuda:99', 'cuda', 'hpu'])
def test_a_device_that_is_not_there_is_named(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 0)
    with pytest.raises(ValueError, match=f"a device of this machine, got '{name}'"):
        resolve_device(name)


def test_auto_is_the_cpu_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert resolve_device('auto') == torch.device('cpu')


@pytest.mark.skipif(sys.platform != 'linux', reason='the peak can be reset under Linux only')
def test_the_peak_memory_is_that_since_the_reset():
    reset_peak_memory('cpu')
    before = peak_memory_mb('cpu')
    # The kernel counts pages in batches, so a figure is right to a few MB.
    # Not malloc's, which may have it of what other tests freed, and may keep it.
    block = mmap.mmap(-1, 100 * 2**20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block[:: mmap.PAGESIZE] = bytes(len(block) // mmap.PAGESIZE)
    with_block = peak_memory_mb('cpu')
    block.close()
    assert 90 < with_block - before < 120
    assert peak_memory_mb('cpu') == pytest.approx(with_block, abs=5)
    reset_peak_memory('cpu')
    assert peak_memory_mb('cpu') < with_block - 90
