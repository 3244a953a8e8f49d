"""Operations and layers against attention: in groups of one shape, and against the number of tokens."""

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.utils import reparameterize_model
from torch import Tensor, nn

from aft_vision import ops
from aft_vision.layers import AFTConv, AFTFull, AFTSimple, CausalAttention, CausalLocal, CausalSimple
from tools.benchmark.compare import DIRECTIONS, Candidate, Prepared, compare, draw, written_out
from tools.benchmark.printer import Report
from tools.benchmark.scaling import TOKENS, Shape, measure_until, report_fits, shapes_of
from tools.machine import PRECISIONS

CPU = torch.device('cpu')
KERNEL_SIZE = 11
MOST_SECONDS = 5.0


class Operation(NamedTuple):
    """An operation of AFT, and causal or whole attention on inputs of the same size.

    Args:
        name: Of a function of `ops`.
        shape: (B, T, D) of q and v, and of k.
        heads: Number in the attention.
        bias: Shape of the position bias, and for AFT-conv its grid.
        key_heads: Channels of AFT-conv's k; None is D.
        bias_dim: Length of the factors that the bias is made from within the call; None takes the bias as it is.
    """

    name: str
    shape: tuple[int, int, int]
    heads: int
    bias: tuple[int, ...] | None = None
    grid: tuple[int, int] | None = None
    key_heads: int | None = None
    bias_dim: int | None = None

    @property
    def attention_name(self) -> str:
        """Return the name of the attention that it is compared with."""
        return 'SDPA causal' if self.name.endswith('causal') else 'SDPA'

    def own(self, dtype: torch.dtype, device: torch.device, training: bool) -> Prepared:
        """Return the operation."""
        inputs = draw_qkv(self.shape, dtype, device, training, self.key_heads)
        operate, rest = getattr(ops, self.name), [] if self.grid is None else [self.grid]
        if self.bias is None:
            return Prepared(lambda: operate(*inputs), inputs)
        shapes = [self.bias] if self.bias_dim is None else [(self.bias[0], self.bias_dim)] * 2
        biases = [0.1 * draw(*shape, seed=seed) for seed, shape in enumerate(shapes, start=3)]
        biases = [x.to(device).requires_grad_(training) for x in biases]
        if self.bias_dim is None:
            return Prepared(lambda: operate(*inputs, *biases, *rest), [*inputs, *biases])
        (u, w), window = biases, self.bias[1] if 'local' in self.name else None
        make = partial(ops.factorized_bias, u, w, window, causal=window is not None)
        return Prepared(lambda: operate(*inputs, make()), [*inputs, u, w])

    def attention(self, dtype: torch.dtype, device: torch.device, training: bool) -> Prepared:
        """Return fused attention, with the heads taken from the channels and put back."""
        inputs, is_causal = draw_qkv(self.shape, dtype, device, training), self.name.endswith('causal')

        def attend() -> Tensor:
            q, k, v = (x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in inputs)
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(2)

        return Prepared(attend, inputs)


