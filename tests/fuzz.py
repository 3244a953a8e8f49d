"""Draw inputs of the operators of AFT, nasty ones too, and compare with float64 until the time is over.

Prints a table of operator, backend and cases tried, and for a mistake the smallest case found as a command that repeats
it. Ends with status 1 if there is one.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from helpers import BOUNDS, NASTY_BOUND, generator, interpret_triton
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from instructions import KINDS
from torch import Tensor

from aft_vision import ops
from aft_vision.ops import operator, reference
from aft_vision.ops.common import build, cpp
from aft_vision.ops.declaration import OPERATIONS, Operation, Shape

INFINITY = float('inf')
# The functions that decode, and what they do step by step.
DECODERS = {
    **dict.fromkeys(('aft_local_step', 'aft_local_prefill'), 'aft_local_causal'),
    **dict.fromkeys(('aft_simple_step', 'aft_simple_prefill'), 'aft_simple_causal'),
}
BACKENDS = {name: tuple(dict.fromkeys(form.backend for form in x.forms[::-1])) for name, x in OPERATIONS.items()}
BACKENDS |= dict.fromkeys(DECODERS, ('eager', 'cpp'))
PAIRS = [(operator, backend) for operator, backends in BACKENDS.items() for backend in backends]
# Blocks of targets have 32, 64 or 128 tokens: sequences that end at a border, one token before and after, and others.
TOKENS = (1, 2, 3, 5, 8, 16, 31, 32, 33, 34, 63, 64, 65, 66, 96, 97, 127, 128, 129, 130, 160, 193)
TOKENS_INTERPRETED = (1, 2, 3, 5, 9, 17, 33)
# Calls to make a case of a mistake smaller, and cases of each form however short the time is.
SHRINKING = {'eager': 400, 'cpp': 400, 'triton': 40}
MIN_CASES = 20
# Weights (B, T, S, D) of the oracle, at most.
WEIGHTS = 60_000
KEYS = ('plain', 'spread', 'few', 'jumps', 'equal', 'climb', 'fall', 'far', 'spread', 'few', 'jumps', 'few')
BIASES = ('plain', 'zero', 'within', 'signs', 'level', 'rows', 'within', 'level')
VALUES = ('plain', 'index', 'equal', 'huge', 'small')
# Values of causal forms on a CPU: of 'vast' ones up to VAST, float16 has none.
VAST = 1e13
GRAD_SCALES = (1.0, 1e-12, 1e-20, 1e8)
MASKS = ('none', 'random', 'start', 'row', 'all')
LAYOUTS = ('contiguous', 'transposed', 'fused', 'strided', 'expanded')
HOLES = ('none', 'tokens', 'channels', 'row', 'all')
RELATIONS = ('none', 'row', 'shift', 'later', 'later_nan')
# Products of values and e^60, and float16's gradients, stay in range.
HUGE = {'float64': 1e6, 'float32': 1e6, 'bfloat16': 1e6, 'float16': 30.0}
# FACTS: a later key within so many nats changes no bit of an earlier result, and any other one no more than 5e-6.
HEADROOM, LATER_BOUND = 60.0, 5e-6


@dataclass(frozen=True, repr=False)
class Case:
    """A call: its sizes, the style of each tensor, and the seed of what is random in them.

    Attributes:
        form: a name of a form of that backend; '' for the first that supports the inputs.
        grid: tokens (H, W); (1, T) for operators over sequences.
        heads: channels of k; with `channels` of v each.
        window: that of `Shape`.
        key_range, bias_range: nats from the smallest to the largest, about; what they mean is a style's own.
        key_holes, bias_holes: keys and biases of minus infinity.
        wide_bias: a float32 bias next to half-precision q, k and v.
        gradients: False calls without autograd.
        grad_scale: what the gradient of the result is multiplied by.
        product: how the compiled kernels multiply bfloat16, a key of `instructions.KINDS`, whatever the processor has;
            '' for the way that suits it.
        instructions: the set that they are compiled for; '' for the one that suits the processor.
    """

    operator: str
    backend: str = 'eager'
    form: str = ''
    dtype: str = 'float32'
    grid: tuple[int, int] = (1, 1)
    batch: int = 1
    heads: int = 1
    channels: int = 1
    window: int = 1
    gated: bool = False
    keys: str = 'plain'
    key_range: int = 0
    key_holes: str = 'none'
    biases: str = 'plain'
    bias_range: int = 0
    bias_holes: str = 'none'
    wide_bias: bool = False
    values: str = 'plain'
    mask: str = 'none'
    layout: str = 'contiguous'
    grad_layout: str = 'contiguous'
    flags: bool = True
    gradients: bool = True
    grad_scale: float = 1.0
    relation: str = 'none'
    threads: int = 1
    product: str = ''
    instructions: str = ''
    seed: int = 0

    def __repr__(self) -> str:
        given = ((x.name, getattr(self, x.name)) for x in fields(self) if getattr(self, x.name) != x.default)
        return f'Case({", ".join(f"{name}={value!r}" for name, value in given)})'

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def operation(self) -> Operation:
        return OPERATIONS[DECODERS.get(self.operator, self.operator)]

    @property
    def nasty(self) -> bool:
        return self.keys != 'plain' or self.biases not in ('plain', 'zero')


class Wrong(AssertionError):
    """A result that is not the right one."""


def cases(operator: str, backend: str) -> st.SearchStrategy[Case]:
    """Cases for one form of an operator, no larger than the oracle can take."""
    interpreted, operation = backend == 'triton', OPERATIONS[DECODERS.get(operator, operator)]
    grids: st.SearchStrategy[tuple[int, int]] = st.sampled_from(
        [(1, tokens) for tokens in (TOKENS_INTERPRETED if interpreted else TOKENS)]
    )
    heads: st.SearchStrategy[int] = st.integers(1, 4) if interpreted else st.integers(1, 9) | st.sampled_from([17, 33])
    channels: st.SearchStrategy[int] = st.just(1)
    if operation.has_grid:
        side = st.integers(1, 4 if interpreted else 9)
        grids, channels = st.tuples(side, side), st.integers(1, 3)
    windows = st.sampled_from([1, 2, 3, 5, 9, 17] if interpreted else [1, 2, 3, 5, 9, 31, 32, 33, 40, 64, 65, 100])
    if operation.has_grid:
        windows = st.integers(1, 7 if interpreted else 11)
    wide = ('float64',) if backend == 'eager' else ()
    ranges = st.sampled_from([0, 60, 110, 160, 240, *((600, 2400) if operator in DECODERS else ())])
    # What only the forms of a CPU promise.
    vast = backend != 'triton' and operation.causal
    return st.builds(
        Case,
        operator=st.just(operator),
        backend=st.just(backend),
        form=st.sampled_from(['', *(x.name for x in operation.forms if x.backend == backend != x.name)]),
        dtype=st.sampled_from(('float32', *wide, 'bfloat16', 'float16')),
        grid=grids,
        batch=st.integers(1, 2) if interpreted else st.integers(1, 3) | st.just(16),
        heads=heads,
        channels=channels,
        window=windows,
        gated=st.booleans(),
        keys=st.sampled_from(KEYS),
        key_range=st.sampled_from([0, 60, 100, 130, 150, 300, 800]),
        key_holes=st.sampled_from(('none',) * 6 + HOLES[1:]),
        biases=st.sampled_from(BIASES if operation.biases else ('plain',)),
        bias_range=ranges if operation.biases else st.just(0),
        bias_holes=st.sampled_from(('none',) * 6 + HOLES[1:] if operation.biases else ('none',)),
        wide_bias=st.booleans(),
        values=st.sampled_from((*VALUES, 'vast') if vast else VALUES),
        mask=st.sampled_from(('none',) * 4 + MASKS[1:] if operator not in DECODERS else ('none',)),
        layout=st.sampled_from(LAYOUTS),
        grad_layout=st.sampled_from(LAYOUTS),
        flags=st.booleans() if operation.flags else st.just(True),
        gradients=st.sampled_from([True, True, True, False]) if operator not in DECODERS else st.just(False),
        grad_scale=st.sampled_from(GRAD_SCALES if vast else GRAD_SCALES[:1]),
        relation=st.sampled_from(RELATIONS if operation.causal and operator not in DECODERS else RELATIONS[:3]),
        threads=st.sampled_from([1, 1, 1, 3]) if backend == 'cpp' else st.just(1),
        product=st.sampled_from(('', *KINDS)) if backend == 'cpp' else st.just(''),
        instructions=st.sampled_from(('', *build.runnable_instructions())) if backend == 'cpp' else st.just(''),
        seed=st.integers(0, 2**20),
    ).map(_within_reach)


def _within_reach(case: Case) -> Case:
    # Fewer sequences, channels and heads, in this order, where the weights of the oracle would be too many, and the
    # backend's own choice where the form drawn does not run.
    product = case.product if case.dtype == 'bfloat16' else ''
    if product == 'tiles' and case.operation.has_grid:
        # Narrower grids take no tiles.
        case = replace(case, grid=(case.grid[0], case.grid[1] + 7))
    most = max(1, WEIGHTS // case.tokens**2)
    batch = max(1, min(case.batch, most // (case.heads * case.channels)))
    channels = max(1, min(case.channels, most // case.heads))
    heads = min(case.heads, most)
    # The smallest float16 is 6e-8.
    grad_scale = 1.0 if case.dtype == 'float16' else case.grad_scale
    found = replace(case, grad_scale=grad_scale, batch=batch, channels=channels, heads=heads, product=product)
    if case.backend != 'cpp' or case.operator in DECODERS:
        return found
    inputs = Inputs(found).named()
    forms = [x for x in case.operation.forms if x.backend == 'cpp' and (x.supports(inputs) or x.is_candidate(inputs))]
    if forms:
        return replace(found, form=found.form if found.form in [x.name for x in forms] else '')
    # Some compiled kernels are for a head per channel, more than 64 of them.
    return replace(found, heads=65 + case.heads % 16, channels=1, flags=True, form='')


class Inputs:
    """The tensors of a case: `arguments` by name as an operator takes them, and `grad`, the gradient of its result."""

    def __init__(self, case: Case) -> None:
        self.operation, g = case.operation, generator(case.seed)
        dtype = getattr(torch, case.dtype)
        device = 'cuda' if case.backend == 'triton' and torch.cuda.is_available() else 'cpu'
        shape = (case.batch, case.tokens, case.heads * case.channels)

        def place(x: Tensor, layout: str, dtype: torch.dtype) -> Tensor:
            return lay_out(x.to(device, dtype), layout)

        k, v = draw_keys(case, g), draw_values(case, shape, g)
        q = torch.randn(shape, generator=g, dtype=torch.float64) * 2
        size = Shape(case.batch, case.grid, shape[2], case.channels, case.window)
        own = case.operation.draw(size, lambda *sizes: draw_bias(case, sizes, g))
        self.mask = draw_mask(case, g)
        grad = torch.randn(shape, generator=g, dtype=torch.float64) * case.grad_scale
        grad = place(grad, case.grad_layout, dtype)
        q, k, v = (place(x, case.layout, dtype) for x in (q, k, v))
        if self.mask is not None:
            self.mask = place(self.mask, case.layout, torch.bool)
        self.grad = grad
        self.arguments: dict[str, Any] = {'q': q if case.gated else None, 'k': k, 'v': v}
        wide = torch.float32 if case.wide_bias and dtype != torch.float64 else dtype
        for name, x in own.items():
            if isinstance(x, Tensor):
                x = place(x, case.layout, wide) if x.is_floating_point() else x.to(device)
            self.arguments[name] = x
        self.arguments |= dict.fromkeys(case.operation.flags, case.flags)

    def named(self) -> Any:
        """All inputs of the operation, by name."""
        return self.operation.inputs(**self.arguments, mask=self.mask)

    def expected(self) -> dict[str, oracle.Term]:
        """By the names of the arguments, and 'y'."""
        inputs = self.named()
        inputs = inputs._make(x.cpu() if isinstance(x, Tensor) else x for x in inputs)
        names = self.operation.biases
        biases = [getattr(inputs, name).detach().double() for name in names]
        rows = [len(x) if self.operation.has_grid else 1 for x in biases]
        arrays = [None if x is None else _array(x) for x in inputs[:3]]
        bias = torch.cat([x.reshape(n, -1) for x, n in zip(biases, rows, strict=True)], 1).numpy() if biases else None
        mask = None if inputs.mask is None else inputs.mask.numpy()
        found = oracle.evaluate(
            oracle.Inputs(*arrays, bias, mask, _array(self.grad)), make_table(self.operation, inputs)
        )
        if bias is not None:
            found |= _split_bias(names, biases, found.pop('bias'))
        return found


def _label_onehot(inputs: Any) -> Tensor:
    radius = int(inputs.offset.abs().max())
    kernel = torch.zeros(len(inputs.weight), 2 * radius + 1, 2 * radius + 1, dtype=torch.float64)
    heads = torch.arange(len(inputs.weight))
    kernel[heads, *(inputs.offset.t() + radius)] = inputs.weight
    return reference.kernel_to_bias(kernel, inputs.grid)


def _label_axial(inputs: Any) -> tuple[Tensor, Tensor]:
    rows, columns = inputs.row_bias, inputs.column_bias
    none = torch.zeros_like
    return tuple(
        reference.axial_to_bias(*biases, inputs.grid) for biases in ((rows, none(columns)), (none(rows), columns))
    )


# The whole bias (T, T, 1 or h), or several that add up, of inputs whose biases have other numbers.
WHOLE: dict[str, Callable[[Any], Any]] = {
    'aft_full': lambda x: x.bias[:, :, None],
    'aft_local': lambda x: reference.band_to_bias(x.band, -(x.band.shape[1] // 2))[:, :, None],
    'aft_simple': lambda x: torch.zeros(*2 * x.v.shape[1:2], 1),
    'aft_conv': lambda x: reference.kernel_to_bias(x.kernel, x.grid, 0.0 if x.global_context else -INFINITY),
    'aft_onehot': _label_onehot,
    'aft_axial': _label_axial,
}
WHOLE['aft_full_causal'], WHOLE['aft_simple_causal'] = WHOLE['aft_full'], WHOLE['aft_simple']
WHOLE['aft_local_causal'] = lambda x: reference.band_to_bias(x.band, 1 - x.band.shape[1])[:, :, None]


def make_table(operation: Operation, inputs: Any) -> np.ndarray:
    """Return the table that the oracle reads of an operation: (n, T, T, 1 or h)."""
    biases, labels = [getattr(inputs, name) for name in operation.biases], {}
    if biases:
        # Entries of the biases of heads next to each other, numbered from 1; 0 is no bias.
        rows = [len(x) if operation.has_grid else 1 for x in biases]
        parts = torch.split(
            1 + torch.arange(sum(x.numel() for x in biases)).view(rows[0], -1),
            [x.numel() // n for x, n in zip(biases, rows, strict=True)],
            1,
        )
        labels = {n: p.reshape(x.shape).double() for n, p, x in zip(operation.biases, parts, biases, strict=True)}
    whole = WHOLE[operation.name](inputs._replace(**labels))
    table = torch.stack(whole if isinstance(whole, tuple) else (whole,))
    if operation.causal:
        table = table.masked_fill(torch.ones(table.shape[1:3], dtype=torch.bool).triu(1)[..., None], -INFINITY)
    return table.masked_fill(table == -INFINITY, oracle.HIDDEN + 1).sub(1).long().numpy()


def _array(x: Tensor) -> Any:
    return x.detach().cpu().double().numpy()


def _split_bias(names: Sequence[str], biases: Sequence[Tensor], found: oracle.Term) -> dict[str, oracle.Term]:
    # The gradients of biases that the oracle sees next to each other.
    if len(names) == 1:
        return {names[0]: oracle.Term(*(x.reshape(biases[0].shape) for x in found))}
    ends = np.cumsum([x.shape[1] for x in biases])[:-1]
    parts = zip(*(np.split(x, ends, 1) for x in found), strict=True)
    return dict(zip(names, (oracle.Term(*term) for term in parts), strict=True))


def _borders(case: Case, count: int, g: torch.Generator) -> Tensor:
    # Tokens, most of them at a border of blocks or next to one.
    at = torch.randint(0, 7, (count,), generator=g) * 32 + torch.randint(-1, 2, (count,), generator=g)
    anywhere = torch.randint(0, case.tokens, (count,), generator=g)
    chosen = torch.where(torch.rand(count, generator=g) < 0.6, at, anywhere)
    return chosen.clamp_min(0) % case.tokens


def draw_keys(case: Case, g: torch.Generator) -> Tensor:
    """(B, T, h) float64."""
    shape, reach = (case.batch, case.tokens, case.heads), float(case.key_range)
    noise = torch.randn(shape, generator=g, dtype=torch.float64)
    uniform = torch.rand(shape, generator=g, dtype=torch.float64)
    count = 1 + int(torch.randint(0, 6, (), generator=g))
    places = _borders(case, count, g).sort().values
    ramp = torch.linspace(0, reach, case.tokens, dtype=torch.float64)[None, :, None]
    match case.keys:
        case 'plain':
            k = noise
        case 'spread':
            k = (uniform - 0.5) * reach
        case 'equal':
            k = torch.full_like(noise, 3.25 + reach)
        case 'few':
            # All but some far below; those go up, each by up to 130 nats, or down.
            steps = torch.rand((case.batch, count, case.heads), generator=g, dtype=torch.float64) * 130
            if torch.rand((), generator=g) < 0.3:
                steps = -steps
            k = torch.full_like(noise, -1000.0)
            k[:, places] = steps.cumsum(1)
        case 'jumps':
            levels = (torch.rand((case.batch, count, case.heads), generator=g, dtype=torch.float64) - 0.5) * reach
            k = noise + (torch.arange(case.tokens)[:, None] >= places).double() @ levels
        case 'climb':
            k = ramp + noise
        case 'fall':
            k = ramp.flip(1) + noise
        case 'far':
            k = noise.sign() * 1e4 + noise
    return make_holes(k, case.key_holes, g)


def draw_bias(case: Case, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """A position bias of a shape, float64."""
    reach = float(case.bias_range)
    noise = torch.randn(shape, generator=g, dtype=torch.float64)
    uniform = torch.rand(shape, generator=g, dtype=torch.float64)
    match case.biases:
        case 'plain':
            bias = noise
        case 'zero':
            bias = torch.zeros_like(noise)
        case 'within':
            bias = (uniform - 0.5) * reach
        case 'signs':
            bias = noise.sign() * reach / 2
        case 'level':
            bias = torch.full_like(noise, reach / 2)
        case 'rows':
            rows = uniform.reshape(len(noise), -1)[:, 0]
            bias = noise + ((rows - 0.5) * reach).reshape(-1, *[1] * (noise.ndim - 1))
    return make_holes(bias, case.bias_holes, g)


def draw_values(case: Case, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """(B, T, D) float64."""
    noise = torch.randn(shape, generator=g, dtype=torch.float64)
    match case.values:
        case 'index':
            return (torch.arange(case.tokens, dtype=torch.float64) % 5)[:, None].expand(shape)
        case 'equal':
            return torch.ones_like(noise)
        case 'huge':
            return noise * HUGE[case.dtype]
        case 'small':
            return noise / HUGE[case.dtype]
        case 'vast' if case.dtype != 'float16':
            return (noise / 2).clamp(-1, 1) * VAST
    return noise


def draw_mask(case: Case, g: torch.Generator) -> Tensor | None:
    """(B, T) bool."""
    mask = torch.rand((case.batch, case.tokens), generator=g) < 0.6
    match case.mask:
        case 'none':
            return None
        case 'start':
            mask = (torch.arange(case.tokens) >= torch.randint(0, case.tokens + 1, (), generator=g)).expand_as(mask)
        case 'row':
            mask[-1] = False
        case 'all':
            mask = torch.zeros_like(mask)
    return mask


def make_holes(x: Tensor, holes: str, g: torch.Generator) -> Tensor:
    """x with minus infinity in some places: single entries, whole channels or columns, a whole row, everywhere."""
    match holes:
        case 'tokens':
            x[torch.rand(x.shape, generator=g) < 0.3] = -INFINITY
        case 'channels':
            x[..., torch.rand(x.shape[-1], generator=g) < 0.5] = -INFINITY
        case 'row':
            x[-1] = -INFINITY
        case 'all':
            x = torch.full_like(x, -INFINITY)
    return x


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The values of x in another order of memory; where it is expanded, those of its first row everywhere."""
    match layout:
        case 'transposed' if x.ndim > 1:
            return x.mT.contiguous().mT
        case 'fused':
            return torch.cat([x, x + 1 if x.dtype != torch.bool else x, x], -1).narrow(-1, 0, x.shape[-1])
        case 'strided':
            return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]
        case 'expanded':
            return x[:1].contiguous().expand(x.shape)
    return x.contiguous()


