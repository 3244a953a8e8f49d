"""Calls of the C++ kernels: the library, loaded at first use, and tensors as arguments.

If the library cannot be built, one line is logged and the torch forms run. Before it is used, `ops.trials` tries its
forms on this processor. A call gives its kernel one block of numbers and addresses, eight bytes each, in the order of a
struct in C++. The sizes of both are compared once for each function, before its first call; those of `STRUCTS` when the
library is loaded.
"""

import ctypes
import functools
import logging
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from aft_vision.errors import first_line
from aft_vision.ops.common.build import build_library
from aft_vision.ops.common.inputs import Inputs, empty_denominator, empty_output
from aft_vision.ops.common.numerics import UNDERFLOW
from aft_vision.ops.common.trial import in_child

_logger = logging.getLogger(__name__)

# Return value of the functions of `guard.h` for std::bad_alloc; that for every other exception is below it.
OUT_OF_MEMORY = -1000
# That of `guard.cpp`: what the kernels are given, in which order.
LAYOUT = 4
# What products multiply, as in `tile.h`.
SINGLE, PAIRS, TILES = range(3)
# Further structs of arguments, by their name in C++.
STRUCTS: dict[str, type[ctypes.Structure]] = {}
# Functions of the path of the library and its way to multiply bfloat16, which return why forms fail on this processor,
# by operation, form and kind of products: `ops.trials` has one, and knows the forms.
JUDGES: list[Callable[[Path, int], dict[tuple[str, str, int], str]]] = []
# What they returned for the library.
failures: dict[tuple[str, str, int], str] = {}
# The compiled steps, which are no form of an operation, as `failures` calls them.
DECODING = 'decoding', 'steps', SINGLE
# A device costs less than its name.
CPU = torch.device('cpu')
# One context for all calls without a profile.
_UNPROFILED = nullcontext()
# A denominator below this has lost digits.
MIN_DENOMINATOR = ctypes.c_float(UNDERFLOW[torch.float32])


class Kernels(ctypes.CDLL):
    """The compiled functions; a C++ exception becomes a MemoryError or a RuntimeError."""

    def __getitem__(self, name: Any) -> Any:
        function = super().__getitem__(name)
        function.errcheck = self._check
        return function

    def _check(self, result: Any, function: Any, arguments: Any) -> Any:
        if result > OUT_OF_MEMORY:
            return result
        reason = ctypes.CDLL.__getitem__(self, 'aft_reason')
        reason.restype = ctypes.c_char_p
        message = f'{function.__name__} failed: {reason().decode(errors="replace")}'
        raise MemoryError(message) if result == OUT_OF_MEMORY else RuntimeError(message)


@functools.cache
def library() -> Kernels | None:
    """Return the compiled kernels; if they cannot be built, log one line and return None."""
    if in_child():
        return _on_trial
    # Another thread waits for the result of the trials.
    with _lock:
        return _open_library()


def _open_library() -> Kernels | None:
    global _on_trial
    try:
        path = build_library(_instructions)
        try:
            _on_trial = _load(path)
        except OSError:
            # The cached library may be from a system with other libraries.
            path = build_library(_instructions, rebuild=True)
            _on_trial = _load(path)
        for judge in JUDGES:
            failures.update(judge(path, _on_trial.aft_operands()))
        return _on_trial
    except (OSError, RuntimeError) as error:
        _logger.warning(
            'the C++ kernels cannot be built, so AFT-full, AFT-conv, AFT-axial, AFT with one offset a channel, the '
            'causal operations and decoding use the slower torch forms: %s',
            first_line(error),
        )
        return None


# The kernels whose forms were tried last, or are at this moment, in a child process.
_on_trial: Kernels | None = None
_lock = threading.Lock()
# The set of `build.INSTRUCTIONS` within `use_instructions`.
_instructions: str | None = None


@contextmanager
def use_instructions(name: str) -> Iterator[None]:
    """Make a context with the kernels for a set of `build.INSTRUCTIONS`, not those that suit this processor."""
    global _instructions
    before, _instructions = _instructions, name
    _forget_library()
    try:
        yield
    finally:
        _instructions = before
        _forget_library()


