"""Trials of the compiled forms on this processor, before the first call that uses them.

Each form runs once on small inputs in a child process, forward and backward, in each way to multiply that this
processor takes, and is compared with the torch form. One that ends the process, errs or is wrong is left out: one
warning names it, and calls go to the next form. The result is kept in the folder of compiled libraries, for this
processor. AFT_KERNEL_TRIALS=0 in the environment tries nothing.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_vision.ops.common import cpp
from aft_vision.ops.common.build import library_folder
from aft_vision.ops.common.choice import processor_key
from aft_vision.ops.common.trial import Failure, run_trials
from aft_vision.ops.declaration import OPERATIONS, Form, Operation, Shape
from aft_vision.ops.decode import step
from aft_vision.ops.decode.block import Block, Dense
from aft_vision.ops.decode.state import aft_local_state, aft_simple_state

_logger = logging.getLogger(__name__)

# Heads of several channels, and of one; whole blocks of rows and of columns, and rests.
SHAPES = (Shape(2, (3, 11), 72, 12, 5), Shape(2, (3, 11), 72, 1, 5))
# Relative to the norm; a wrong result is far from the right one.
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
KIND_NAMES = {cpp.SINGLE: 'single', cpp.PAIRS: 'pairs', cpp.TILES: 'tiles'}


def judge(path: Path, native: int) -> dict[tuple[str, str, int], str]:
    """Return why forms of a library fail on this processor, by operation, form and kind of products.

    What an earlier process found for the same file, torch and kinds is read, and nothing is tried where no process can
    be started. A failure for lack of memory or time holds for this process alone.

    Args:
        path: of the library.
        native: how it multiplies bfloat16 on this processor.
    """
    if os.environ.get('AFT_KERNEL_TRIALS') == '0':
        return {}
    record, kinds = _record_path(path), {cpp.SINGLE, native}
    key = {'library': _hash(path), 'torch': torch.__version__, 'kinds': sorted(KIND_NAMES[kind] for kind in kinds)}
    reasons = None if record is None else _read(record, key)
    if reasons is None:
        try:
            failures = try_forms(kinds)
        except OSError as error:
            _logger.info('the compiled kernels could not be tried on this processor: %s', error)
            return {}
        reasons = {name: failure.reason for name, failure in failures.items()}
        if record is not None and all(failure.lasts for failure in failures.values()):
            _write(record, key | {'failures': reasons})
    if reasons:
        _logger.warning(
            'on this processor compiled kernels failed a first trial, and other forms run in their place: %s; '
            'please report it (to try again, delete %s)',
            '; '.join(f'{name}: {reason}' for name, reason in reasons.items()),
            record,
        )
    places = {_describe(*place): place for place in _places(KIND_NAMES)}
    return {places[name]: reason for name, reason in reasons.items() if name in places}


def try_forms(kinds: Iterable[int]) -> dict[str, Failure]:
    """Try every compiled form with these kinds of products; return why some fail, by their names.

    Raises:
        OSError: no process can be started, or the torch forms fail in one too, so that it tells nothing.
    """
    operations = {x.name: x for x in _own_operations()}
    full = operations['aft_full']
    control = run_trials({'torch': partial(_run, full, full.forms[-1], torch.float32, SHAPES[0], False)})
    if control:
        raise OSError(f'expected torch to run in a child process, got {control["torch"].reason}')
    trials: dict[str, Callable[[], object]] = {}
    for name, form, kind in _places(kinds):
        call = _try_decoding if name == cpp.DECODING[0] else partial(_try_form, operations[name], form, kind)
        trials[_describe(name, form, kind)] = call
    return run_trials(trials)


def _own_operations() -> list[Operation]:
    # Not those of other packages: what their forms need may take long.
    return [x for x in OPERATIONS.values() if x.inputs.__module__.split('.')[0] == __name__.split('.')[0]]


def _places(kinds: Iterable[int]) -> list[tuple[str, str, int]]:
    # Operation, form and kind of products.
    forms = [(x.name, form.name) for x in _own_operations() for form in x.forms if form.backend == 'cpp']
    return [(*place, kind) for place in forms for kind in sorted(kinds)] + [cpp.DECODING]


def _describe(name: str, form: str, kind: int) -> str:
    return f'{name} {form} {KIND_NAMES[kind]}'


def _record_path(library: Path) -> Path | None:
    # Not beside a library of a wheel, whose folder may be of another user; None without a home folder.
    try:
        return library_folder() / f'{library.stem}_{processor_key()}.json'
    except RuntimeError:
        return None


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _read(record: Path, key: dict[str, Any]) -> dict[str, str] | None:
    # None for a record that is missing, cut off, of something else or anything else.
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(record.read_text())
        failures = found.get('failures') if isinstance(found, dict) else None
        if isinstance(failures, dict) and found == key | {'failures': failures}:
            return failures if all(isinstance(x, str) for x in failures.values()) else None
    return None


def _write(record: Path, content: dict[str, Any]) -> None:
    # A folder that cannot be written: the next process tries again.
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        part = record.with_suffix(f'.{os.getpid()}')
        part.write_text(json.dumps(content, indent=1))
        os.replace(part, record)


def _try_form(operation: Operation, name: str, kind: int) -> None:
    form = next(x for x in operation.forms if x.name == name)
    for shape in SHAPES:
        for masked in (False, True):
            expected = _run(operation, operation.forms[-1], torch.float32, shape, masked)
            for dtype in (torch.float32, torch.bfloat16) if kind == cpp.SINGLE else (torch.bfloat16,):
                with cpp.multiply_bfloat16_as(kind):
                    found = _run(operation, form, dtype, shape, masked)
                if found is not None:
                    _compare(found, expected, BOUNDS[dtype])


def _run(operation: Operation, form: Form, dtype: torch.dtype, shape: Shape, masked: bool) -> list[Tensor] | None:
    # y without and with what the backward needs, and the gradients; None where the form does not compute such inputs.
    draws = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        # As bfloat16 has it in both types.
        x = torch.empty(sizes, dtype=torch.float32, device='cpu').normal_(generator=draws)
        return x.to(torch.bfloat16).to(dtype)

    B, T, D = shape.B, shape.tokens, shape.D
    q, k, v, grad = draw(B, T, D), draw(B, T, operation.key_channels(shape)), draw(B, T, D), draw(B, T, D)
    others = operation.draw(shape, draw) | dict.fromkeys(operation.flags, True)
    mask = torch.arange(T) % 5 != torch.arange(1, B + 1)[:, None] if masked else None
    inputs = operation.inputs(q=q, k=k, v=v, **others, mask=mask)
    if not (form.supports(inputs) or form.is_candidate(inputs)):
        return None
    weights = None
    if operation.weights is not None and form.takes_weights:
        weights = operation.weights.make(getattr(inputs, operation.biases[0]), v)
    y, saved = form.run_forward(inputs, True)
    saved = k.new_empty(0) if saved is None else saved
    without = form.run_forward(inputs, False, weights)[0]
    return [y, without, *form.run_backward(grad, y, saved, inputs, bool(operation.biases))]


def _try_decoding() -> None:
    batch, channels, window, tokens = 2, 40, 5, 9
    q, k, v = _draw(1, 3, tokens, batch, channels)
    results: dict[str, list[Tensor]] = {'auto': [], 'eager': []}
    for backend, found in results.items():
        state, sums = aft_local_state(batch, channels, window), aft_simple_state(batch, channels)
        for t in range(tokens):
            found.append(step.aft_local_step(q[t], k[t], v[t], q[t, 0, :window], state, backend)[0])
            found.append(step.aft_simple_step(q[t], k[t], v[t], sums, backend)[0])
    _compare(results['auto'], results['eager'], BOUNDS[torch.float32])
    _try_block(q[0], batch, channels)


def _try_block(x: Tensor, batch: int, channels: int) -> None:
    # The compiled layers, whose mixer gives its values: the first token has no other.
    def layer(inputs: int, outputs: int, gelu: bool = False) -> Dense:
        weight, bias = _draw(2, outputs, inputs) / inputs**0.5, _draw(3, outputs)
        return Dense(weight, bias, _draw(4, inputs), _draw(5, inputs), 1e-6, gelu)

    def apply(layer: Dense, x: Tensor) -> Tensor:
        y = F.linear(F.layer_norm(x, x.shape[1:], layer.norm_weight, layer.norm_bias, layer.eps), *layer[:2])
        return F.gelu(y) if layer.gelu else y

    layers = layer(channels, 2 * channels), None, layer(channels, 90, gelu=True), layer(90, channels)
    block = Block(*layers, gated=False, state=aft_simple_state(batch, channels), factors=None, mix=lambda y: y)
    run = step.compile_decoder([block], layers[0], batch)
    if run is None:
        return
    mixed = x + apply(layers[0], x)[:, channels:]
    _compare([run(x.clone())], [apply(layers[0], mixed + apply(layers[3], apply(layers[2], mixed)))], 1e-3)


def _draw(seed: int, *sizes: int) -> Tensor:
    x = torch.empty(sizes, dtype=torch.float32, device='cpu')
    return x.normal_(generator=torch.Generator().manual_seed(seed))


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor] | None, bound: float) -> None:
    assert expected is not None
    for x, y in zip(found, expected, strict=True):
        error = (x.double() - y.double()).norm() / y.double().norm()
        if not error <= bound:
            raise RuntimeError(f'expected the result of the torch form, got one that is {float(error):.2g} off')


cpp.JUDGES.append(judge)