def check(case: Case) -> None:
    """Raise `Wrong` unless the operator gives what the oracle gives, and what the case's relation promises."""
    inputs = Inputs(case)
    expected = inputs.expected()
    bounds = BOUNDS[getattr(torch, case.dtype)]
    value_bound, gradient_bound = (max(NASTY_BOUND, x) if case.nasty else x for x in bounds)
    threads = torch.get_num_threads()
    kernels = cpp.use_instructions(case.instructions) if case.instructions else nullcontext()
    product = cpp.multiply_bfloat16_as(KINDS[case.product]) if case.product else nullcontext()
    with warnings.catch_warnings(), kernels, product:
        # A form that does not run its kernel would pass for the wrong reason.
        warnings.filterwarnings('error', message='.*using eager')
        warnings.filterwarnings('ignore', category=RuntimeWarning, module='triton.runtime.interpreter')
        torch.set_num_threads(case.threads)
        try:
            if case.operator in DECODERS:
                compare('y', decode(case, inputs), expected['y'], value_bound)
                return
            arguments = spoil_masked(inputs)
            leaves = {name: x.detach() for name, x in arguments.items() if _is_float(x)}
            for x in leaves.values():
                x.requires_grad_(case.gradients)
            y = call(case, arguments | leaves, inputs.mask)
            # Values that cancel leave the rounding of both operands of their products.
            compare('y', y, expected['y'], value_bound, 2.0**-8 if case.product in ('pairs', 'tiles') else 0.0)
            if case.gradients:
                found = torch.autograd.grad(y, list(leaves.values()), inputs.grad)
                for name, got in zip(leaves, found, strict=True):
                    compare(f'grad {name}', got, expected[name], gradient_bound, value_bound, y.dtype)
            if case.relation != 'none':
                check_relation(case, inputs, y.detach())
        finally:
            torch.set_num_threads(threads)


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def call(case: Case, arguments: dict[str, Any], mask: Tensor | None) -> Tensor:
    """The operator in the case's form."""
    function = getattr(ops, case.operator, None)
    if function is None:
        return case.operation.operator(*case.operation.inputs(**arguments, mask=mask), case.form or case.backend)
    return function(**arguments, mask=mask, backend=case.form or case.backend)


