"""One comparison of each operator's kernels with its torch form per device; kernels that disagree are not used.

The result is stored in Triton's cache, in a file for each source of the kernels, version of torch and Triton, and kind
of device. A process decides once per operator and input types, so a forward and its backward run in the same form.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from aft_vision.errors import first_line
from aft_vision.ops.common import launch
from aft_vision.ops.common.capture import is_capturing
from aft_vision.ops.common.errors import AcceleratorError
from aft_vision.ops.common.locks import locked
from aft_vision.ops.common.tuner import Tuner
from aft_vision.ops.declaration import Form, Operation, Shape

_logger = logging.getLogger(__name__)

# Largest error of the result and of gradients, relative to the norm.
BOUNDS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (2e-2, 2e-2), torch.float16: (4e-3, 4e-3)}
# Those of float32 where torch may round the operands of products to TF32.
TF32_BOUNDS = 1e-3, 1e-3
# A spread of keys and biases that underflows in float32 but not in float64, and the error bound for it.
WIDE, WIDE_BOUND = 30.0, 1e-4
# A process may end during a comparison; after this many unfinished ones, the comparison counts as failed.
ATTEMPTS = 2
UNFINISHED = f'{ATTEMPTS} comparisons with the torch form ended their processes'
UNVERIFIED = 'it was first used while a graph was captured or traced; call it once before, or run aft-vision verify-gpu'

# Other errors of a lack of memory: of Triton, which loads kernels past torch's allocator, and of cuBLAS.
OUT_OF_MEMORY_MESSAGES = ('out of memory', 'ALLOC_FAILED')
# The result, and the gradients of q, k, v and the biases, of which AFT-axial has two.
PARTS = ('y', 'dq', 'dk', 'dv', 'dbias', 'dbias of columns')

# The types of q, k, v and the biases, None for a missing q; one type if all are equal. Each combination is compiled
# separately.
Types = tuple[torch.dtype | None, ...]
# The failure for each compared operator and types, None if there is none, or {'attempts': n}.
Results = dict[str, Any]

# The reason why kernels are not used, or None, for each operator, types and device.
_decisions: dict[tuple[str, Types, torch.device], str | None] = {}

# Several tiles of tokens and of channels; as in models, 16 divides D but not T.
SMALL = Shape(B=2, grid=(7, 10), D=48, channels=1, window=17)


def check(operation: Operation, inputs: Sequence[Any]) -> None:
    """Raise a RuntimeError if the kernels of an operator fail or disagree with its torch form for these inputs."""
    reason = failure(operation, inputs)
    if reason not in (None, UNVERIFIED):
        raise RuntimeError(
            f"backend='triton' needs kernels that agree with the torch form on {inputs[2].device}, and those of "
            f"{operation.name} in {_spell(find_types(inputs))} do not: {reason}; backend='auto' does without them"
        )


def failure(operation: Operation, inputs: Sequence[Any]) -> str | None:
    """Return why the kernels of an operation are not used for these inputs, in one line; None if they are.

    On a kind of device without a record, the first call compares them, and other processes wait. During a capture or
    trace nothing is compared: without a record, this process uses the torch form.
    """
    types, device = find_types(inputs), inputs[2].device
    key = operation.name, types, device
    with launch._lock:
        if key not in _decisions:
            if not is_needed(device):
                _decisions[key] = None
                return None
            reason = _decisions[key] = _decide(operation, types, device)
            if reason is not None:
                _logger.warning(
                    'the Triton kernels of %s are not used for %s on %s, so AFT runs there in the slower torch forms: '
                    '%s (record: %s)',
                    *(operation.name, _spell(types), device, reason, record_path(device)),
                )
        return _decisions[key]


def find_types(inputs: Sequence[Any]) -> Types:
    """Return the floating-point types of the inputs of an operator (q, k, v, ...)."""
    found = [None if x is None else x.dtype for x in inputs[:3]]
    found += [x.dtype for x in inputs[3:] if isinstance(x, Tensor) and x.is_floating_point()]
    return (found[0],) if len(set(found)) == 1 else tuple(found)


def _spell(types: Types) -> str:
    return ', '.join(map(str, types))


def is_needed(device: torch.device) -> bool:
    """Return whether kernels are compared before they are used: not in the interpreter, which is for tests."""
    return device.type == 'cuda'


def _decide(operation: Operation, types: Types, device: torch.device) -> str | None:
    entry = _entry(operation, types)
    found = read_record(device)
    if _is_finished(found, entry):
        return found[entry]
    if torch.jit.is_tracing() or torch.compiler.is_compiling() or is_capturing(device):
        return UNVERIFIED
    try:
        with _locked(device) as acquired:
            if not acquired:
                return find_failure(operation, types, device)
            found = read_record(device)
            if _is_finished(found, entry):
                return found[entry]
            # No other process compares now: a recorded attempt has ended with its process.
            return UNFINISHED if _attempts(found, entry) >= ATTEMPTS else _verify(operation, types, device)
    except torch.OutOfMemoryError as error:
        # Other processes may hold the memory: this process uses the torch form, and the next one compares again.
        return first_line(error)
    except OSError as error:
        # Without a writable folder, each process compares them.
        _logger.info('cannot keep that the Triton kernels were verified: %s', error)
        return find_failure(operation, types, device)


def _is_finished(results: Results, entry: str) -> bool:
    return entry in results and not _attempts(results, entry)


def _attempts(results: Results, entry: str) -> int:
    found = results.get(entry)
    return found['attempts'] if isinstance(found, dict) else 0


def verify(operation: Operation, types: Types, device: torch.device, *shapes: Shape) -> str | None:
    """Compare the kernels of an operator with its torch form; record and return the failure or None.

    Others may use the record meanwhile, and several processes may compare different operators.

    Args:
        types: types of q, k, v and the bias, or one for all.
        shapes: SMALL and those of its form by default.

    Raises:
        OSError: the record cannot be written.
    """
    return _verify(operation, types, device, *shapes, lock=_locked)


def _verify(
    operation: Operation,
    types: Types,
    device: torch.device,
    *shapes: Shape,
    lock: Callable[..., Any] = contextlib.nullcontext,
) -> str | None:
    entry = _entry(operation, types)
    with lock(device):
        before = read_record(device)
        # A fault of the device may end the process.
        _write_record(device, before | {entry: {'attempts': _attempts(before, entry) + 1}})
    found = {entry: before[entry]} if entry in before else {}
    try:
        found = {entry: find_failure(operation, types, device, *shapes)}
        return found[entry]
    except AcceleratorError as error:
        found = {entry: first_line(error)}
        raise
    finally:
        with lock(device):
            others = {key: value for key, value in read_record(device).items() if key != entry}
            _write_record(device, others | found)


def record_failure(operation: Operation, types: Types, device: torch.device, reason: str) -> None:
    """Record that the kernels of an operator failed a further check, so that they are not used.

    Raises:
        OSError: the record cannot be written.
    """
    with _locked(device):
        _write_record(device, read_record(device) | {_entry(operation, types): reason})


def find_failure(
    operation: Operation, types: Types, device: torch.device, *shapes: Shape, choices: int | None = None
) -> str | None:
    """Return how the kernels of an operator fail or disagree with its torch form in float64, in one line, or None.

    Every size of tiles of the operator's tuners is compared, on normal inputs and on inputs that underflow.

    Args:
        types, shapes: as of `verify`.
        choices: how many sizes of tiles at most; None is all.

    Raises:
        OutOfMemoryError: the device has not enough free memory, which says nothing about the kernels.
        AcceleratorError: a kernel has made the device unusable for this process, such as by an illegal access.
    """
    try:
        with _any_algorithm():
            _compare(operation, types, device, shapes or (SMALL, *triton_form(operation).shapes), choices)
    except torch.OutOfMemoryError:
        raise
    # Compilers, drivers and kernels raise errors of any kind.
    except Exception as error:
        if any(words in str(error) for words in OUT_OF_MEMORY_MESSAGES):
            raise torch.OutOfMemoryError(first_line(error)) from error
        if is_lost(device):
            raise AcceleratorError(first_line(error)) from error
        return first_line(error)
    return None


def triton_form(operation: Operation) -> Form:
    """Return the form of an operation in Triton, which it must have."""
    found = operation.form('triton')
    assert found is not None
    return found


def _compare(
    operation: Operation, types: Types, device: torch.device, shapes: Sequence[Shape], choices: int | None
) -> None:
    kernels, reference = triton_form(operation), operation.forms[-1]
    for shape in shapes:
        for spread in (1.0, WIDE):
            inputs = draw_inputs(operation, shape, types, device, spread)
            wanted = _run(reference, inputs._make(map(_double, inputs)))
            for found in Tuner.run_each(functools.partial(_run, kernels, inputs), choices):
                _check(found, wanted, types, spread)


def _rounds_to_tf32() -> bool:
    matmul = torch.backends.cuda.matmul
    # torch before 2.9 has only the older switch, which later ones refuse to read if the newer was set.
    return matmul.fp32_precision == 'tf32' if hasattr(matmul, 'fp32_precision') else matmul.allow_tf32


@contextlib.contextmanager
def _any_algorithm() -> Iterator[None]:
    # What torch's deterministic mode refuses, such as cuBLAS without its variable, says nothing about the kernels.
    before, only_warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)


def is_lost(device: torch.device) -> bool:
    """Return whether this process can no longer use a device, as after an illegal access in a kernel."""
    if device.type == 'cuda':
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return True
    return False


def draw_inputs(operation: Operation, shape: Shape, types: Types, device: torch.device, spread: float = 1.0) -> Any:
    """Return the NamedTuple of the inputs of an operation: random, with a mask; `spread` scales keys and biases."""
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    q, k, v = (draw(shape.B, shape.tokens, n) for n in (shape.D, operation.key_channels(shape), shape.D))
    inputs = {'q': q, 'k': spread * k, 'v': v, 'mask': (torch.arange(shape.tokens) % 7 != 3).repeat(shape.B, 1)}
    inputs |= operation.draw(shape, lambda *sizes: spread * draw(*sizes)) | dict.fromkeys(
        operation.flags, spread == 1.0
    )
    remaining = itertools.cycle(types)
    return operation.inputs(**{name: _place(inputs[name], remaining, device) for name in operation.inputs._fields})


def _place(x: Any, types: Iterator[torch.dtype | None], device: torch.device) -> Any:
    if not isinstance(x, Tensor):
        return x
    if not x.is_floating_point():
        return x.to(device)
    dtype = next(types)
    return None if dtype is None else x.to(device, dtype)


def _double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _run(form: Form, inputs: Any) -> tuple[Tensor, ...]:
    # As PARTS.
    y, saved = form.forward(inputs, True)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).bfloat16().to(y)
    return y, *form.backward(grad, y, saved, inputs, True)


def _check(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], types: Types, spread: float) -> None:
    # If weights select one source, gradients of keys and biases are differences of terms as large as the gradients of
    # v.
    floor = 0.0 if spread == 1.0 else float(wanted[3].norm())
    bounds = BOUNDS | {torch.float32: TF32_BOUNDS} if _rounds_to_tf32() else BOUNDS
    for i, (name, x, expected) in enumerate(zip(PARTS, found, wanted, strict=False)):
        bound = max(bounds[dtype][min(i, 1)] for dtype in types if dtype is not None)
        bound = bound if spread == 1.0 else max(bound, WIDE_BOUND)
        norm = max(float(expected.norm()), floor if i else 0.0)
        error = float((x.double() - expected).norm())
        # Not `error > bound`, so that NaN fails too.
        if not error <= bound * norm:
            raise RuntimeError(f'{name} is off by {error:.1e} of {norm:.1e}, above {bound:.0e} of it')


def read_record(device: torch.device) -> Results:
    """Return the results of comparisons on this kind of device."""
    try:
        found = json.loads(record_path(device).read_text())
    except (OSError, ValueError):
        return {}
    return found['results'] if isinstance(found, dict) and isinstance(found.get('results'), dict) else {}


def record_path(device: torch.device) -> Path:
    """Return the path of the record for a kind of device, in Triton's cache."""
    # The products of some kernels are torch's.
    identity = '\n'.join((_source_digest(), torch.__version__, triton.__version__, device_name(device)))
    folder = Path(triton.knobs.cache.dir) / 'aft_vision'
    return folder / f'verified_{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json'


def device_name(device: torch.device) -> str:
    """Return the kind of a device."""
    return torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type


@functools.cache
def _source_digest() -> str:
    found = hashlib.sha256()
    folder = Path(__file__).parent.parent
    for path in sorted(folder.rglob('*.py')):
        found.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return found.hexdigest()


def _entry(operation: Operation, types: Types) -> str:
    return ' '.join([operation.name, *(str(dtype).removeprefix('torch.') for dtype in types)])


def _write_record(device: torch.device, results: Results) -> None:
    path = record_path(device)
    content = {'device': device_name(device), 'triton': triton.__version__, 'results': results}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile('w', dir=path.parent, suffix='.json', delete=False) as file:
        json.dump(content, file, indent=2)
    os.replace(file.name, path)


@contextlib.contextmanager
def _locked(device: torch.device) -> Iterator[bool]:
    # If processes start together, one compares and the others wait.
    path = record_path(device).with_suffix('.lock')
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path) as acquired:
        yield acquired
