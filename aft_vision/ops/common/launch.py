"""Support and launch of the Triton kernels; imports Triton only when a kernel runs.

Triton is optional. Its kernels take tensors of one CUDA device, or, for tests and debugging, CPU tensors in Triton's
interpreter under TRITON_INTERPRET=1, which must be set before the first of them runs.
"""

import functools
import importlib.util
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, overload

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils.weak import WeakIdKeyDictionary

from aft_vision.errors import first_line
from aft_vision.ops.common.capture import is_capturing
from aft_vision.ops.common.numerics import UNDERFLOW, without_autocast

_logger = logging.getLogger(__name__)

# Sums are float32 in all of them.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A denominator below this has lost precision by underflow, as in the torch forms.
LIMIT = UNDERFLOW[torch.float32]
# The oldest Triton that compiles the kernels.
OLDEST_TRITON = (3, 6)
# The oldest GPUs that Triton supports.
CAPABILITY = (8, 0)
# The largest size of the grid dimension of the sequences.
SEQUENCES = 65535
# Below every key, but finite, so that no difference of references is NaN.
MIN_FLOAT32 = torch.finfo(torch.float32).min
# Matrices have sides of a multiple of this: rows of 16 bytes in half types.
ALIGNED = 8
# The longest sequences of kernels that take whole ones; and in the interpreter.
WHOLE, WHOLE_INTERPRETED = 256, 16
# The largest of the pieces of a sequence; and in the interpreter.
PIECE, PIECE_INTERPRETED = 128, 16
# The fewest sources and targets of a product.
SOURCES, TARGETS = 16, 8
# Offsets in a sequence and in a bias are 32-bit integers; half of their range, because tiles extend beyond the end.
ELEMENTS = 1 << 30

# By a bias that is constant: the version of its elements, the type of products, and the weights after the second call.
_weights = WeakIdKeyDictionary()

# Held while kernels are launched: a tuner and the interpreter store the state of one launch.
_lock = threading.RLock()
# The reason why Triton does not run on a device, or None, for each device that was tried.
_failures: dict[torch.device, str | None] = {}
# Devices whose failure was logged.
_logged: set[torch.device] = set()


def can_run(inputs: Sequence[Any]) -> bool:
    """Return whether the kernels support these inputs of an operator (q, k, v, ...) and run on their device.

    All tensors must be on one device where Triton runs, in its floating-point types, not empty, and small enough for
    the kernels' offsets and grids; larger ones give one warning.
    """
    return _supports(inputs) and failure(_device(inputs)) is None


def check(inputs: Sequence[Any]) -> None:
    """Raise a RuntimeError if the kernels support these inputs but Triton fails to compile."""
    device = _device(inputs)
    reason = failure(device) if _supports(inputs) else None
    if reason is not None:
        raise RuntimeError(
            f"backend='triton' needs Triton to compile for {device}, which fails: {reason}; "
            "backend='auto' works without it"
        )


def _supports(inputs: Sequence[Any]) -> bool:
    tensors, device = [x for x in inputs if isinstance(x, Tensor)], _device(inputs)
    return (
        supports(device)
        and all(x.device == device and x.numel() > 0 for x in tensors)
        and all(x.dtype in DTYPES for x in tensors if x.is_floating_point())
        and _fits(inputs)
    )


def _device(inputs: Sequence[Any]) -> torch.device:
    return next(x.device for x in inputs if isinstance(x, Tensor))


def failure(device: torch.device) -> str | None:
    """Return why Triton cannot compile for and run on a CUDA device, in one line, or None if it can.

    A kernel is tried once per device, and its first failure is logged. While a CUDA graph is captured it is only
    compiled. It is tried after the capture, even if it failed, because the capture may have been the cause.
    """
    with _lock:
        if device.type != 'cuda' or device in _failures:
            return _failures.get(device)
        capturing = is_capturing(device)
        reason = None
        try:
            _check_version()
            (_compile_kernel if capturing else _try_kernel)(device)
        # Parts of Triton raise different errors without a C compiler, ptxas or a matching driver.
        except Exception as error:
            reason = first_line(error)
        if not capturing:
            _failures[device] = reason
        if reason is not None and device not in _logged:
            _logged.add(device)
            _logger.warning(
                'Triton cannot compile for %s, so AFT runs there in the slower torch forms: %s', device, reason
            )
        return reason