def spoil_masked(inputs: Inputs) -> dict[str, Any]:
    """The arguments with anything in the tokens that the mask hides: it may reach neither result nor gradient."""
    if inputs.mask is None:
        return inputs.arguments
    hidden = ~inputs.mask[..., None]
    k, v = inputs.arguments['k'].masked_fill(hidden, float('nan')), inputs.arguments['v'].masked_fill(hidden, INFINITY)
    return inputs.arguments | {'k': k, 'v': v}


def compare(
    kind: str,
    got: Tensor,
    expected: oracle.Term,
    bound: float,
    term_bound: float = 0.0,
    dtype: torch.dtype | None = None,
) -> None:
    """Raise `Wrong` unless the error is within bound of the norm and no element off by 10 times that of the largest.

    A gradient is a sum of terms v - y of both signs. Where they cancel (a target with one source, equal values) the
    result is far below its terms, and no precision of the terms bounds its relative error. So errors of a gradient may
    be bound * |result| + term_bound * |sum of the absolute terms|, where term_bound is that of y: each term has it.
    A float16 result may be off by its smallest number, and so may a gradient from a y of this `dtype`; that y may be
    off by half of it, where it is too small for a relative error. Elsewhere a weight below the smallest number of the
    sums counts as 0, whatever value it multiplies.
    """
    value, size = torch.from_numpy(expected.value), torch.from_numpy(expected.size)
    got = got.detach().cpu()
    if got.shape != value.shape:
        raise Wrong(f'{kind}: shape {tuple(got.shape)}, expected {tuple(value.shape)}')
    if not got.isfinite().all():
        raise Wrong(f'{kind}: {int((~got.isfinite()).sum())} of {got.numel()} are not finite')
    narrow = torch.float16 in (got.dtype, dtype)
    limits = torch.finfo(torch.float16 if narrow else got.dtype)
    lost = limits.smallest_normal * (limits.eps if narrow else HUGE['float32'])
    if dtype == torch.float16:
        lost += lost / 2 * torch.as_tensor(expected.slope)
    error = ((got.double() - value).abs() - lost).clamp_min(0.0)
    norm = bound * value.norm() + term_bound * size.norm()
    peak = 10 * (bound * value.abs().max() + term_bound * size.max())
    for name, found, most in (('norm', error.norm(), norm), ('largest', error.max(), peak)):
        if found > most:
            at = tuple(int(x) for x in torch.unravel_index(error.argmax(), error.shape))
            raise Wrong(
                f'{kind}: {name} of the error {found:.3g} above {most:.3g}; got {got[at]:.9g}, want {value[at]:.9g} '
                f'at {at}'
            )


