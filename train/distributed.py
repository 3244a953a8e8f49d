"""The processes of a run: those that torchrun or SLURM started, or this one alone."""

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
    """This process among those of the run.

    Attributes:
        device: Where its model is.
        rank: Its number; 0 writes and prints.
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
        """Return what this process has of every update, in so many parts, and of the data that are evaluated."""
        return Share(self.rank, self.size, accumulate)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over all processes, the same on each."""
        return reduce_tensor(values, self.size) if self.is_distributed else values

    def any(self, value: bool) -> bool:
        """Return whether the value is true in any process."""
        if not self.is_distributed:
            return value
        found = torch.tensor(float(value), device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found)


def _rendezvous_of_attempt(url: str, **options: Any) -> Iterator[tuple['dist.Store', int, int]]:
    """That of the environment, apart from the one before torchrun restarted the processes of this node.

    torchrun 2.15 gives a restarted group the store of the group before, whose addresses are still in it: without a
    prefix of its own, about every second restart looks for processes that are no more. The agents of several nodes
    count restarts each for itself, so there the store stays as it is.
    """
    alone = os.environ.get('GROUP_WORLD_SIZE', '1') == '1'
    attempt = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if alone else 'of_several_nodes'
    for store, rank, size in dist.rendezvous(urlsplit(url)._replace(scheme='env').geturl(), **options):
        yield dist.PrefixStore(f'attempt_{attempt}', store), rank, size


if dist.is_available():
    dist.register_rendezvous_handler(RENDEZVOUS, _rendezvous_of_attempt)


@contextlib.contextmanager
def join_world(config: Experiment) -> Iterator[World]:
    """Set the threads of a run, join the process group that the environment describes, and leave it in the end.

    Of several processes each takes the device of its local rank.

    Raises:
        ValueError: the device does not exist here, or the processes cannot share out a batch evenly.
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