def _forget_library() -> None:
    failures.clear()
    for function in (library, lanes, _fastest_operands):
        function.cache_clear()


def compiled() -> Kernels:
    """Return the compiled kernels, which must exist."""
    found = library()
    assert found is not None
    return found


def _load(path: Path) -> Kernels:
    found = Kernels(str(path))
    if found.aft_layout() != LAYOUT:
        raise RuntimeError(
            f'expected C++ kernels of layout {LAYOUT}, got {found.aft_layout()}: install the package again'
        )
    for name, structure in STRUCTS.items():
        _check_size(found, name, ctypes.sizeof(structure))
    return found


def operands(v: Tensor) -> int:
    """Return what the kernels multiply: SINGLE for float32, PAIRS of bfloat16 in vectors, or TILES of them."""
    if v.dtype is not torch.bfloat16:
        return SINGLE
    return _fastest_operands() if _narrow is None else _narrow


# The `operands` of bfloat16 within `multiply_bfloat16_as`.
_narrow: int | None = None


@contextmanager
def multiply_bfloat16_as(kind: int) -> Iterator[None]:
    """Make a context in which bfloat16 has these `operands`, whichever of them are the fastest on this processor."""
    global _narrow
    before, _narrow = _narrow, kind
    try:
        yield
    finally:
        _narrow = before


@functools.cache
def _fastest_operands() -> int:
    kind = native_operands()
    return SINGLE if any(each == kind for *_, each in failures) else kind


def native_operands() -> int:
    """Return what the kernels multiply the fastest on this processor where v is bfloat16, if it passes its trial."""
    return compiled().aft_operands()


@functools.cache
def lanes() -> int:
    """Return the number of floats of a vector."""
    return compiled().aft_lanes()