def decode(case: Case, inputs: Inputs) -> Tensor:
    """The tokens step by step, or, for 'prefill', in chunks of a few sizes and steps between them."""
    g, arguments = generator(case.seed + 1), inputs.arguments
    q, k, v, band = (arguments.get(name) for name in ('q', 'k', 'v', 'band'))
    dtype = torch.float64 if case.dtype == 'float64' else torch.float32
    kind = 'local' if band is not None else 'simple'
    sizes = (case.batch, case.heads) if band is None else (case.batch, case.heads, case.window)
    state = getattr(ops, f'aft_{kind}_state')(*sizes, dtype)
    rows: list[Tensor] = []
    start = 0
    while start < case.tokens:
        form, place, chunk, options = 'step', start, 1, {'backend': 'eager' if case.backend == 'eager' else 'auto'}
        if case.operator.endswith('prefill') and torch.rand((), generator=g) < 0.7:
            chunk = int(torch.tensor([1, 2, 31, 32, 33, 64, 65, 130])[torch.randint(0, 8, (), generator=g)])
            part = slice(start, min(start + chunk, case.tokens))
            form, place, chunk, options = 'prefill', part, part.stop - start, {}
        biases = [] if band is None else [band[place]]
        parts = [None if x is None else x[:, place] for x in (q, k, v)]
        y, state = getattr(ops, f'aft_{kind}_{form}')(*parts, *biases, state, **options)
        rows.append(y if form == 'prefill' else y[:, None])
        start += chunk
    return torch.cat(rows, 1)