def _check_version() -> None:
    if not _is_new():
        oldest = '.'.join(map(str, OLDEST_TRITON))
        raise RuntimeError(f'expected Triton {oldest} or newer, got {triton_version()}; a newer torch installs it')


def _is_new() -> bool:
    return tuple(int(x) for x in triton_version().split('.')[:2]) >= OLDEST_TRITON


def triton_version() -> str:
    """Return the version of the installed Triton."""
    import triton

    return triton.__version__


def _compile_kernel(device: torch.device) -> None:
    from aft_vision.ops.common.trial_kernel import trial_kernel

    with torch.cuda.device(device):
        trial_kernel.warmup(torch.float32, grid=(1,))


def _try_kernel(device: torch.device) -> None:
    from aft_vision.ops.common.trial_kernel import trial_kernel

    with torch.cuda.device(device):
        found = torch.zeros(1, dtype=torch.float32, device=device)
        trial_kernel[(1,)](found)
        if found.item() != 1.0:
            raise RuntimeError(f'expected a first kernel to write 1, got {found.item()}')


def interprets() -> bool:
    """Return whether kernels used for the first time now run in Triton's interpreter.

    The variable is read each time, because tests change it.
    """
    return os.environ.get('TRITON_INTERPRET') == '1'


def supports(device: torch.device) -> bool:
    """Return whether Triton supports a device: CUDA, or a CPU in its interpreter."""
    if device.type == 'cpu':
        return interprets() and _has_triton() and _is_new()
    return device.type == 'cuda' and _has_triton() and torch.cuda.get_device_capability(device) >= CAPABILITY


def _fits(inputs: Sequence[Any]) -> bool:
    sequences = [_reach(x, 1) for x in inputs[:3] if x is not None]
    biases = [_reach(x, 0) for x in inputs[3:] if isinstance(x, Tensor) and x.is_floating_point()]
    fits = inputs[1].shape[0] <= SEQUENCES and max(sequences + biases) < ELEMENTS
    if not fits:
        _warn_too_large()
    return fits


def _reach(x: Tensor, first: int) -> int:
    # The range of memory from the first element to the last, over the dimensions from `first` on.
    return sum((length - 1) * stride for length, stride in zip(x.shape[first:], x.stride()[first:], strict=True))


@functools.cache
def _warn_too_large() -> None:
    warnings.warn(
        f'the Triton kernels take at most {SEQUENCES} sequences, each and its bias of at most {ELEMENTS} elements; '
        'using another form for more',
        stacklevel=2,
    )


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec('triton') is not None


def tuned(
    key: list[str], interpreted: dict[str, int], *configs: tuple[dict[str, int], int] | tuple[dict[str, int], int, int]
) -> Callable[[Any], Any]:
    """Return a decorator for `triton.jit` that measures and caches the fastest configuration for each key.

    Lengths up to the same power of two share a choice, separately for each kind of device. Triton also caches it on
    disk. While a CUDA graph is captured nothing can be measured: the first configuration is chosen.

    Args:
        key: arguments of the kernel that do not change with every batch.
        interpreted: the constants in the interpreter: tiles so small that small tests have several.
        configs: constants, number of warps and, if not 3, of the stages of a loop's loads, the best guess first.
    """
    import triton

    from aft_vision.ops.common.tuner import Tuner

    if interprets():
        configs = ((interpreted, 1),)
    candidates = [triton.Config(*config) for config in configs]
    return lambda kernel: Tuner(kernel, candidates, key)


@contextmanager
def launching(name: str, x: Tensor) -> Iterator[None]:
    """Run kernels on the device of x, one thread at a time; profiles show them as aft_vision::name."""
    device = torch.cuda.device(x.device) if x.is_cuda else nullcontext()
    with record_function(f'aft_vision::{name}'), device, _lock:
        yield


def product_type(v: Tensor) -> torch.dtype:
    """Return the type of the operands of `tl.dot`: bfloat16 for bfloat16, else float32.

    The interpreter does not support bfloat16.
    """
    return torch.bfloat16 if v.dtype == torch.bfloat16 and not interprets() else torch.float32


