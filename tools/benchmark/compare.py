"""Alternatives next to each other, eager, compiled and as graphs: time, peak memory and bytes kept for the backward."""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.utils import reparameterize_model
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from aft_vision.layers.fused import fuse_linear
from aft_vision.timing import MIN_SECONDS, compare_rounds, time_rounds
from tools.benchmark.meters import peak_memory, saved_memory
from tools.machine import autocast, free_memory

DIRECTIONS = ('forward', 'training')
EAGER, COMPILED, GRAPH = 'eager', 'compiled', 'graph'
# Attention that forms its (h, T, T) weights, as every attention did when the AFT paper was written.
PAPER_BASELINE = "materialised, the paper's baseline"
# Matrices of the size of its weights that a layer holds: before and after the softmax, and of the mask or a gradient.
MATERIALISED_MATRICES = 3
# The share of the free memory that a call may take.
MAX_MEMORY_FRACTION = 0.5
# Every call is compiled separately, and many share their code.
MAX_GRAPHS = 64


class Prepared(NamedTuple):
    """A forward pass, and what training does with it.

    Args:
        leaves: Tensors that get gradients in the backward.
        given: Inputs and constants, which do not count as kept for the backward.
        learn: Takes the result of the forward in training; None makes the gradients of the leaves.
        peak_bytes: Peak memory of a forward in a runtime that torch's meters do not see.
    """

    forward: Callable[[], Any]
    leaves: Sequence[Tensor] = ()
    given: Sequence[Tensor] = ()
    learn: Callable[[Any], object] | None = None
    peak_bytes: int | None = None

    def call(self, learns: bool) -> Callable[[], object]:
        """Return the call that is measured: the forward, in training with what follows."""
        forward, learn, leaves = self.forward, self.learn, self.leaves
        if not learns:
            return forward
        if learn is None:
            learn = partial(
                torch.autograd.grad, inputs=leaves, grad_outputs=torch.ones_like(forward()), allow_unused=True
            )
        return lambda: learn(forward())

    def within(self, context: Callable[[], contextlib.AbstractContextManager[object]]) -> 'Prepared':
        """Return the same with its forward in a context, which is made in every call."""

        def run() -> Any:
            with context():
                return self.forward()

        return self._replace(forward=run)


class Candidate(NamedTuple):
    """One of the alternatives.

    Args:
        prepare: Makes its forward pass, for training or not.
        compiles: Whether it makes sense to compile it; the compiler would make fused attention of a materialised one.
        baseline: The name that it is compared with; None is the first candidate.
    """

    name: str
    prepare: Callable[[bool], Prepared]
    compiles: bool = True
    baseline: str | None = None


