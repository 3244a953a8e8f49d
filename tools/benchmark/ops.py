"""Operations and layers against attention: in groups of one shape, and against the number of tokens."""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn

from aft_vision import ops
from aft_vision.layers import AFTConv, AFTFull, AFTSimple, CausalAttention, CausalLocal, CausalSimple
from tools.benchmark.compare import DIRECTIONS, Candidate, Prepared, compare, deploy, draw, next_to_the_paper
from tools.benchmark.printer import Report
from tools.benchmark.scaling import measure_until, report_fits
from tools.machine import PRECISIONS

CPU = torch.device('cpu')
KERNEL_SIZE = 11
# (B, T, D)
Size = tuple[int, int, int]


class Operation(NamedTuple):
    """An operation of AFT, and causal or whole attention on inputs of the same size.

    Args:
        name: Name of a function of `ops`.
        shape: (B, T, D) of q and v, and of k, which has as many channels for AFT-conv as its kernel has heads.
        heads: Number in the attention.
        bias: Shape of the position bias; of AFT-axial only its heads, as the grid has its lengths.
        bias_dim: Length of the factors that the bias is made from within the call; None takes the bias as it is.
    """

    name: str
    shape: Size
    heads: int
    bias: tuple[int, ...] | None = None
    bias_dim: int | None = None

    @property
    def title(self) -> str:
        """Return the name of its rows, with the heads of a kernel."""
        heads = f', h={self.bias[0]}' if self.bias and self.name in ('aft_conv', 'aft_axial') else ''
        return f'AFT-{self.name.removeprefix("aft_").replace("_", " ")}{heads}'

    @property
    def attention_title(self) -> str:
        """Return the name of the attention that it is compared with."""
        return 'SDPA causal' if self.name.endswith('causal') else 'SDPA'

    def own(self, dtype: torch.dtype, device: torch.device, training: bool) -> Prepared:
        """Return the operation."""
        operate, (_, tokens, dim) = getattr(ops, self.name), self.shape
        rest: tuple[Any, ...] = ()
        shapes: list[tuple[int, ...]] = [self.bias] if self.bias else []
        if self.bias and self.name == 'aft_conv':
            dim, rest = self.bias[0], (grid_of(tokens),)
        elif self.bias and self.name == 'aft_axial':
            dim, rest = self.bias[0], (grid_of(tokens),)
            shapes = [(dim, 2 * side - 1) for side in rest[0]]
        elif self.bias and self.bias_dim:
            shapes = [(self.bias[0], self.bias_dim)] * 2
        inputs = draw_qkv(self.shape, dtype, device, training, dim)
        weights = [0.1 * draw(*shape, seed=seed) for seed, shape in enumerate(shapes, start=3)]
        weights = [x.to(device).requires_grad_(training) for x in weights]
        if rest or len(weights) < 2:
            return Prepared(lambda: operate(*inputs, *weights, *rest), [*inputs, *weights])
        window = self.bias[1] if self.bias and 'local' in self.name else None
        u, v = weights
        make = partial(ops.factorized_bias, u, v, window, causal=window is not None)
        return Prepared(lambda: operate(*inputs, make()), [*inputs, *weights])

    def attention(self, dtype: torch.dtype, device: torch.device, training: bool) -> Prepared:
        """Return fused attention, with the heads taken from the channels and put back."""
        inputs, is_causal = draw_qkv(self.shape, dtype, device, training), self.name.endswith('causal')

        def attend() -> Tensor:
            q, k, v = (x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in inputs)
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(2)

        return Prepared(attend, inputs)


