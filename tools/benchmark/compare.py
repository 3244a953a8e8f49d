"""Alternatives next to each other: time, peak memory and bytes kept for the backward, eager and compiled."""

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from aft_vision.timing import compare_rounds, time_rounds
from tools.benchmark.memory import peak_memory, saved_memory
from tools.machine import autocast, free_memory

Call = Callable[[], object]
# The name of a candidate, and its form.
Key = tuple[str, str]
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

    def call(self, learns: bool) -> Call:
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
    baselines = {each.name: each.baseline or candidates[0].name for each in candidates}
    for direction in directions:
        learns = direction == 'training'
        mode = contextlib.nullcontext() if learns else torch.inference_mode()
        with mode, fresh_compiler() if compiled else contextlib.nullcontext():
            ready, failed = _prepare(candidates, learns, partial(autocast, device, dtype), compiled)
            options: dict[str, Any] = dict(learns=learns, device=device, rounds=rounds, single=single, memory=memory)
            figures = _measure(ready, failed, partial(_figures, **options))
        for name, form in ((name, form) for name in baselines for form in FORMS):
            if (name, form) in {**ready, **failed}:
                row = failed.get((name, form)) or _with_ratios(figures, (name, form), (baselines[name], form))
                rows.append({'direction': direction, 'name': name, 'form': form, **row})
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


def describe_error(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f'{type(error).__name__}: {lines[0]}' if lines else type(error).__name__


def show_progress() -> bool:
    """Return whether standard error is a terminal."""
    return sys.stderr.isatty()


def _within(context: Callable[[], Any], forward: Callable[[], Any]) -> Callable[[], Any]:
    """Return the forward pass within a context that is made in every call."""

    def run() -> Any:
        with context():
            return forward()

    return run


def _prepare(
    candidates: Sequence[Candidate], learns: bool, low: Callable[[], Any], compiled: bool
) -> tuple[dict[Key, tuple[Prepared, Call]], dict[Key, dict[str, Any]]]:
    """Return what is ready, by candidate and form, and `error` of what is not."""
    ready: dict[Key, tuple[Prepared, Call]] = {}
    failed: dict[Key, dict[str, Any]] = {}
    for each in candidates:
        prepared = None
        for form in FORMS[: 1 + (compiled and each.compiles)]:
            try:
                prepared = prepared or each.prepare(learns)
                ready[each.name, form] = _make_call(prepared, learns, low, form)
            # Whatever it is: the others are measured all the same.
            except Exception as error:
                failed[each.name, form] = {'error': describe_error(error)}
                break
    return ready, failed


def _make_call(prepared: Prepared, learns: bool, low: Callable[[], Any], form: str) -> tuple[Prepared, Call]:
    """Return a candidate in one of FORMS, and the call that is measured.

    Args:
        low: Makes the context of the precision; it is entered in every forward, so that it casts the weights each time,
            as in use.
    """
    forward = torch.compile(prepared.forward, dynamic=False) if form == 'compiled' else prepared.forward
    prepared = prepared._replace(forward=_within(low, forward))
    return prepared, prepared.call(learns)


def _measure(
    ready: Mapping[Key, tuple[Prepared, Call]],
    failed: dict[Key, dict[str, Any]],
    measure: Callable[..., dict[Key, dict[str, Any]]],
) -> dict[Key, dict[str, Any]]:
    """Return the figures of what is ready; what fails is added to `failed`, and the others are measured again."""
    while True:
        # An error belongs to the call that began last; a GPU raises it when it is waited for, before the next call.
        begun: list[Key] = []
        running = {key: each for key, each in ready.items() if key not in failed}
        try:
            return measure(running, begun) if running else {}
        # As above.
        except Exception as error:
            if not begun:
                raise
            failed[begun[0]] = {'error': describe_error(error)}


def _figures(
    running: Mapping[Key, tuple[Prepared, Call]],
    begun: list[Key],
    *,
    learns: bool,
    device: torch.device,
    rounds: int,
    single: bool,
    memory: bool,
) -> dict[Key, dict[str, Any]]:
    """Return the figures of calls, with the `seconds` of every round; `begun` has the call that began last."""

    def noting(key: Key, call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            begun[:] = [key]
            return call()

        return run

    calls = {key: noting(key, call) for key, (_, call) in running.items()}
    found: dict[Key, dict[str, Any]] = {key: {} for key in running}
    if rounds:
        options: dict[str, Any] = {'least_seconds': 0.0} if single else {}
        times = time_rounds(list(calls.values()), device, rounds, progress=show_progress(), **options)
        for figures, seconds in zip(found.values(), times, strict=True):
            figures |= {'seconds': seconds, 'milliseconds': 1e3 * statistics.median(seconds)}
            if single:
                figures['p99_milliseconds'] = 1e3 * _percentile(seconds, 99)
    for key, figures in found.items() if memory else ():
        figures['peak_bytes'] = peak_memory(calls[key], device)
        if learns and key[1] == 'eager':
            prepared = running[key][0]
            kept = [*prepared.leaves, *prepared.given]
            figures['saved_bytes'] = saved_memory(noting(key, prepared.forward), kept)
    return found


def _with_ratios(figures: Mapping[Key, dict[str, Any]], key: Key, baseline: Key) -> dict[str, Any]:
    own, first = dict(figures[key]), figures.get(baseline, {})
    if 'seconds' in own:
        timing = compare_rounds(own['seconds'], first['seconds']) if first else None
        own |= {'ratio': timing and timing.ratio, 'ratio_quartiles': timing and timing.quartiles}
        del own['seconds']
    if 'peak_bytes' in own:
        own['peak_ratio'] = own['peak_bytes'] / first['peak_bytes'] if first.get('peak_bytes') else None
    return own


def _percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values if len(values) > 1 else [*values] * 2, n=100, method='inclusive')[percent - 1]
