"""The processes of a run: those that torchrun or SLURM started, or this one alone."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from timm.utils.distributed import init_distributed_device_so, reduce_tensor

from aft_vision.evaluate import resolve_device


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
        """Whether this process writes and prints."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there is a process group."""
        return dist.is_available() and dist.is_initialized()

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over all processes, the same on each."""
        return reduce_tensor(values, self.size) if self.is_distributed else values

    def any(self, value: bool) -> bool:
        """Whether the value is true in any process."""
        if not self.is_distributed:
            return value
        found = torch.tensor(float(value), device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found)


@contextlib.contextmanager
def join_world(device: str) -> Iterator[World]:
    """Join the process group that the environment describes, and leave it in the end.

    Args:
        device: `auto` takes CUDA where there is one. Of several processes each takes the device of its local rank.

    Raises:
        ValueError: the device does not exist here.
    """
    found = init_distributed_device_so(str(resolve_device(device)))
    try:
        yield World(torch.device(found['device']), found['global_rank'], found['world_size'])
    finally:
        if found['distributed']:
            dist.destroy_process_group()
