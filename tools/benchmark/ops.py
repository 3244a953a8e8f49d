"""Operations and layers against attention: in groups of one shape, and against the number of tokens."""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.utils import reparameterize_model
from torch import Tensor, nn

from aft_vision import ops
from aft_vision.layers import AFTConv, AFTFull, AFTSimple, CausalAttention, CausalLocal, CausalSimple
from tools.benchmark import scaling
from tools.benchmark.compare import (
    DIRECTIONS,
    Candidate,
    Prepared,
    compare,
    materialised,
    most_bytes,
    with_backward,
    written_out,
)
from tools.benchmark.printer import Report, plot_curves
from tools.benchmark.times import Call
from tools.machine import PRECISIONS

CPU = torch.device('cpu')
KERNEL_SIZE = 11
# Of the candidates at lengths T.
DIM, HEADS, WINDOW, BIAS_DIM = 256, 4, 256, 64
# (T, T) float32 matrices that are held at once, by the least count; twice as many in training.
MATRICES = {'SDPA math': 2 * HEADS, 'AFT-full': 1}


class Size(NamedTuple):
    """The size of the groups.

    Args:
        batch: B of all; None is 32 for `full`, 2 for the causal groups, and else 8.
        dim: D; two thirds of it in the causal groups.
        grid: (H, W).
        tokens: T of the causal groups.
    """

    batch: int | None = None
    dim: int = 384
    grid: tuple[int, int] = (14, 14)
    tokens: int = 3072


class Operation(NamedTuple):
    """An operation of AFT, and causal or whole attention on inputs of the same size.

    Args:
        name: Of a function of `ops`.
        shape: (B, T, D) of q and v, and of k.
        heads: Of the attention.
        bias: Shape of the position bias, and for AFT-conv its grid.
        key_heads: Channels of AFT-conv's k; None is D.
    """

    name: str
    shape: tuple[int, int, int]
    heads: int
    bias: tuple[int, ...] | None = None
    grid: tuple[int, int] | None = None
    key_heads: int | None = None

    def own(self, dtype: torch.dtype = torch.float32, training: bool = False, device: torch.device = CPU) -> Prepared:
        """Return the operation."""
        inputs = draw(self.shape, dtype, training, device, self.key_heads)
        if self.bias is not None:
            bias = 0.1 * torch.randn(self.bias, generator=torch.Generator().manual_seed(1))
            inputs.append(bias.to(device).requires_grad_(training))
        operate, rest = getattr(ops, self.name), [] if self.grid is None else [self.grid]
        return Prepared(lambda: operate(*inputs, *rest), inputs)

    def attention(
        self, dtype: torch.dtype = torch.float32, training: bool = False, device: torch.device = CPU
    ) -> Prepared:
        """Return fused attention, with the heads taken from the channels and put back."""
        return attention(draw(self.shape, dtype, training, device), self.heads, self.name.endswith('causal'))

    def calls(
        self,
        dtype: torch.dtype = torch.float32,
        training: bool = False,
        device: torch.device = CPU,
        with_paper: bool = True,
    ) -> tuple[Call, ...]:
        """Return the calls of attention, the operation, and materialised attention: the forward, or with backward.

        Args:
            with_paper: Without it there is no materialised attention, whose forward runs once to make its backward.
        """
        attention, own = self.attention(dtype, training, device), self.own(dtype, training, device)
        found = [attention, own]
        if with_paper:
            found.append(Prepared(materialised(attention.forward), attention.leaves))
        if training:
            return tuple(with_backward(each.forward, each.leaves) for each in found)
        return tuple(torch.no_grad()(each.forward) for each in found)


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure the groups of --groups, or with --tokens the operations at lengths."""
    if args.tokens is not None:
        return run_tokens(args, device)
    rows: list[dict[str, Any]] = []
    for name in args.groups or GROUPS:
        for group in GROUPS[name](Size(args.batch_size), args.dtype, device):
            rows += [{'group': name, **row} for row in measure_group(group, device, args)]
    head = 'ratios to the first row of a group; kept: for the backward, besides what gets gradients'
    return Report(rows, head)


class Group(NamedTuple):
    """Candidates on inputs of one shape (B, T, D).

    Args:
        autocasts: Whether --dtype is that of autocast; else it is that of q, k and v, made so.
        differences: Of the results to the first one's, by name.
    """

    shape: tuple[int, int, int]
    candidates: list[Candidate]
    autocasts: bool = False
    differences: dict[str, float] | None = None


def measure_group(group: Group, device: torch.device, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a group: the rows of `compare` with its `shape`, and `difference` where the group says it."""
    dtype = args.dtype if group.autocasts else 'float32'
    rows = compare(group.candidates, device, args.rounds, dtype=dtype, compiled=args.compile)
    differences = group.differences or {}
    return [{'shape': group.shape, **row, 'difference': differences.get(row['name'])} for row in rows]