def check_relation(case: Case, inputs: Inputs, y: Tensor) -> None:
    """Raise `Wrong` unless a changed call relates to the first one as it must."""
    bound = NASTY_BOUND if case.nasty else 1e-5
    bound = max(bound, BOUNDS[getattr(torch, case.dtype)][0])
    arguments = spoil_masked(inputs)
    if case.relation == 'row':
        row = case.batch - 1
        one = arguments | {name: x[row : row + 1] for name, x in arguments.items() if name in 'qkv' and x is not None}
        mask = None if inputs.mask is None else inputs.mask[row : row + 1]
        _same('a sequence alone', call(case, one, mask), y[row : row + 1], 2 * bound)
    elif case.relation == 'shift' and case.dtype in ('float32', 'float64'):
        # Multiples of 2^-8, so that neither sum is rounded.
        keys = (arguments['k'] * 256).round() / 256
        one, other = (call(case, arguments | {'k': x}, inputs.mask) for x in (keys, keys - 777.0))
        _same('shifted keys', other, one, 2 * bound)
    elif case.relation.startswith('later') and case.tokens > 1:
        check_later(case, inputs, y, arguments)


def check_later(case: Case, inputs: Inputs, y: Tensor, arguments: dict[str, Any]) -> None:
    """Raise `Wrong` if the tokens from one on reach the results before it."""
    g = generator(case.seed + 2)
    first = 1 + int(torch.randint(0, case.tokens - 1, (), generator=g))
    keys, values = arguments['k'].clone(), arguments['v'].clone()
    old = keys[:, first:].clone()
    if case.relation == 'later_nan':
        keys[:, first], values[:, first] = (float('nan'), INFINITY)[case.seed % 2], float('nan')
        kind = 'a later NaN or infinity'
    else:
        reach = (1.0, 50.0, 200.0, 1e4)[int(torch.randint(0, 4, (), generator=g))]
        keys[:, first:] += (torch.randn(old.shape, generator=g, dtype=torch.float64) * reach).to(old)
        values[:, first:] += 1e3
        kind = 'a later token'
    after = call(case, arguments | {'k': keys, 'v': values}, inputs.mask)[:, :first]
    limit = max(LATER_BOUND, torch.finfo(y.dtype).eps)
    _same(kind, after, y[:, :first], limit)
    near = keys[:, :1] + HEADROOM
    within = near.isfinite().all() and (torch.maximum(old, keys[:, first:]) <= near).all()
    if case.relation == 'later' and within and inputs.mask is None and not torch.equal(after, y[:, :first]):
        raise Wrong('a later token within 60 nats: earlier results differ in some bits')


