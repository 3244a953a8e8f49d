"""Alternatives next to each other: time, peak memory and bytes kept for the backward, eager and compiled."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.benchmark.memory import saved_memory
from tools.benchmark.times import Call, Wrap, describe_error, time_calls, time_compiled
from tools.machine import autocast, free_memory

DIRECTIONS = ('forward', 'training')
# Attention that forms its (h, T, T) weights, as every attention did when the AFT paper was written.
PAPER_BASELINE = "the paper's baseline"
# Matrices of the size of its weights that a layer holds: before and after the softmax, and of the mask or a gradient.
MATERIALISED_MATRICES = 3
# The share of the free memory that a call may take unless --most-gib is given.
MOST_MEMORY = 0.5


class Prepared(NamedTuple):
    """A forward pass, and what training does with it.

    Args:
        leaves: Tensors that get gradients in the backward.
        given: Inputs and constants, which do not count as kept for the backward.
        learn: Takes the result of the forward in training; None makes the gradients of the leaves.
    """

    forward: Callable[[], Tensor]
    leaves: Sequence[Tensor] = ()
    given: Sequence[Tensor] = ()
    learn: Callable[[Tensor], object] | None = None

    def call(self, learns: bool, wrap: Wrap = lambda function: function, low: Callable[..., Any] | None = None) -> Call:
        """Return the call that is measured: the forward, in training with what follows.

        Args:
            wrap: `torch.compile`, around the forward.
            low: Makes the context of the precision; it is entered in every forward, so that it casts the weights each
                time, as in use.
        """
        forward = in_context(wrap(self.forward), low) if low else wrap(self.forward)
        learn = self.learn
        if learn is not None and learns:
            return lambda: learn(forward())
        return with_backward(forward, self.leaves) if learns else forward


class Candidate(NamedTuple):
    """One of the alternatives.

    Args:
        prepare: Makes its forward pass, for training or not.
        compiles: Whether a compiled form makes sense; the compiler would make fused attention of a materialised one.
        baseline: The name that it is compared with; None is the first candidate.
    """

    name: str
    prepare: Callable[[bool], Prepared]
    compiles: bool = True
    baseline: str | None = None


def compare(
    candidates: Sequence[Candidate],
    device: torch.device,
    rounds: int,
    *,
    dtype: str = 'float32',
    directions: Sequence[str] = DIRECTIONS,
    compiled: bool = False,
    single: bool = False,
) -> list[dict[str, Any]]:
    """Measure alternatives.

    Args:
        dtype: Key of PRECISIONS, of autocast.
        directions: Of DIRECTIONS.
        compiled: Measure each under `torch.compile` too, where that makes sense.
        single: See `time_calls`.

    Returns:
        A row for each direction, candidate and form: `direction`, `name`, `form` ('eager' or 'compiled') and the
        figures of `time_calls` or `time_compiled`; in training `saved_bytes`, which autograd keeps besides leaves and
        inputs. A candidate that failed, as for lack of memory, has only `error`: the others go on without it.
    """
    rows = []
    baselines = {each.name: each.baseline or candidates[0].name for each in candidates}
    low = partial(autocast, device, dtype)
    for direction in directions:
        learns = direction == 'training'
        with contextlib.nullcontext() if learns else torch.inference_mode():
            ready, calls, found = _prepare(candidates, learns, low)
            found |= time_calls(calls, device, rounds, baselines, single)
            for name, prepared in ready.items() if learns else ():
                found[name] |= _saved(prepared, low) if 'error' not in found[name] else {}
            sensible = [each.name for each in candidates if each.compiles and 'error' not in found[each.name]]
            makers = {name: partial(ready[name].call, learns, low=low) for name in sensible if compiled}
            forms = time_compiled(makers, device, rounds, baselines) if makers else {}
        for name, figures in ((name, found[name]) for name in baselines):
            figures = {'error': figures['error']} if 'error' in figures else figures
            rows.append({'direction': direction, 'name': name, 'form': 'eager', **figures})
            if name in forms:
                rows.append({'direction': direction, 'name': name, 'form': 'compiled', **forms[name]})
    return rows


def with_backward(forward: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Call:
    """Return a call of the forward and of its backward, with the gradients of the leaves that it reaches."""
    grad = torch.ones_like(forward())
    return lambda: torch.autograd.grad(forward(), leaves, grad, allow_unused=True)


@contextlib.contextmanager
def math_attention() -> Iterator[None]:
    """Make `F.scaled_dot_product_attention` form its weights within the context; half precision stays half."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def in_context(forward: Callable[[], Tensor], context: Callable[[], Any]) -> Callable[[], Tensor]:
    """Return the forward pass within a context that is made in every call."""

    def run() -> Tensor:
        with context():
            return forward()

    return run


def materialised(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return the forward pass within `math_attention`."""
    return in_context(forward, math_attention)


def written_out(candidate: Candidate) -> Candidate:
    """Return a candidate within `math_attention`: the paper's baseline."""

    def prepare(training: bool) -> Prepared:
        prepared = candidate.prepare(training)
        return prepared._replace(forward=materialised(prepared.forward))

    name = f'{candidate.name} math, {PAPER_BASELINE}'
    return Candidate(name, prepare, compiles=False, baseline=candidate.baseline)


def too_large(batch: int, heads: int, tokens: int, layers: int, most_bytes: float) -> str | None:
    """Return why materialised attention cannot be measured, or None where it can.

    Args:
        layers: That hold their weights at once: all in training, else one.
        most_bytes: What it may take.
    """
    needed = 4 * MATERIALISED_MATRICES * layers * batch * heads * tokens**2
    if needed <= most_bytes:
        return None
    return f'its weights alone take {needed / 2**30:.1f} GiB, the limit is {most_bytes / 2**30:.1f} GiB'


def most_bytes(most_gib: float | None, device: torch.device) -> float:
    """Return the bytes that a call may take: --most-gib, or half of the free memory of the device."""
    return MOST_MEMORY * (free_memory(device) or 8 * 2**30) if most_gib is None else most_gib * 2**30


def _prepare(
    candidates: Sequence[Candidate], learns: bool, low: Callable[..., Any]
) -> tuple[dict[str, Prepared], dict[str, Call], dict[str, dict[str, Any]]]:
    # Those that are ready, their calls, and `error` of the others.
    ready: dict[str, Prepared] = {}
    calls: dict[str, Call] = {}
    failed: dict[str, dict[str, Any]] = {}
    for each in candidates:
        try:
            prepared = each.prepare(learns)
            calls[each.name] = prepared.call(learns, low=low)
            ready[each.name] = prepared
        # Whatever it is: the others are measured all the same.
        except Exception as error:
            failed[each.name] = {'error': describe_error(error)}
    return ready, calls, failed


def _saved(prepared: Prepared, low: Callable[..., Any]) -> dict[str, Any]:
    # One more forward, which may fail too.
    try:
        return {'saved_bytes': saved_memory(in_context(prepared.forward, low), [*prepared.leaves, *prepared.given])}
    # As above.
    except Exception as error:
        return {'error': describe_error(error)}
