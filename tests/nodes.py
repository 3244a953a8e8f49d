"""Two nodes on one machine, network namespaces with a cable between them, and processes to start and kill on each."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from small_runs import forkserver

# Options of nsenter, by what is separate on a node: the user, who may make the others, the files mounted, the network
# and the name of the host.
NAMESPACES = {'user': '-U', 'mnt': '-m', 'net': '-n', 'uts': '-u'}


class Nodes:
    """The hosts node0 and node1, without any other network; a context manager that ends their processes.

    Args:
        folder: For the file with the names of the hosts.

    Raises:
        OSError, subprocess.SubprocessError: a command is missing, or namespaces are not allowed.
    """

    def __init__(self, folder: Path) -> None:
        self.hosts = folder / 'hosts'
        self.hosts.write_text('127.0.0.1 localhost\n10.0.0.1 node0\n10.0.0.2 node1\n')
        # A node is the namespaces of such a process, which ends as its input does: with this process at the latest.
        self.holders: list[subprocess.Popen[str]] = []
        self.started: list[Any] = []

    def __enter__(self) -> 'Nodes':
        try:
            self._hold(['unshare', '-Urnmu'], f'mount --bind {self.hosts} /etc/hosts; hostname node0')
            self._hold([*self._entry(0, 'user', 'mnt'), 'unshare', '-nu'], 'hostname node1')
            self._run(0, f'ip link add eth0 type veth peer name eth0 netns {self.holders[1].pid}')
            for node in range(2):
                self._run(node, f'ip address add 10.0.0.{node + 1}/24 dev eth0; ip link set lo up')
                self.connect(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # All of them, also after an error.
        with ExitStack() as stack:
            for holder in self.holders:
                stack.callback(holder.communicate)
            for process in self.started:
                stack.callback(self.kill, process)

    def connect(self, node: int, on: bool = True) -> None:
        """Plug in the cable, or pull it out: then nothing closes the connections of the other node."""
        self._run(node, f'ip link set eth0 {"up" if on else "down"}')

    def start(self, node: int, function: Callable[..., None], *args: Any) -> Any:
        """Call a function in a new process on a node."""
        process = forkserver.Process(target=_call_on, args=(self.holders[node].pid, function, *args))
        process.start()
        self.started.append(process)
        return process

    def kill(self, process: Any) -> None:
        """End a process and those that it has started, by SIGKILL."""
        # Its first act is to make a group of its own, which those that it has started may outlive it in.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()

    def _hold(self, command: list[str], script: str) -> None:
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        holder = subprocess.Popen([*command, 'sh', '-ec', f'{script}; echo ready; exec cat'], **pipes)
        self.holders.append(holder)
        if holder.stdout.readline() != 'ready\n':
            raise subprocess.SubprocessError(holder.communicate()[1].strip())

    def _run(self, node: int, script: str) -> None:
        # Where ip is may not be on the path of a user.
        command = [*self._entry(node, *NAMESPACES), 'sh', '-ec', f'PATH=$PATH:/usr/sbin:/sbin; {script}']
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise subprocess.SubprocessError(done.stderr.strip())

    def _entry(self, node: int, *namespaces: str) -> list[str]:
        options = [NAMESPACES[name] for name in namespaces]
        return ['nsenter', '--preserve-credentials', '-t', str(self.holders[node].pid), *options]


def _call_on(holder: int, function: Callable[..., None], *args: Any) -> None:
    os.setpgrp()
    libc, here = ctypes.CDLL(None, use_errno=True), Path.cwd()
    # All are opened here: a user of another namespace may not read these paths. Python has os.setns from 3.12 on.
    for file in [os.open(f'/proc/{holder}/ns/{name}', os.O_RDONLY) for name in NAMESPACES]:
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.close(file)
    # Entering other mounts leads to their root.
    os.chdir(here)
    function(*args)