def whole_vectors(count: int) -> int:
    """Round up to whole vectors."""
    return -(-count // lanes()) * lanes()


def supports(inputs: Sequence[Any]) -> bool:
    """Return whether the kernels support these inputs: on a CPU, with sums in float32, where they have been built."""
    for x in inputs:
        if isinstance(x, Tensor) and not x.is_cpu:
            return False
    return inputs[2].dtype != torch.float64 and library() is not None


def pack(function: str, *fields: int) -> bytes:
    """Pack the struct of a function; every tensor whose address is among the fields must outlive the call."""
    return _layout(function, len(fields)).pack(*fields)


@functools.cache
def _layout(function: str, count: int) -> struct.Struct:
    _check_size(compiled(), function, 8 * count)
    return struct.Struct(f'{count}q')


def _check_size(kernels: Kernels, function: str, size: int) -> None:
    expected = getattr(kernels, f'{function}_size')()
    if size != expected:
        raise RuntimeError(f'{function} needs a struct of {expected} bytes, got {size}: its fields differ in C++')


def address(x: Tensor | None, keep_alive: list[Tensor]) -> int:
    """Return the address of a contiguous tensor, 0 without one; a copy is appended to `keep_alive`."""
    if x is None:
        return 0
    if not x.is_contiguous():
        x = x.contiguous()
        keep_alive.append(x)
    return x.data_ptr()


def floats(x: Tensor, keep_alive: list[Tensor]) -> int:
    """Return the address of a contiguous tensor in float32, as `address` does."""
    if x.dtype is not torch.float32:
        x = x.float()
        keep_alive.append(x)
    return address(x, keep_alive)


def stream(x: Tensor | None, keep_alive: list[Tensor]) -> tuple[int, int, int, bool]:
    """Return the fields of `Stream` for a tensor (B, T, D): address, strides, if it is bfloat16; zeros without one.

    It is read where it is if it is float32 or bfloat16 and its channels are neighbours, as in a part of a fused
    projection; else a copy is kept in `keep_alive`, for as long as the call.
    """
    if x is None:
        return 0, 0, 0, False
    batch, token, channel = x.stride()
    narrow = x.dtype is torch.bfloat16
    if channel != 1 or not (narrow or x.dtype is torch.float32):
        x = x.contiguous() if narrow else x.float().contiguous()
        keep_alive.append(x)
        batch, token, _ = x.stride()
    return x.data_ptr(), batch, token, narrow


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    """Return the address of a contiguous tensor, null for None."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """Return an array of integers."""
    return (ctypes.c_int64 * len(values))(*values)


def profiled(name: str) -> AbstractContextManager[object]:
    """Return a context that a profile shows by name."""
    return record_function(name) if torch.autograd._profiler_enabled() else _UNPROFILED


def run_forward(
    name: str, inputs: Inputs, fields: Sequence[int], keep_alive: list[Tensor], save: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Run the forward of a form that leaves denominators which lose digits to the torch form.

    Args:
        name: of the function, aft_NAME_forward, and in a profile.
        fields: of its struct in C++, which the streams of y and of the denominators follow.
        keep_alive: the tensors of `fields` that must outlive the call.

    Returns:
        y and, if they are saved, the denominators; None where one has lost digits.
    """
    out = empty_output(inputs.q, inputs.v)
    den = empty_denominator(inputs.k, inputs.v, save) if save else None
    y = narrow_output(out)
    fields = *fields, *stream(y, keep_alive), *stream(den, keep_alive)
    function = f'aft_{name}_forward'
    with profiled(f'aft_vision::{name}_forward'):
        good = getattr(compiled(), function)(pack(function, *fields), MIN_DENOMINATOR, torch.get_num_threads())
    return (out if y is out else out.copy_(y), den) if good else None


def run_backward(
    name: str,
    results: Sequence[Tensor | None],
    inputs: Inputs,
    fields: Sequence[int],
    keep_alive: list[Tensor],
    sums: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...] | None:
    """Run the backward of a form that leaves denominators which lose digits to the torch form.

    Args:
        name, fields, keep_alive: as of `run_forward`.
        results: grad, y and the denominators, or None where these are not saved.
        sums: buffers for gradients of the bias, None for those that nobody asks for.

    Returns:
        The gradients of q, k and v; None where a denominator has lost digits.
    """
    found = tuple(narrow_like(x) for x in (inputs.q, inputs.k, inputs.v))
    for x in (*results, *found):
        fields = *fields, *stream(x, keep_alive)
    fields = *fields, *(address(x, keep_alive) for x in sums)
    function = f'aft_{name}_backward'
    with profiled(f'aft_vision::{name}_backward'):
        good = getattr(compiled(), function)(pack(function, *fields), MIN_DENOMINATOR, torch.get_num_threads())
    return found if good else None


def cast(found: Sequence[Tensor | None], like: Sequence[Tensor | None], k: Tensor) -> tuple[Tensor, ...]:
    """Return gradients in the dtypes of their inputs, an empty tensor for a missing gradient."""
    pairs = zip(found, like, strict=True)
    return tuple(k.new_empty(0) if x is None or y is None else x.to(y.dtype) for x, y in pairs)


def float_buffer(shape: Sequence[int] | int) -> Tensor:
    """Return an uninitialised float32 tensor on the CPU, independent of torch's default type and device."""
    return torch.empty(shape, dtype=torch.float32, device=CPU)


def float_output(x: Tensor) -> Tensor:
    """Return a float32 buffer for a result that is copied to x, or x itself if it is float32."""
    return x if x.dtype == torch.float32 else float_buffer(x.shape)


def narrow_output(x: Tensor) -> Tensor:
    """Return a float32 buffer for a result that is copied to x, or x itself if it is float32 or bfloat16."""
    return x if x.dtype == torch.bfloat16 else float_output(x)


def narrow_like(x: Tensor | None) -> Tensor | None:
    """Return a contiguous buffer of the shape of x, in bfloat16 if x is and else in float32; None without one."""
    return None if x is None else narrow_output(x.new_empty(x.shape))
