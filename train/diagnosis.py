"""Diagnosis of a loss that is not finite."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from timm.data.loader import PrefetchLoader
from timm.data.naflex_loader import NaFlexPrefetchLoader

from aft_vision.data import Draw
from aft_vision.files import write_json
from train.objective import Batch
from train.state import TrainState


class NonFiniteLossError(FloatingPointError):
    """A loss that is not finite on some process; no weight has changed."""


def write_diagnosis(state: TrainState, loader: Any, loss: float, folder: Path) -> Path:
    """Run the forward pass of the next update again, and write a report of where it failed.

    Randomness is a function of the update, so the images and their random changes are the same.

    Args:
        loader: The training loader. A streamed data set cannot be read again, so only weights are reported.
        loss: The loss that was not finite.

    Returns:
        The JSON file: `images`, `windows` or `sequences` (indices into the data set), the first `layer` with an output
        that is not finite ('' for the images), and `weights` that are not finite.
    """
    reached = state.progress
    world = state.world
    diagnosis: dict[str, Any] = {
        'update': reached.updates + 1,
        'epoch': reached.epoch + 1,
        'rank': world.rank,
        'loss': str(loss),
    }
    trained = dict(state.model.named_parameters())
    for module, values in state.task.get_task_state().items():
        trained |= {f'{module}.{name}': x for name, x in values.items()}
    diagnosis['weights'] = [name for name, x in trained.items() if not x.isfinite().all()]
    if hasattr(getattr(loader, 'sampler', None), 'draws'):
        draws = loader.sampler.draws(reached.updates_of_epoch)
        diagnosis[state.objective.unit] = [draw.image for draw in draws]
        diagnosis['layer'] = _first_layer(state, _micro_batches(loader, draws, state.loop.accumulate))
    path = folder / f'nonfinite-{reached.updates + 1}-rank{world.rank}.json'
    write_json(path, diagnosis)
    return path


def _micro_batches(loader: Any, draws: Sequence[Draw], count: int) -> Iterator[Batch]:
    """Build the micro-batches of a batch of these samples, as the loader does."""
    prefetches = isinstance(loader, PrefetchLoader | NaFlexPrefetchLoader)
    plain, size = loader.loader if prefetches else loader, len(draws) // count
    batches = (plain.collate_fn(_samples(plain.dataset, draws[i * size : (i + 1) * size])) for i in range(count))
    if not prefetches:
        return batches
    again = copy.copy(loader)
    again.loader = batches
    return iter(again)


def _samples(dataset: Any, draws: Sequence[Draw]) -> list[Any]:
    # Only a batch that is read as a whole is mixed.
    return dataset.__getitems__(draws) if hasattr(dataset, '__getitems__') else [dataset[draw] for draw in draws]


@torch.no_grad()
def _first_layer(state: TrainState, micro_batches: Iterable[Batch]) -> str | None:
    """Return the first layer that fails in the micro-batches of an update."""
    layers: list[str] = []

    def note(name: str, output: Any) -> None:
        if not layers and isinstance(output, torch.Tensor) and not output.isfinite().all():
            layers.append(name)

    hooks = [
        module.register_forward_hook(lambda m, args, y, name=name: note(name, y))
        for name, module in state.model.named_modules()
    ]
    try:
        for index, batch in enumerate(micro_batches):
            x, _ = state.prepare_micro_batch(index, batch)
            note('', x['patches'] if isinstance(x, dict) else x)
            with state.autocast():
                state.model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return layers[0] if layers else None