def products(product: torch.dtype) -> dict[str, Any]:
    """Return the constants PRODUCT, the type of the operands of `tl.dot`, and PRECISION, its input_precision."""
    import triton.language as tl

    return {'PRODUCT': tl.bfloat16 if product == torch.bfloat16 else tl.float32, 'PRECISION': precision()}


def precision() -> str:
    """Return the input_precision of `tl.dot` for float32: three TF32 products on tensor cores that support it."""
    return 'ieee' if interprets() or torch.version.hip is not None else 'tf32x3'


def pad(length: int) -> int:
    """Return the next length that tensor cores take in a product."""
    return -(-length // ALIGNED) * ALIGNED


def whole_length(tokens: int, product: torch.dtype) -> int:
    """Return the power of two to which a kernel of whole sequences pads them, or 0 if it does not take them.

    It takes short ones with bfloat16 products: with float32 they do not fit the shared memory of every GPU.
    """
    least, most = (8, WHOLE_INTERPRETED) if interprets() else (64, WHOLE)
    fits = tokens <= most and (product == torch.bfloat16 or interprets())
    return max(least, 1 << (tokens - 1).bit_length()) if fits else 0


def keeps_weights() -> bool:
    """Return whether programs of the current GPU can keep the weights of a whole sequence in shared memory.

    GPUs of data centers have enough from compute capability 9.0 on, and multiply from it.
    """
    from triton.runtime import driver

    target = None if interprets() else driver.active.get_current_target()
    return target is None or (target.backend == 'cuda' and target.arch // 10 in (9, 10))


def known_weights(bias: Tensor, sizes: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor | None:
    """Return the weights of a bias that takes part in a second call at least, unchanged, else None.

    A bias with gradients changes with every step, and a captured graph must read the bias of its replay.

    Args:
        sizes: what the weights depend on besides the bias.
        make: computes them, once.
    """
    if bias.requires_grad or bias.is_inference() or is_capturing():
        # A fused optimizer writes without a new version.
        _weights.pop(bias, None)
        return None
    key = bias.data_ptr(), bias._version, sizes
    known, weights = _weights.get(bias, (None, None))
    if known == key and weights is None:
        weights = make()
    _weights[bias] = key, weights if known == key else None
    return _weights[bias][1]


def pieces(tokens: int, least: int) -> tuple[int, ...]:
    """Return powers of two, at most three, largest first, whose sum is that of the tokens or little more.

    Args:
        least: the smallest of them.
    """
    left, most = -(-tokens // least) * least, PIECE_INTERPRETED if interprets() else PIECE
    found: list[int] = []
    while left > 0:
        # The third is the last, up to 3 * PIECE tokens.
        up = len(found) > 1 and left <= most
        found.append(min(most, 1 << ((left - 1).bit_length() if up else left.bit_length() - 1)))
        left -= found[-1]
    return tuple(found)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; a CPU stands for a small one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == 'cuda' else 1


def programs(tiles: int, limit: int) -> int:
    """Return a number of programs up to a limit that share the tiles evenly."""
    return -(-tiles // -(-tiles // limit))


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return the products in float32 of matrices (n, i, j) and (n, j, k), summed in it.

    Those of float32 are as exact as torch.set_float32_matmul_precision has it.
    """
    with without_autocast(a.device.type):
        if a.is_cuda and a.dtype != torch.float32:
            return torch.bmm(a, b, out_dtype=torch.float32)
        return torch.bmm(a.float(), b.float())


@overload
def rows(x: Tensor) -> Tensor: ...
@overload
def rows(x: None) -> None: ...
def rows(x: Tensor | None) -> Tensor | None:
    """Return the tensor, copied only if its channels are not contiguous: slices of a fused projection are not."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def strides(*tensors: Tensor | None) -> tuple[int, ...]:
    """Return the strides of each (B, T, D) tensor over sequences and over tokens, in elements."""
    return tuple(0 if x is None else x.stride(dim) for x in tensors for dim in (0, 1))


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """Return the (B, T) mask as contiguous bytes."""
    return None if mask is None else mask.contiguous().view(torch.uint8)


def like(x: Tensor) -> Tensor:
    """Return an uninitialised contiguous buffer for the gradient of x, in its data type."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
