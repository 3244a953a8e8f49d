"""The processes of a run: those started by torchrun or SLURM, or a single one."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from timm.utils.distributed import init_distributed_device_so, reduce_tensor

from aft_vision.data import Share
from aft_vision.evaluate import resolve_device
from train.schema import Experiment

RENDEZVOUS = 'aft-vision'


@dataclass(frozen=True)
class World:
    """This process and its group.

    Attributes:
        device: Device of its model.
        rank: Its number; process 0 writes and prints.
        size: The number of processes.
    """

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_primary(self) -> bool:
        """Return whether this process writes and prints."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Return whether there is a process group."""
        return dist.is_available() and dist.is_initialized()

    def share(self, accumulate: int) -> Share:
        """Return the share of this process in every update, in this many parts, and in the evaluation."""
        return Share(self.rank, self.size, accumulate)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over all processes, the same on each."""
        return reduce_tensor(values, self.size) if self.is_distributed else values

    def any(self, value: bool) -> bool:
        """Return whether the value is true in any process."""
        if not self.is_distributed:
            return value
        found = torch.tensor(float(value), device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found)


def _rendezvous_of_attempt(url: str, **options: Any) -> Iterator[tuple['dist.Store', int, int]]:
    """Join the processes through the environment, with a separate store for each restart by torchrun.

    torchrun 2.15 gives a restarted group the store of the previous group, which still has its addresses. Without a
    separate prefix, about every second restart connects to processes that have ended. On several nodes each agent
    counts restarts separately, so there the store is used without a prefix.
    """
    alone = os.environ.get('GROUP_WORLD_SIZE', '1') == '1'
    attempt = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if alone else 'of_several_nodes'
    for store, rank, size in dist.rendezvous(urlsplit(url)._replace(scheme='env').geturl(), **options):
        yield dist.PrefixStore(f'attempt_{attempt}', store), rank, size


if dist.is_available():
    dist.register_rendezvous_handler(RENDEZVOUS, _rendezvous_of_attempt)


@contextlib.contextmanager
def join_world(config: Experiment) -> Iterator[World]:
    """Set the number of threads, join the process group of the environment, and leave it at the end.

    Each of several processes uses the device of its local rank.

    Raises:
        ValueError: the device does not exist, or a batch cannot be divided evenly among the processes.
    """
    if config.run.cpu_threads is not None:
        torch.set_num_threads(config.run.cpu_threads)
    found = init_distributed_device_so(str(resolve_device(config.run.device)), dist_url=f'{RENDEZVOUS}://')
    try:
        config.check_parts(found['world_size'])
        yield World(torch.device(found['device']), found['global_rank'], found['world_size'])
    finally:
        if found['distributed']:
            dist.destroy_process_group()
