"""Sampling in batches, with what is finished kept in a file so that it can be interrupted and go on."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from torch import Tensor

from aft_vision.models.weight_files import load_torch_file

if TYPE_CHECKING:
    from aft_vision.models.sampling import Sampler


def run_batches(
    samplers: Sequence[Callable[[], 'Sampler']],
    state_file: str | Path | None = None,
    about: Mapping[str, Any] | None = None,
    *,
    progress: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    save_every_s: float = 60.0,
) -> list[Tensor] | None:
    """Run samplers one after the other, resuming from a file, where it exists, what was interrupted.

    Args:
        samplers: each makes one, with random numbers of its own; made when its turn comes.
        state_file: what is finished and the state of the present sampler, written when stopped and while running.
        about: plain values that decide the result, kept in the file and compared with those in it.
        progress: show a progress bar for each.
        should_stop: asked after each position.
        save_every_s: seconds between two writes while running.

    Returns:
        The tokens of each, or None if stopped. The file stays: whoever has used the result may remove it.

    Raises:
        ValueError: the file is not of these samplers.
    """
    about = {'count': len(samplers), **(about or {})}
    finished, present = _read_run(state_file, about)
    saved_at = time.monotonic()

    def save(sampler: 'Sampler | None') -> None:
        if state_file is not None:
            state = None if sampler is None else sampler.state_dict()
            write_state({'about': about, 'finished': finished, 'present': state}, state_file)

    for create in samplers[len(finished) :]:
        sampler = create()
        if present is not None:
            sampler.load_state_dict(present)
            present = None

        def after_token(sampler: 'Sampler' = sampler) -> bool:
            nonlocal saved_at
            if time.monotonic() - saved_at > save_every_s:
                save(sampler)
                saved_at = time.monotonic()
            return should_stop()

        sampler.run(progress=progress, after_token=after_token)
        if not sampler.is_done:
            save(sampler)
            return None
        finished.append(sampler.tokens.cpu())
        save(None)
    return finished


def _read_run(state_file: str | Path | None, about: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Any] | None]:
    # What is finished, and the state of the sampler that was stopped.
    if state_file is None or not Path(state_file).exists():
        return [], None
    data = read_state(state_file, ('about', 'finished', 'present'))
    for name in sorted(about.keys() | data['about'].keys()):
        expected, found = about.get(name), data['about'].get(name)
        if found != expected:
            raise ValueError(f'expected the state of a run with {name} {expected} in {state_file}, got {found}')
    return data['finished'], data['present']


def write_state(data: dict[str, Any], path: str | Path) -> None:
    """Write a state of sampling to a file, whole or not at all."""
    path = Path(path)
    part = path.with_name(f'{path.name}.{uuid4().hex}.part')
    try:
        torch.save(data, part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_state(path: str | Path, keys: Sequence[str]) -> dict[str, Any]:
    """Read what `write_state` wrote.

    Raises:
        ValueError: the file cannot be read, or lacks one of the keys.
    """
    try:
        data = load_torch_file(path)
    except Exception as error:
        raise ValueError(f'expected the state of sampling in {path}, got a file that cannot be read') from error
    missing = sorted(set(keys) - set(data if isinstance(data, dict) else ()))
    if missing:
        raise ValueError(f'expected the state of sampling in {path}, got a file without {", ".join(missing)}')
    return data