def operation_group(kind: str, size: Size, dtype: str, device: torch.device) -> Iterator[Group]:
    """Yield operations against SDPA: `full` with a class token, `conv` on a grid, or `causal`."""
    dim, grid, kernel, few = size.dim, size.grid, (KERNEL_SIZE, KERNEL_SIZE), size.dim // 24
    tokens, window = math.prod(grid), min(WINDOW, size.tokens)
    whole, planar = (size.batch or 32, tokens + 1, dim), (size.batch or 8, tokens, dim)
    causal, heads = (size.batch or 2, size.tokens, dim * 2 // 3), dim // 64
    low = PRECISIONS[dtype] or torch.float32
    operations = {
        'full': {'AFT-full': Operation('aft_full', whole, heads, (tokens + 1, tokens + 1))},
        'conv': {
            f'AFT-conv, h={few}': Operation('aft_conv', planar, heads, (few, *kernel), grid, few),
            f'AFT-conv, h=d={dim}': Operation('aft_conv', planar, heads, (dim, *kernel), grid),
            'AFT-simple': Operation('aft_simple', planar, heads),
        },
        'causal': {
            f'AFT-local causal, s={window}': Operation('aft_local_causal', causal, 2, (size.tokens, window)),
            'AFT-simple causal': Operation('aft_simple_causal', causal, 2),
        },
    }[kind]
    first = next(iter(operations.values()))
    makers: dict[str, Callable[..., Prepared]] = {'SDPA': partial(first.attention, low)}
    makers |= {name: partial(each.own, low) for name, each in operations.items()}
    if kind == 'conv':
        makers['AFT-conv, one offset a head, h=d'] = partial(one_offset, planar, grid, low)
        makers[f'conv2d, depthwise {KERNEL_SIZE} x {KERNEL_SIZE}'] = partial(depthwise, planar, grid, low)
    fused, *own = (Candidate(name, partial(make, device=device)) for name, make in makers.items())
    yield Group(first.shape, [fused, written_out(fused), *own])


def layer_group(kind: str, size: Size, dtype: str, device: torch.device) -> Iterator[Group]:
    """Yield layers, projections included: `layers` on a grid, or `causal_layers`."""
    dim, narrow, few = size.dim, size.dim * 2 // 3, size.dim // 24
    tokens, window = math.prod(size.grid), min(WINDOW, size.tokens)
    planar: dict[str, Callable[[], nn.Module]] = {
        'attention': lambda: Attention(dim, dim // 64, qkv_bias=True),
        'AFT-full': lambda: AFTFull(dim, num_tokens=tokens),
        f'AFT-conv, h={few}': lambda: AFTConv(dim, num_heads=few, kernel_size=KERNEL_SIZE),
        f'AFT-conv, h=d={dim}': lambda: AFTConv(dim, num_heads=dim, kernel_size=KERNEL_SIZE),
        'AFT-simple': lambda: AFTSimple(dim),
    }
    causal: dict[str, Callable[[], nn.Module]] = {
        'causal attention': lambda: CausalAttention(narrow, size.tokens, 2),
        f'AFT-local causal, s={window}': lambda: CausalLocal(narrow, size.tokens, window, bias_dim=64),
        'AFT-simple causal': lambda: CausalSimple(narrow),
    }
    layers, shape = (planar, (size.batch or 8, tokens, dim))
    if kind == 'causal_layers':
        layers, shape = (causal, (size.batch or 2, size.tokens, narrow))

    def prepare(name: str, training: bool) -> Prepared:
        layer = layers[name]().to(device).train(training)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_(training)
        if not training:
            layer = reparameterize_model(layer, inplace=True)
        rest = (size.grid,) if isinstance(layer, AFTConv) else ()
        return Prepared(lambda: layer(x, *rest), [x, *layer.parameters()])

    first, *others = (Candidate(name, partial(prepare, name)) for name in layers)
    yield Group(shape, [first, written_out(first), *others], autocasts=True)


def onehot_groups(size: Size, dtype: str, device: torch.device) -> Iterator[Group]:
    """Yield the operation with one offset a head (AFT Eq. 10), the convolution that it stands for, and the bound."""
    dim = size.dim
    shapes = [(8, dim), (8, dim // 24), (32, dim), (1, dim)] if size.batch is None else [(size.batch, dim)]
    for batch, heads in shapes:
        yield onehot_group((batch, math.prod(size.grid), dim), heads, size.grid, dtype, device)


def onehot_group(
    shape: tuple[int, int, int], heads: int, grid: tuple[int, int], dtype: str = 'float32', device: torch.device = CPU
) -> Group:
    """Return AFT-conv with one entry a head in its kernel, `aft_onehot` with the same, and AFT-simple."""
    low = PRECISIONS[dtype] or torch.float32
    q, k, v = draw(shape, low, True, device, heads)
    (full_k,) = draw(shape, low, True, device)[1:2]
    raw = torch.randn(heads, KERNEL_SIZE, KERNEL_SIZE, generator=torch.Generator().manual_seed(1)).to(device)
    kernel, (offset, weight) = ops.hard_kernel(raw).requires_grad_(), ops.onehot_kernel(raw)
    weight.requires_grad_()
    forms = {
        f'convolution, h={heads}': Prepared(lambda: ops.aft_conv(q, k, v, kernel, grid), [q, k, v, kernel]),
        f'one-hot, h={heads}': Prepared(lambda: ops.aft_onehot(q, k, v, offset, weight, grid), [q, k, v, weight]),
        'AFT-simple': Prepared(lambda: ops.aft_simple(q, full_k, v), [q, full_k, v]),
    }
    with torch.no_grad():
        expected, found = (prepared.forward() for prepared in list(forms.values())[:2])
    difference = ((found - expected).norm() / expected.norm()).item()
    candidates = [Candidate(name, lambda training, form=form: form) for name, form in forms.items()]  # type: ignore[misc]
    return Group(shape, candidates, differences={f'one-hot, h={heads}': difference})


GROUPS: dict[str, Callable[[Size, str, torch.device], Iterator[Group]]] = {
    **{kind: partial(operation_group, kind) for kind in ('full', 'conv', 'causal')},
    **{kind: partial(layer_group, kind) for kind in ('layers', 'causal_layers')},
    'onehot': onehot_groups,
}


def run_tokens(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure the operations at lengths T, and fit time and memory as powers of T."""
    limit = scaling.Limit(args.most_seconds, most_bytes(args.most_gib, device))
    directions = DIRECTIONS[1:] if args.training else DIRECTIONS[:1]
    rows = measure_tokens(args.tokens or scaling.TOKENS, limit, device, args.dtype, args.rounds, directions)
    fits = scaling.fit_rows(rows, 'tokens', ('milliseconds', 'peak_bytes'))
    head = f'batch of 1, d = {DIM}, {HEADS} heads of attention; exponents of the upper half'
    return Report(rows, head, fits, partial(plot_curves, rows, fits, 'tokens', head))


def measure_tokens(
    tokens: Sequence[int],
    limit: scaling.Limit,
    device: torch.device,
    dtype: str,
    rounds: int,
    directions: Sequence[str] = DIRECTIONS[:1],
) -> list[dict[str, Any]]:
    """Measure the candidates of `token_candidates` at lengths; returns the rows of `measure_until`."""

    def guess(name: str, shape: scaling.Shape) -> float:
        matrices = next((count for start, count in MATRICES.items() if name.startswith(start)), 0)
        return 4.0 * matrices * (1 + ('training' in directions)) * shape.tokens**2

    def make(shape: scaling.Shape) -> list[Candidate]:
        return token_candidates(shape.tokens, PRECISIONS[dtype] or torch.float32, device)

    shapes = [scaling.Shape(1, length) for length in scaling.ascending_lengths(tokens)]
    return scaling.measure_until(make, shapes, limit, device, rounds, directions=directions, guess=guess)


def token_candidates(tokens: int, dtype: torch.dtype, device: torch.device) -> list[Candidate]:
    """Return the operations on one sequence, with position biases made from factors as in training."""
    # The grid of so many tokens that is closest to a square.
    height = next(side for side in range(math.isqrt(tokens), 0, -1) if tokens % side == 0)

    def inputs(training: bool) -> tuple[list[Tensor], list[Tensor]]:
        factors = [0.1 * torch.randn(tokens, BIAS_DIM, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
        return draw((1, tokens, DIM), dtype, training, device), [x.to(device).requires_grad_(training) for x in factors]

    def attend(training: bool, causal: bool = False) -> Prepared:
        return attention(inputs(training)[0], HEADS, causal)

    def full(training: bool) -> Prepared:
        (q, k, v), (u, w) = inputs(training)
        return Prepared(lambda: ops.aft_full(q, k, v, ops.factorized_bias(u, w)), [q, k, v, u, w])

    def local(training: bool) -> Prepared:
        (q, k, v), (u, w) = inputs(training)
        window = min(WINDOW, tokens)

        def operate() -> Tensor:
            return ops.aft_local_causal(q, k, v, ops.factorized_bias(u, w, window, causal=True))

        return Prepared(operate, [q, k, v, u, w])

    def simple(training: bool) -> Prepared:
        q, k, v = inputs(training)[0]
        return Prepared(lambda: ops.aft_simple_causal(q, k, v), [q, k, v])

    def conv(training: bool) -> Prepared:
        q, k, v = inputs(training)[0]
        kernel = 0.1 * torch.randn(DIM, KERNEL_SIZE, KERNEL_SIZE, generator=torch.Generator().manual_seed(1))
        kernel = kernel.to(device).requires_grad_(training)
        return Prepared(lambda: ops.aft_conv(q, k, v, kernel, (height, tokens // height)), [q, k, v, kernel])

    causal = 'SDPA causal'
    return [
        Candidate('SDPA', attend),
        Candidate(causal, partial(attend, causal=True)),
        written_out(Candidate('SDPA', attend)),
        Candidate('AFT-full', full),
        Candidate(f'AFT-local causal, s={WINDOW}', local, baseline=causal),
        Candidate('AFT-simple causal', simple, baseline=causal),
        Candidate(f'AFT-conv, k={KERNEL_SIZE}, h=d', conv),
    ]


def draw(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    training: bool,
    device: torch.device,
    key_heads: int | None = None,
) -> list[Tensor]:
    """Return q, k and v of a shape (B, T, D); k has `key_heads` channels if that is given."""
    batch, tokens, dim = shape
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(batch, tokens, width, generator=generator) for width in (dim, key_heads or dim, dim)]
    return [x.to(device, dtype).requires_grad_(training) for x in inputs]


def attention(qkv: list[Tensor], heads: int, causal: bool = False) -> Prepared:
    """Return attention of q, k and v (B, T, D), with the heads taken from the channels and put back."""

    def attend() -> Tensor:
        q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)

    return Prepared(attend, qkv)


def one_offset(
    shape: tuple[int, int, int], grid: tuple[int, int], dtype: torch.dtype, training: bool, device: torch.device
) -> Prepared:
    """Return `ops.aft_onehot` with a head for each channel."""
    q, k, v = draw(shape, dtype, training, device)
    generator = torch.Generator().manual_seed(0)
    offset = torch.randint(-(KERNEL_SIZE // 2), KERNEL_SIZE // 2 + 1, (shape[2], 2), generator=generator).to(device)
    weight = torch.randn(shape[2], generator=generator).to(device).requires_grad_(training)
    return Prepared(lambda: ops.aft_onehot(q, k, v, offset, weight, grid), [q, k, v, weight])


def depthwise(
    shape: tuple[int, int, int], grid: tuple[int, int], dtype: torch.dtype, training: bool, device: torch.device
) -> Prepared:
    """Return `F.conv2d` with a kernel for each channel on tokens (B, T, D), which are a channels-last map already."""
    x = draw(shape, dtype, training, device)[0]
    weight = torch.randn(shape[2], 1, KERNEL_SIZE, KERNEL_SIZE, generator=torch.Generator().manual_seed(0))
    weight = weight.to(device, dtype).requires_grad_(training)

    def convolve() -> Tensor:
        maps = x.unflatten(1, grid).permute(0, 3, 1, 2)
        return F.conv2d(maps, weight, padding=KERNEL_SIZE // 2, groups=shape[2]).permute(0, 2, 3, 1).flatten(1, 2)

    return Prepared(convolve, [x, weight])