class _Run:
    """A candidate, eager, compiled or as a graph; after its first error nothing of it is called."""

    def __init__(self, candidate: Candidate, direction: str, mode: str, first: str) -> None:
        self.row: dict[str, Any] = {'direction': direction, 'name': candidate.name, 'form': mode}
        self.baseline = (candidate.baseline or first, mode)
        self.learns = direction == 'training'
        self.call: Callable[[], object] = lambda: None
        self.seconds: Sequence[float] = ()

    def attempt(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function; its error, whatever it is, is kept, and the others are measured all the same."""
        if 'error' not in self.row:
            try:
                return function(*args)
            except Exception as error:
                self.row['error'] = describe_error(error)
        return None

    def prepare(self, make: Callable[[bool], Prepared], context: Callable[[], Any]) -> None:
        """Make the call that is measured; the context is entered in every forward, so that autocast casts each time."""
        prepared = make(self.learns)
        if self.row['form'] == COMPILED:
            prepared = prepared._replace(forward=torch.compile(prepared.forward, dynamic=False))
        if prepared.peak_bytes is not None:
            self.row['peak_bytes'] = prepared.peak_bytes
        self.prepared = prepared.within(context)
        self.call = self.prepared.call(self.learns)
        if self.row['form'] == GRAPH:
            self.call = capture(self.call)

    def measure_memory(self, device: torch.device) -> None:
        """Measure the peak memory of the call and the bytes that autograd keeps; a graph has memory of its own."""
        if self.row['form'] == GRAPH:
            return
        memory = {'peak_bytes': peak_memory(self.call, device)}
        if self.learns and self.row['form'] == EAGER:
            kept = [*self.prepared.leaves, *self.prepared.given]
            memory['saved_bytes'] = saved_memory(self.prepared.forward, kept)
        self.row |= memory

    def finish(self, baseline: '_Run | None', single: bool, count: int | None) -> dict[str, Any]:
        """Return the measurements, with ratios to a baseline, or the error."""
        row, first = self.row, None if baseline is None or 'error' in baseline.row else baseline
        if self.seconds and 'error' not in row:
            timing = first and compare_rounds(self.seconds, first.seconds)
            row |= {'milliseconds': 1e3 * statistics.median(self.seconds)}
            row |= {'ratio': timing and timing.ratio, 'ratio_quartiles': timing and timing.quartiles}
            if count is not None:
                row['per_second'] = 1e3 * count / row['milliseconds']
            if single:
                row['p99_milliseconds'] = 1e3 * torch.tensor(self.seconds, dtype=torch.float64).quantile(0.99).item()
        if 'peak_bytes' in row:
            peak = first and first.row.get('peak_bytes')
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
    graph: bool = False,
    single: bool = False,
    memory: bool = True,
    count: int | None = None,
) -> list[dict[str, Any]]:
    """Measure alternatives; if one fails, for example for lack of memory, the others continue.

    Args:
        rounds: In each, every alternative has one time; 0 takes no times.
        dtype: Key of PRECISIONS, of autocast.
        compiled: Measure each under `torch.compile` too, where that makes sense.
        graph: Measure each as a CUDA graph too.
        count: Images or iterations of a call, for `per_second`.
        single: Never repeat a call within a round, and give the slowest of a hundred too.

    Returns:
        A row for each direction, candidate and `form`. `ratio` is the median time of its baseline of the same form over
        its own in the same round, `peak_bytes` are beyond what there was before, `saved_bytes` what autograd keeps
        besides leaves and inputs. Ratios are None without a baseline. One that failed has only `error`.
    """
    rows = []
    for direction in directions:
        context = contextlib.nullcontext() if direction == 'training' else torch.inference_mode()
        torch.compiler.reset()
        with context, torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS):
            runs: dict[tuple[str, str], _Run] = {}
            for each in candidates:
                make = cache(each.prepare)
                for mode in [EAGER] + [COMPILED] * (compiled and each.compiles) + [GRAPH] * graph:
                    run = runs[each.name, mode] = _Run(each, direction, mode, candidates[0].name)
                    run.attempt(run.prepare, make, partial(autocast, device, dtype))
            if rounds:
                calls = [partial(run.attempt, run.call) for run in runs.values()]
                min_seconds = 0.0 if single else MIN_SECONDS
                times = time_rounds(calls, device, rounds, min_seconds=min_seconds, progress=True)
                for run, seconds in zip(runs.values(), times, strict=True):
                    run.seconds = seconds
            for run in runs.values() if memory else ():
                run.attempt(run.measure_memory, device)
        rows += [run.finish(runs.get(run.baseline), single, count) for run in runs.values()]
    return rows


def capture(call: Callable[[], object]) -> Callable[[], None]:
    """Return the replay of a CUDA graph of a call, which is made three times before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


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


class _WeightsCheck(TorchFunctionMode):
    """A check that the weights of attention fit before they are formed: of all layers in training, else of one."""

    needed = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            q, k = args[:2]
            own = 4 * MATERIALISED_MATRICES * q.shape[:-1].numel() * k.shape[-2]
            self.needed = own + self.needed * torch.is_grad_enabled()
            if self.needed > (limit := max_call_bytes(q.device)):
                expected = f'the limit is {limit / 2**30:.1f} GiB'
                raise MemoryError(f'its weights alone take {self.needed / 2**30:.1f} GiB or more, {expected}')
        return func(*args, **(kwargs or {}))


def next_to_the_paper(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates, and after the first one the same with materialised attention: the paper's baseline.

    Its first forward, which `prepare` makes, raises a MemoryError if its weights take more than a call may.
    """
    first, *others = candidates

    def prepare(training: bool) -> Prepared:
        prepared = first.prepare(training).within(math_attention)
        prepared.within(_WeightsCheck).forward()
        return prepared

    return [first, Candidate(f'{first.name}, {PAPER_BASELINE}', prepare, False, first.baseline), *others]


def deploy(model: nn.Module) -> nn.Module:
    """Fuse a model or layer for inference. One of timm gets the linear layers of ours: ratios are of what differs."""
    model = reparameterize_model(model, inplace=True)
    fuse_linear(model)
    return model


def max_call_bytes(device: torch.device) -> float:
    """Return the bytes that a call may take: half of the free memory of the device."""
    return MAX_MEMORY_FRACTION * (free_memory(device) or 8 * 2**30)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return normal random numbers of a shape on the CPU, the same in every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def describe_error(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f'{type(error).__name__}: {lines[0]}' if lines else type(error).__name__