def _same(kind: str, got: Tensor, want: Tensor, bound: float) -> None:
    want = want.detach().cpu().double()
    compare(kind, got, oracle.Term(want.numpy(), want.abs().numpy()), bound)


@dataclass
class Report:
    """Result of a search: the smallest case of the first mistake, and its error."""

    cases: int = 0
    failure: tuple[Case, Exception] | None = None


def search(
    operator: str, backend: str, examples: int, seconds: float = INFINITY, first_seed: int | None = None
) -> Report:
    """Try cases for one form of an operator until one is wrong, which hypothesis makes smaller.

    Args:
        examples: cases, of one draw if there is no seed, else of each of many.
        seconds: no new case is tried after them, when there are a few.
        first_seed: of the draws; None draws the same cases every time.
    """
    report, end, number = Report(), time.monotonic() + seconds, first_seed
    failed: dict[Case, Exception] = {}
    smaller = 0

    def attempt(case: Case) -> None:
        nonlocal smaller
        smaller += bool(failed)
        late = smaller > SHRINKING[backend] if failed else time.monotonic() > end and report.cases >= MIN_CASES
        if case not in failed and not late:
            report.cases += not failed
            try:
                check(case)
            # Whatever an operator raises for inputs that it must take is a mistake.
            except Exception as error:
                failed[case] = error
        if case in failed:
            # The last one is the smallest.
            report.failure = case, failed[case]
            raise failed[case]

    options = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        derandomize=number is None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with form_available(backend):
        while True:
            run: Callable[[], None] = options(given(cases(operator, backend))(attempt))
            try:
                (run if number is None else seed(number)(run))()
            except Exception:
                if report.failure is None:
                    raise
            if number is None or report.failure or time.monotonic() > end:
                return report
            number += 1


