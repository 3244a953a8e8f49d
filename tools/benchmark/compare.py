"""Alternatives side by side: time, peak memory and what is kept for the backward, eager and compiled."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.benchmark.memory import saved_memory
from tools.benchmark.times import Call, Wrap, describe_error, time_compiled, time_what_runs
from tools.machine import autocast

DIRECTIONS = ('forward', 'training')
# Attention that forms its (h, T, T) weights, as every attention did when the AFT paper was written.
PAPER_BASELINE = "the paper's baseline"
# Matrices of the size of its weights that a layer holds: before and after the softmax, and of the mask or a gradient.
MATERIALISED_MATRICES = 3


class Prepared(NamedTuple):
    """A forward pass, and the tensors that get gradients in its backward.

    Args:
        given: Inputs and constants, which are there whatever is kept for the backward.
    """

    forward: Callable[[], Tensor]
    leaves: Sequence[Tensor] = ()
    given: Sequence[Tensor] = ()


class Candidate(NamedTuple):
    """One of the alternatives.

    Args:
        prepare: Makes its forward pass, for training or not.
        compiles: Whether a compiled form makes sense; the compiler would make fused attention of a materialised one.
    """

    name: str
    prepare: Callable[[bool], Prepared]
    compiles: bool = True


@contextlib.contextmanager
def math_attention() -> Iterator[None]:
    """Within it, `F.scaled_dot_product_attention` forms its weights; half precision stays half."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def materialised(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The forward pass within `math_attention`."""

    def run() -> Tensor:
        with math_attention():
            return forward()

    return run


def too_large(batch: int, heads: int, tokens: int, layers: int, most_bytes: float) -> str | None:
    """Why materialised attention cannot be measured, or None where it can.

    Args:
        layers: That hold their weights at once: all in training, else one.
        most_bytes: What it may take.
    """
    needed = 4 * MATERIALISED_MATRICES * layers * batch * heads * tokens**2
    if needed <= most_bytes:
        return None
    return f'its weights alone take {needed / 2**30:.1f} GiB, the limit is {most_bytes / 2**30:.1f} GiB'


def with_backward(forward: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Call:
    """A call of the forward and of its backward, with the gradients of the leaves that it reaches."""
    grad = torch.ones_like(forward())
    return lambda: torch.autograd.grad(forward(), leaves, grad, allow_unused=True)


def compare(
    candidates: Sequence[Candidate],
    device: torch.device,
    rounds: int,
    *,
    dtype: str = 'float32',
    training: bool = True,
    compiled: bool = False,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Measure alternatives.

    Args:
        candidates: The first is compared to.
        dtype: Key of PRECISIONS; autocast is entered anew in every forward, so that it casts the weights as in use.
        training: Forward and backward too.
        compiled: Each under `torch.compile` too, where that makes sense.

    Returns:
        A row for each direction of DIRECTIONS and candidate: `direction`, `name`, `eager`, and `compiled`, None where
        that was not wanted, makes no sense or the eager form failed. Both are what `time_calls` gives, or `error` alone
        where the candidate failed, as for lack of memory: the others go on without it. `eager` in training has
        `saved_bytes`, which autograd keeps beside leaves and inputs, and `compiled` is what `time_compiled` gives.
    """
    rows = []
    baselines = dict.fromkeys((each.name for each in candidates), candidates[0].name)
    for direction in DIRECTIONS[: 1 + training]:
        learns = direction == 'training'
        with contextlib.nullcontext() if learns else torch.inference_mode():
            ready, eager = _prepare(candidates, learns, device, dtype)
            calls = {name: each.call for name, each in ready.items()}
            eager |= time_what_runs(calls, device, rounds, progress, baselines)
            for name in [name for name in ready if learns and 'error' not in eager[name]]:
                eager[name] = _with_saved(eager[name], ready[name])
            sensible = [each.name for each in candidates if each.compiles and 'error' not in eager[each.name]]
            makers = {name: ready[name].make for name in sensible}
            found = time_compiled(makers, device, rounds, progress, baselines) if compiled else {}
        for name in baselines:
            rows.append({'direction': direction, 'name': name, 'eager': eager[name], 'compiled': found.get(name)})
    return rows


def require_figures(rows: Sequence[dict[str, Any]]) -> None:
    """Raise a RuntimeError if one of the rows of `compare` has none in its eager form."""
    for row in rows:
        if 'error' in row['eager']:
            raise RuntimeError(f'{row["name"]} failed: {row["eager"]["error"]}')


class _Ready(NamedTuple):
    """A candidate that is ready to be measured.

    Args:
        make: Its call, with something around its forward.
        call: As it is.
        forward: In its precision.
        leave_out: What is there whatever is kept for the backward.
    """

    make: Callable[[Wrap], Call]
    call: Call
    forward: Callable[[], Tensor]
    leave_out: list[Tensor]


def _prepare(
    candidates: Sequence[Candidate], learns: bool, device: torch.device, dtype: str
) -> tuple[dict[str, _Ready], dict[str, dict[str, Any]]]:
    # Those that are ready, and `error` of the others.
    ready: dict[str, _Ready] = {}
    failed: dict[str, dict[str, Any]] = {}
    for each in candidates:
        try:
            prepared = each.prepare(learns)
            make = _maker(prepared, learns, device, dtype)
            forward, leave_out = _in_precision(prepared.forward, device, dtype), [*prepared.leaves, *prepared.given]
            ready[each.name] = _Ready(make, make(_as_is), forward, leave_out)
        # Whatever it is: the others are measured all the same.
        except Exception as error:
            failed[each.name] = {'error': describe_error(error)}
    return ready, failed


def _with_saved(figures: dict[str, Any], ready: _Ready) -> dict[str, Any]:
    # With what is kept for the backward, or `error` alone: to find it takes one more forward, which may fail too.
    try:
        return {**figures, 'saved_bytes': saved_memory(ready.forward, ready.leave_out)}
    # As above.
    except Exception as error:
        return {'error': describe_error(error)}


def _maker(prepared: Prepared, learns: bool, device: torch.device, dtype: str) -> Callable[[Wrap], Call]:
    def make(wrap: Wrap) -> Call:
        forward = _in_precision(wrap(prepared.forward), device, dtype)
        return with_backward(forward, prepared.leaves) if learns else forward

    return make


def _in_precision(forward: Callable[[], Tensor], device: torch.device, dtype: str) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with autocast(device, dtype):
            return forward()

    return run


def _as_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
