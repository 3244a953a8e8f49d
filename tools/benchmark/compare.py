"""Alternatives next to each other: time, peak memory and bytes kept for the backward, eager and compiled."""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from aft_vision.timing import compare_rounds, time_rounds
from tools.benchmark.memory import peak_memory, saved_memory
from tools.machine import autocast, free_memory

DIRECTIONS, FORMS = ('forward', 'training'), ('eager', 'compiled')
# Attention that forms its (h, T, T) weights, as every attention did when the AFT paper was written.
PAPER_BASELINE = "the paper's baseline"
# Matrices of the size of its weights that a layer holds: before and after the softmax, and of the mask or a gradient.
MATERIALISED_MATRICES = 3
# The share of the free memory that a call may take.
MOST_MEMORY = 0.5
# Every call is compiled separately, and many share their code.
MOST_COMPILED = 64


class Prepared(NamedTuple):
    """A forward pass, and what training does with it.

    Args:
        leaves: Tensors that get gradients in the backward.
        given: Inputs and constants, which do not count as kept for the backward.
        learn: Takes the result of the forward in training; None makes the gradients of the leaves.
    """

    forward: Callable[[], Any]
    leaves: Sequence[Tensor] = ()
    given: Sequence[Tensor] = ()
    learn: Callable[[Any], object] | None = None

    def call(self, learns: bool) -> Callable[[], object]:
        """Return the call that is measured: the forward, in training with what follows."""
        forward, learn, leaves = self.forward, self.learn, self.leaves
        if not learns:
            return forward
        if learn is not None:
            return lambda: learn(forward())
        gradient = torch.ones_like(forward())
        return lambda: torch.autograd.grad(forward(), leaves, gradient, allow_unused=True)


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