def candidates_of(
    operations: dict[str, Operation], dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> list[Candidate]:
    """Return attention, causal and whole as the operations are, the paper's baseline of the first, and the operations.

    Args:
        operations: Of one shape, by the names of their rows.
        dtype: Of q, k and v.
    """
    found = {each.attention_name: each.attention for each in operations.values()}
    attention = [Candidate(name, partial(make, dtype, device), baseline=name) for name, make in found.items()]
    own = [
        Candidate(name, partial(each.own, dtype, device), baseline=each.attention_name)
        for name, each in operations.items()
    ]
    return [*attention, written_out(attention[0]), *own]


def draw_qkv(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, training: bool, key_heads: int | None = None
) -> list[Tensor]:
    """Return q, k and v of a shape (B, T, D); k has `key_heads` channels if that is given."""
    widths = (shape[2], key_heads or shape[2], shape[2])
    return [
        draw(*shape[:2], width, seed=seed).to(device, dtype).requires_grad_(training)
        for seed, width in enumerate(widths)
    ]


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure the groups of --groups, or with --tokens the operations at lengths."""
    dtype = PRECISIONS[args.dtype] or torch.float32
    if args.tokens is not None:
        limit, directions = args.most_seconds or MOST_SECONDS, DIRECTIONS[args.training :][:1]
        make, shapes = partial(token_candidates, dtype=dtype, device=device), shapes_of(args.tokens or TOKENS)
        rows = measure_until(make, shapes, limit, device, args.rounds, directions=directions)
        return report_fits(rows, 'tokens', 'batch of 1, d = 256, 4 heads of attention; exponents of the upper half')
    rows = []
    for name, shape, candidates in make_groups(args.batch_size, dtype, device):
        if args.groups is None or name in args.groups:
            # The layers cast; the operations are given q, k and v of the data type.
            autocast = args.dtype if 'layers' in name else 'float32'
            found = compare(candidates, device, args.rounds, dtype=autocast, compiled=args.compile)
            rows += [{'group': name, 'shape': shape, **row} for row in found]
    return Report(rows, 'ratios to the first row of a group; kept: for the backward, besides what gets gradients')


def make_groups(
    batch: int | None, dtype: torch.dtype, device: torch.device, tokens: int = 3072
) -> Iterator[tuple[str, tuple[int, int, int], list[Candidate]]]:
    """Yield the groups: name, shape of the inputs (B, T, D), and candidates.

    Args:
        batch: B of every group; None is its own.
        tokens: T of the causal groups.
    """
    whole, planar, causal = (batch or 32, 197, 384), (batch or 8, 196, 384), (batch or 2, tokens, 256)
    window = min(256, tokens)
    local = f'AFT-local causal, s={window}'
    yield 'full', whole, candidates_of({'AFT-full': Operation('aft_full', whole, 6, (197, 197))}, dtype, device)
    conv = {
        'AFT-conv, h=16': Operation('aft_conv', planar, 6, (16, 11, 11), (14, 14), 16),
        'AFT-conv, h=d=384': Operation('aft_conv', planar, 6, (384, 11, 11), (14, 14)),
        'AFT-simple': Operation('aft_simple', planar, 6),
    }
    yield 'conv', planar, candidates_of(conv, dtype, device)
    operations = {
        local: Operation('aft_local_causal', causal, 2, (tokens, window)),
        'AFT-simple causal': Operation('aft_simple_causal', causal, 2),
    }
    yield 'causal', causal, candidates_of(operations, dtype, device)
    yield 'layers', planar, planar_layers(planar, (16, 384), device)
    layers: dict[str, Callable[[], nn.Module]] = {
        'causal attention': lambda: CausalAttention(256, tokens, 2),
        local: lambda: CausalLocal(256, tokens, window, bias_dim=64),
        'AFT-simple causal': lambda: CausalSimple(256),
    }
    yield 'causal_layers', causal, layer_candidates(layers, causal, device)
    for size, heads in [(8, 384), (8, 16), (32, 384), (1, 384)] if batch is None else [(batch, 384)]:
        shape = (size, 196, 384)
        yield 'onehot', shape, onehot_candidates(shape, heads, (14, 14), dtype, device)


def token_candidates(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Candidate]:
    """Return the operations on sequences, with position biases made from factors as in training."""
    batch, tokens = shape
    # The grid of so many tokens that is closest to a square.
    height = next(side for side in range(math.isqrt(tokens), 0, -1) if tokens % side == 0)
    make = partial(Operation, shape=(batch, tokens, 256), heads=4)
    operations = {
        'AFT-full': make('aft_full', bias=(tokens, tokens), bias_dim=64),
        'AFT-local causal, s=256': make('aft_local_causal', bias=(tokens, min(256, tokens)), bias_dim=64),
        'AFT-simple causal': make('aft_simple_causal'),
        'AFT-conv, k=11, h=d': make('aft_conv', bias=(256, 11, 11), grid=(height, tokens // height)),
    }
    return candidates_of(operations, dtype, device)


def planar_layers(shape: tuple[int, int, int], heads: tuple[int, ...], device: torch.device = CPU) -> list[Candidate]:
    """Return attention, AFT-full, AFT-simple and AFT-conv with numbers of heads as layers on a square grid."""
    dim = shape[2]
    layers: dict[str, Callable[[], nn.Module]] = {
        'attention': lambda: Attention(dim, dim // 64, qkv_bias=True),
        'AFT-full': lambda: AFTFull(dim, num_tokens=shape[1]),
        'AFT-simple': lambda: AFTSimple(dim),
    }
    for count in heads:
        name = f'AFT-conv, h={"d=" if count == dim else ""}{count}'
        layers[name] = partial(AFTConv, dim, num_heads=count, kernel_size=KERNEL_SIZE)
    return layer_candidates(layers, shape, device)


def layer_candidates(
    layers: dict[str, Callable[[], nn.Module]], shape: tuple[int, int, int], device: torch.device
) -> list[Candidate]:
    """Return layers as candidates, the paper's baseline of the first one after it."""

    def prepare(name: str, training: bool) -> Prepared:
        layer = layers[name]().to(device).train(training)
        x = draw(*shape).to(device).requires_grad_(training)
        if not training:
            layer = reparameterize_model(layer, inplace=True)
        side = math.isqrt(shape[1])
        rest = ((side, side),) if isinstance(layer, AFTConv) else ()
        return Prepared(lambda: layer(x, *rest), [x, *layer.parameters()])

    first, *others = (Candidate(name, partial(prepare, name)) for name in layers)
    return [first, written_out(first), *others]


def onehot_candidates(
    shape: tuple[int, int, int],
    heads: int,
    grid: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> list[Candidate]:
    """Return AFT-conv with one entry a head in its kernel, `aft_onehot` (AFT Eq. 10) with the same, and AFT-simple."""

    def prepare(form: str, training: bool) -> Prepared:
        q, k, v = draw_qkv(shape, dtype, device, training, None if form == 'AFT-simple' else heads)
        raw = draw(heads, KERNEL_SIZE, KERNEL_SIZE, seed=3).to(device)
        kernel, (offset, weight) = ops.hard_kernel(raw).requires_grad_(training), ops.onehot_kernel(raw)
        weight.requires_grad_(training)
        if form == 'AFT-simple':
            return Prepared(lambda: ops.aft_simple(q, k, v), [q, k, v])
        if form.startswith('one-hot'):
            return Prepared(lambda: ops.aft_onehot(q, k, v, offset, weight, grid), [q, k, v, weight])
        return Prepared(lambda: ops.aft_conv(q, k, v, kernel, grid), [q, k, v, kernel])

    names = (f'convolution, h={heads}', f'one-hot, h={heads}', 'AFT-simple')
    return [Candidate(name, partial(prepare, name)) for name in names]