@contextmanager
def form_available(backend: str) -> Iterator[None]:
    """A context in which Triton interprets its kernels, if it is Triton's and there is no GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if backend == 'triton' and not torch.cuda.is_available():
            interpret_triton(patch)
        yield


def reproduce(case: Case) -> None:
    """Check one case, as the commands that are printed do."""
    with form_available(case.backend):
        check(case)


def command(case: Case) -> str:
    """A command that repeats a case, in the root of the repository."""
    return f'PYTHONPATH=tests python -c "from fuzz import *; reproduce({case!r})"'


def main(argv: Sequence[str] | None = None) -> int:
    """Search every form of every operator, or those asked for, each for an equal share of the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seconds', type=float, default=600.0, help='of the whole campaign')
    parser.add_argument('--operator', choices=BACKENDS, action='append', help='only this one; may be repeated')
    parser.add_argument('--backend', choices=operator.BACKENDS[1:], action='append', help='likewise')
    parser.add_argument('--seed', type=int, default=0, help='of the first draw')
    args = parser.parse_args(argv)
    pairs = [x for x in PAIRS if x[0] in (args.operator or BACKENDS) and x[1] in (args.backend or operator.BACKENDS)]
    end, reports = time.monotonic() + args.seconds, []
    print(f'{"operator":20} {"backend":8} {"cases":>8}')
    for index, pair in enumerate(pairs):
        share = (end - time.monotonic()) / (len(pairs) - index)
        reports.append(search(*pair, examples=200, seconds=share, first_seed=args.seed))
        print(f'{pair[0]:20} {pair[1]:8} {reports[-1].cases:8}', flush=True)
        if failure := reports[-1].failure:
            print(f'  {type(failure[1]).__name__}: {failure[1]}\n  {command(failure[0])}', flush=True)
    return int(any(report.failure for report in reports))


if __name__ == '__main__':
    sys.exit(main())