class _Run:
    """A candidate in one of FORMS; after its first error nothing of it is called."""

    def __init__(self, name: str, form: str, baseline: str) -> None:
        self.name, self.form, self.baseline = name, form, baseline
        self.prepared: Prepared | None = None
        self.call: Callable[[], object] = lambda: None
        self.seconds: Sequence[float] = ()
        self.figures: dict[str, Any] = {}
        self.error: str | None = None

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function; its error, whatever it is, is kept, and the others are measured all the same."""

        def run(*args: Any) -> Any:
            if self.error is None:
                try:
                    return function(*args)
                except Exception as error:
                    self.error = describe_error(error)
            return None

        return run

    def prepare(self, make: Callable[[], Prepared], learns: bool, context: Callable[[], Any]) -> None:
        """Make the call that is measured; the context is entered in every forward, so that autocast casts each time."""
        prepared = make()
        forward = torch.compile(prepared.forward, dynamic=False) if self.form == 'compiled' else prepared.forward
        self.prepared = prepared._replace(forward=_within(context, forward))
        self.call = self.guard(self.prepared.call(learns))

    def measure_memory(self, learns: bool, device: torch.device) -> None:
        """Measure the peak of the call, and in training what autograd keeps."""
        self.figures['peak_bytes'] = peak_memory(self.call, device)
        if learns and self.form == 'eager' and self.prepared is not None:
            kept = [*self.prepared.leaves, *self.prepared.given]
            self.figures['saved_bytes'] = saved_memory(self.prepared.forward, kept)

    def row(self, first: '_Run | None', single: bool) -> dict[str, Any]:
        """Return the figures, with ratios to a baseline, or the error."""
        if self.error is not None:
            return {'error': self.error}
        first = None if first is None or first.error is not None else first
        row = dict(self.figures)
        if self.seconds:
            timing = first and compare_rounds(self.seconds, first.seconds)
            row |= {'milliseconds': 1e3 * statistics.median(self.seconds)}
            row |= {'ratio': timing and timing.ratio, 'ratio_quartiles': timing and timing.quartiles}
            if single:
                row['p99_milliseconds'] = 1e3 * torch.tensor(self.seconds, dtype=torch.float64).quantile(0.99).item()
        if 'peak_bytes' in row:
            peak = first and first.figures['peak_bytes']
            row['peak_ratio'] = row['peak_bytes'] / peak if peak else None
        return row


def compare(
    candidates: Sequence[Candidate],
    device: torch.device,
    rounds: int,
    *,
    dtype: str = 'float32',
    directions: Sequence[str] = DIRECTIONS,
    compiled: bool = False,
    single: bool = False,
    memory: bool = True,
) -> list[dict[str, Any]]:
    """Measure alternatives; when one fails, as for lack of memory, the others go on without it.

    Args:
        rounds: In each, every alternative has one time; 0 takes no times.
        dtype: Key of PRECISIONS, of autocast.
        directions: Of DIRECTIONS.
        compiled: Measure each under `torch.compile` too, where that makes sense.
        single: Never repeat a call within a round, and give the slowest of a hundred too.
        memory: Measure memory too.

    Returns:
        A row for each direction, candidate and form: `direction`, `name`, `form` (of FORMS),
        `milliseconds` (and `p99_milliseconds`), the median `ratio` of the time of its baseline of the same form in the
        same round to its own with `ratio_quartiles`, `peak_bytes` beyond what there was before, and `peak_ratio` to the
        baseline's; in training `saved_bytes`, which autograd keeps besides leaves and inputs. Ratios are None without a
        baseline. One that failed has only `error`.
    """
    rows = []
    for direction in directions:
        learns = direction == 'training'
        mode = contextlib.nullcontext() if learns else torch.inference_mode()
        with mode, fresh_compiler() if compiled else contextlib.nullcontext():
            runs = {}
            for each in candidates:
                make = cache(partial(each.prepare, learns))
                for form in FORMS[: 1 + (compiled and each.compiles)]:
                    run = runs[each.name, form] = _Run(each.name, form, each.baseline or candidates[0].name)
                    run.guard(run.prepare)(make, learns, partial(autocast, device, dtype))
            if rounds:
                options: dict[str, Any] = {'least_seconds': 0.0} if single else {}
                times = time_rounds([run.call for run in runs.values()], device, rounds, progress=True, **options)
                for run, seconds in zip(runs.values(), times, strict=True):
                    run.seconds = seconds
            for run in runs.values() if memory else ():
                run.guard(run.measure_memory)(learns, device)
        for run in runs.values():
            row = run.row(runs.get((run.baseline, run.form)), single)
            rows.append({'direction': direction, 'name': run.name, 'form': run.form, **row})
    return rows


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Forget what was compiled, and compile functions that share their code separately."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=MOST_COMPILED):
        yield


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


def written_out(candidate: Candidate) -> Candidate:
    """Return a candidate within `math_attention`: the paper's baseline."""

    def prepare(training: bool) -> Prepared:
        prepared = candidate.prepare(training)
        return prepared._replace(forward=_within(math_attention, prepared.forward))

    name = f'{candidate.name} math, {PAPER_BASELINE}'
    return Candidate(name, prepare, compiles=False, baseline=candidate.baseline)


def check_weights(batch: int, heads: int, tokens: int, layers: int, device: torch.device) -> None:
    """Check that materialised attention can be measured.

    Args:
        layers: Number that hold their weights at once: all in training, else one.

    Raises:
        MemoryError: its weights alone take more than a call may.
    """
    needed, most = 4 * MATERIALISED_MATRICES * layers * batch * heads * tokens**2, most_bytes(device)
    if needed > most:
        raise MemoryError(f'its weights alone take {needed / 2**30:.1f} GiB, the limit is {most / 2**30:.1f} GiB')


def most_bytes(device: torch.device) -> float:
    """Return the bytes that a call may take: half of the free memory of the device."""
    return MOST_MEMORY * (free_memory(device) or 8 * 2**30)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return normal random numbers of a shape on the CPU, the same in every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def describe_error(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f'{type(error).__name__}: {lines[0]}' if lines else type(error).__name__


def _within(context: Callable[[], Any], forward: Callable[[], Any]) -> Callable[[], Any]:
    """Return the forward pass within a context that is made in every call."""

    def run() -> Any:
        with context():
            return forward()

    return run
