"""The processes of a run: those started by torchrun or SLURM, or a single one."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from timm.utils.distributed import is_distributed_env, reduce_tensor, world_info_from_env

from aft_vision.cores import limit_threads
from aft_vision.data import Shard
from aft_vision.devices import resolve_device
from train.command_line import ERROR_DELAY

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

    def shard(self, accumulate: int) -> Shard:
        """Return the shard of this process in every update, of so many accumulation steps, and in the evaluation."""
        return Shard(self.rank, self.size, accumulate)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over all processes, the same on each."""
        return reduce_tensor(values, self.size) if self.is_distributed else values

    def any(self, value: bool) -> bool:
        """Return whether the value is true in any process."""
        return bool(self.largest(int(value)))

    def largest(self, number: int) -> int:
        """Return the largest number of all processes."""
        if not self.is_distributed:
            return number
        tensor = torch.tensor(number, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def wait(self) -> None:
        """Wait until all processes have come here."""
        self.largest(0)

    def have_same(self, number: int) -> bool:
        """Return whether the number is the same in all processes."""
        return self.largest(number) == -self.largest(-number)


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
def join_world(
    device: str, cpu_threads: int | None, timeout_minutes: float, evaluates: bool = False
) -> Iterator[World]:
    """Set the number of threads, join the process group of the environment, and leave it at the end.

    Each of several processes uses the device of its local rank.

    Args:
        device, cpu_threads, timeout_minutes: As in the section `run` of an experiment.
        evaluates: Choose the threads by the cores that are free now, as nothing is trained.

    Raises:
        ValueError: the device does not exist.
        ConnectionError: the processes do not find each other, or one has ended or has not answered for
            `run.timeout_minutes`. With NCCL its watchdog may end this process instead, after that time at most.
    """
    world = _find_world(resolve_device(device))
    if cpu_threads is not None:
        torch.set_num_threads(cpu_threads)
    elif world.size == 1 and world.device.type == 'cpu':
        limit_threads(by_load=evaluates)
    with _process_group(world, timeout_minutes) if world.size > 1 else contextlib.nullcontext():
        yield world


def _find_world(device: torch.device) -> World:
    """Return this process and the size of its group, as the environment describes them."""
    local_rank, rank, size = world_info_from_env() if is_distributed_env() else (0, 0, 1)
    if size > 1 and device.type != 'cpu':
        if device.type == 'cuda' and local_rank >= torch.cuda.device_count():
            raise ValueError(
                f'expected a GPU for each process of a node, all visible to each, got {torch.cuda.device_count()} for '
                f'the process with local rank {local_rank}'
            )
        device = torch.device(device.type, local_rank)
    if device.type == 'cuda' and device.index is not None:
        torch.cuda.set_device(device)
    return World(device, rank, size)


@contextlib.contextmanager
def _process_group(world: World, timeout_minutes: float) -> Iterator[None]:
    """Join a process group, and leave it at the end; raise the ConnectionError of `join_world`."""
    backend, timeout = dist.get_default_backend_for_device(world.device), timedelta(minutes=timeout_minutes)
    try:
        dist.init_process_group(backend, f'{RENDEZVOUS}://', timeout, world.size, world.rank)
    except RuntimeError as error:
        address = ':'.join(os.environ.get(name, f'${name}') for name in ('MASTER_ADDR', 'MASTER_PORT'))
        raise ConnectionError(
            f'process {world.rank} could not join the group of {world.size} processes at {address}: {error}'
        ) from error
    try:
        yield
    except RuntimeError as error:
        if not _is_lost_connection(error):
            raise
        # The process that has ended says why; torchrun ends this one in the meantime.
        time.sleep(2 * ERROR_DELAY)
        raise ConnectionError(
            f'expected all {world.size} processes, but one has ended or has not answered for run.timeout_minutes='
            f'{timeout_minutes:g}; start all again with run.resume=auto: {error}'
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _is_lost_connection(error: RuntimeError) -> bool:
    """Return whether another process has ended or has not answered in time; other errors are bugs."""
    text = str(error)
    is_timeout = isinstance(error, dist.DistError) and ('timeout' in text.lower() or 'timed out' in text.lower())
    # gloo has no type of error of its own, and reports messages of the wrong size as enforce fail.
    is_of_gloo = '/gloo/' in text and 'enforce fail' not in text
    return isinstance(error, dist.DistNetworkError) or is_timeout or is_of_gloo or 'ncclRemoteError' in text