def candidates_of(
    operations: Sequence[Operation], dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> list[Candidate]:
    """Return attention, causal and whole as the operations are, the paper's baseline of the first, and the operations.

    Args:
        operations: Operations of one shape.
        dtype: Dtype of q, k and v.
    """
    calls = {each.attention_title: (each.attention, each.attention_title) for each in operations}
    calls |= {each.title: (each.own, each.attention_title) for each in operations}
    return next_to_the_paper(
        [Candidate(name, partial(make, dtype, device), baseline=other) for name, (make, other) in calls.items()]
    )


def draw_qkv(
    shape: Size, dtype: torch.dtype, device: torch.device, training: bool, key_dim: int | None = None
) -> list[Tensor]:
    """Return q, k and v of a shape (B, T, D); k has `key_dim` channels if that is given."""
    batch, tokens, dim = shape
    drawn = (draw(batch, tokens, width, seed=seed) for seed, width in enumerate((dim, key_dim or dim, dim)))
    return [x.to(device, dtype).requires_grad_(training) for x in drawn]


def grid_of(tokens: int) -> tuple[int, int]:
    """Return the grid of so many tokens that is closest to a square."""
    height = next(side for side in range(math.isqrt(tokens), 0, -1) if tokens % side == 0)
    return height, tokens // height


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure the groups of --groups, or with --tokens the operations at lengths."""
    dtype = PRECISIONS[args.dtype] or torch.float32
    if args.tokens is not None:
        make = partial(token_candidates, dtype=dtype, device=device)
        options = dict(most_seconds=args.most_seconds, directions=DIRECTIONS[args.training :][:1])
        rows = measure_until(make, args.tokens, device, args.rounds, **options)
        return report_fits(rows, 'batch of 1, d = 256, 4 heads of attention; exponents of the upper half')
    rows = []
    for name, shape, candidates in make_groups(args.batch_size, dtype, device):
        if name in args.groups:
            # The layers cast; the operations are given q, k and v of the data type.
            autocast = args.dtype if 'layers' in name else 'float32'
            measured = compare(candidates, device, args.rounds, dtype=autocast, compiled=args.compile, graph=args.graph)
            rows += [{'group': name, 'shape': shape, **row} for row in measured]
    return Report(rows, 'ratios to the first row of a group; kept: for the backward, besides what gets gradients')


def make_groups(
    batch: int | None, dtype: torch.dtype, device: torch.device, tokens: int = 3072
) -> Iterator[tuple[str, Size, list[Candidate]]]:
    """Yield the groups: name, shape of the inputs (B, T, D), and candidates.

    Args:
        batch: B of every group; None is its own.
        tokens: T of the causal groups.
    """
    whole, planar, causal = (batch or 32, 197, 384), (batch or 8, 196, 384), (batch or 2, tokens, 256)
    window = min(256, tokens)
    conv, simple = partial(Operation, 'aft_conv', planar, 6), Operation('aft_simple', planar, 6)
    local = Operation('aft_local_causal', causal, 2, (tokens, window))
    operations = {
        'full': [Operation('aft_full', whole, 6, (197, 197))],
        'conv': [conv((16, 11, 11)), conv((384, 11, 11)), simple],
        'causal': [local, Operation('aft_simple_causal', causal, 2)],
    }
    for name, group in operations.items():
        yield name, group[0].shape, candidates_of(group, dtype, device)
    yield 'layers', planar, planar_layers(planar, (16, 384), device)
    layers: dict[str, Callable[[], nn.Module]] = {
        'causal attention': lambda: CausalAttention(256, tokens, 2),
        'AFT-local causal': lambda: CausalLocal(256, tokens, window, bias_dim=64),
        'AFT-simple causal': lambda: CausalSimple(256),
    }
    yield 'causal_layers', causal, layer_candidates(layers, causal, device)
    for size, heads in [(8, 384), (8, 16), (32, 384), (1, 384)] if batch is None else [(batch, 384)]:
        shape = (size, 196, 384)
        yield 'onehot', shape, onehot_candidates(shape, heads, dtype, device)


def token_candidates(batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> list[Candidate]:
    """Return the operations on sequences, with position biases made from factors as in training."""
    biases = {
        'aft_full': (tokens, tokens),
        'aft_local_causal': (tokens, min(256, tokens)),
        'aft_simple_causal': None,
        'aft_conv': (256, 11, 11),
        'aft_axial': (16,),
    }
    operations = [Operation(name, (batch, tokens, 256), 4, bias, 64) for name, bias in biases.items()]
    return candidates_of(operations, dtype, device)


def planar_layers(shape: Size, heads: tuple[int, ...], device: torch.device = CPU) -> list[Candidate]:
    """Return attention, AFT-full, AFT-simple and AFT-conv with numbers of heads as layers on a square grid."""
    dim = shape[2]
    layers: dict[str, Callable[[], nn.Module]] = {
        'attention': lambda: Attention(dim, dim // 64, qkv_bias=True),
        'AFT-full': lambda: AFTFull(dim, num_tokens=shape[1]),
        'AFT-simple': lambda: AFTSimple(dim),
    }
    for count in heads:
        layers[f'AFT-conv, h={count}'] = partial(AFTConv, dim, num_heads=count, kernel_size=KERNEL_SIZE)
    return layer_candidates(layers, shape, device)


def layer_candidates(layers: dict[str, Callable[[], nn.Module]], shape: Size, device: torch.device) -> list[Candidate]:
    """Return layers as candidates, the paper's baseline of the first one after it."""

    def prepare(name: str, training: bool) -> Prepared:
        layer = layers[name]().to(device).train(training)
        x = draw(*shape).to(device).requires_grad_(training)
        if not training:
            layer = deploy(layer)
        rest = (grid_of(shape[1]),) if getattr(layer, 'on_grid', False) else ()
        return Prepared(lambda: layer(x, *rest), [x, *layer.parameters()])

    return next_to_the_paper([Candidate(name, partial(prepare, name)) for name in layers])


def onehot_candidates(
    shape: Size, heads: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> list[Candidate]:
    """Return AFT-conv with one entry a head in its kernel, `aft_onehot` (AFT Eq. 10) with the same, and AFT-simple."""

    def prepare(name: str, training: bool) -> Prepared:
        q, k, v = draw_qkv(shape, dtype, device, training, heads)
        raw, grid = draw(heads, KERNEL_SIZE, KERNEL_SIZE, seed=3).to(device), grid_of(shape[1])
        if name.startswith('convolution'):
            kernel = ops.hard_kernel(raw).requires_grad_(training)
            return Prepared(lambda: ops.aft_conv(q, k, v, kernel, grid), [q, k, v, kernel])
        offset, weight = ops.onehot_kernel(raw)
        weight.requires_grad_(training)
        return Prepared(lambda: ops.aft_onehot(q, k, v, offset, weight, grid), [q, k, v, weight])

    calls = {name: partial(prepare, name) for name in (f'convolution, h={heads}', f'one-hot, h={heads}')}
    calls['AFT-simple'] = partial(Operation('aft_simple', shape, 1).own, dtype, device)
    return [Candidate(name, call) for name, call in calls.items()]
