"""What this project promises in speed and memory, each figure with a floor that must hold and a goal."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.utils import reparameterize_model
from torch import Tensor, nn
from tqdm import tqdm

from aft_vision import ops
from aft_vision.layers import AFTConv
from aft_vision.timing import Timing, time_interleaved
from tools.benchmark.memory import peak_memory, saved_memory
from tools.benchmark.onehot import Shape, measure_onehot, with_backward
from tools.machine import autocast

Call = Callable[[], object]
CPU = torch.device('cpu')


class Figure(NamedTuple):
    """A measured figure, with its quartiles over the rounds where it is a time."""

    value: float
    quartiles: tuple[float, float] | None = None


class Goal(NamedTuple):
    """One promise.

    Args:
        row: Of the table of goals; figures of one row belong together.
        measure: Makes the figure, of a number of rounds; None where the device for it is missing.
        at_most: Whether less is better.
    """

    row: int
    what: str
    floor: float
    goal: float
    measure: Callable[[int], Figure] | None
    at_most: bool = False

    def verdict(self, figure: Figure | None) -> str:
        """`goal`, `floor`, `below`, or `open` where nothing was measured."""
        if figure is None:
            return 'open'
        for name, bound in (('goal', self.goal), ('floor', self.floor)):
            if (figure.value <= bound) if self.at_most else (figure.value >= bound):
                return name
        return 'below'


class Operation(NamedTuple):
    """An operation of AFT and causal or whole attention on inputs of the same size.

    Args:
        name: Of a function of `ops`.
        shape: (B, T, D) of q, k and v.
        heads: Of the attention.
        bias: Shape of the position bias, and for AFT-conv its grid.
    """

    name: str
    shape: tuple[int, int, int]
    heads: int
    bias: tuple[int, ...] | None = None
    grid: tuple[int, int] | None = None

    def calls(self, dtype: torch.dtype = torch.float32, training: bool = False) -> tuple[Call, Call]:
        """Attention, and the operation: the forward, or forward and backward."""
        generator = torch.Generator().manual_seed(0)
        leaves = [torch.randn(self.shape, generator=generator).to(dtype) for _ in 'qkv']
        rest: list[Any] = [] if self.bias is None else [0.1 * torch.randn(self.bias, generator=generator)]
        inputs = [*leaves, *rest]
        for x in inputs if training else ():
            x.requires_grad_()
        arguments = inputs if self.grid is None else [*inputs, self.grid]

        def attend() -> Tensor:
            heads = [x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in leaves]
            y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=self.name.endswith('causal'))
            return y.transpose(1, 2).flatten(2)

        def operate() -> Tensor:
            return getattr(ops, self.name)(*arguments)

        if not training:
            return torch.no_grad()(attend), torch.no_grad()(operate)
        return with_backward(attend, leaves), with_backward(operate, inputs)

    def speed(self, dtype: torch.dtype = torch.float32, training: bool = False) -> Callable[[int], Figure]:
        """Time of attention over that of the operation."""

        def measure(rounds: int) -> Figure:
            attend, operate = self.calls(dtype, training)
            return _faster(attend, operate, rounds)

        return measure

    def memory(self) -> Callable[[int], Figure]:
        """Peak of the forward over that of attention."""

        def measure(rounds: int) -> Figure:
            theirs, own = (peak_memory(call, CPU) for call in self.calls())
            return Figure(own / theirs)

        return measure

    def kept(self) -> Callable[[int], Figure]:
        """What is kept for the backward over what attention keeps."""

        def measure(rounds: int) -> Figure:
            leaves = [torch.randn(self.shape, requires_grad=True) for _ in 'qkv']
            # Inputs count: attention and the operation are given the same.
            inputs = [*(2 * x for x in leaves), *([torch.zeros(self.bias, requires_grad=True)] if self.bias else [])]
            heads = [x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in inputs[:3]]
            own = saved_memory(lambda: getattr(ops, self.name)(*inputs), inputs[3:])
            return Figure(own / saved_memory(lambda: F.scaled_dot_product_attention(heads[0], heads[1], heads[2])))

        return measure


def layer_speed(dim: int, heads: int, batch: int, training: bool) -> Callable[[int], Figure]:
    """Time of a multi-head attention layer over that of an AFT-conv layer, kernel 11, on a 14 x 14 grid."""

    def measure(rounds: int) -> Figure:
        grid = (14, 14)
        x = torch.randn(batch, grid[0] * grid[1], dim)
        attention, conv = Attention(dim, dim // 64, qkv_bias=True), AFTConv(dim, num_heads=heads, kernel_size=11)

        def attend() -> Tensor:
            return attention(x)

        def mix() -> Tensor:
            return conv(x, grid)

        if training:
            x.requires_grad_()
            theirs = with_backward(attend, [x, *attention.parameters()])
            return _faster(theirs, with_backward(mix, [x, *conv.parameters()]), rounds)
        reparameterize_model(conv.eval(), inplace=True)
        with torch.inference_mode():
            return _faster(attend, mix, rounds)

    return measure


def model_speed(
    name: str, baseline: str, batch: int, dtype: str = 'float32', training: bool = False
) -> Callable[[int], Figure]:
    """Time of a model of timm over that of one of ours, at 224 px."""

    def measure(rounds: int) -> Figure:
        models = [timm.create_model(each).train(training) for each in (baseline, name)]
        images = torch.randn(batch, 3, 224, 224)
        if training:
            theirs, ours = (_training_step(model, images) for model in models)
            return _faster(theirs, ours, rounds)
        theirs, ours = map(reparameterize_model, models)
        with torch.inference_mode(), autocast(CPU, dtype):
            return _faster(lambda: theirs(images), lambda: ours(images), rounds)

    return measure


def model_memory(name: str, baseline: str, batch: int) -> Callable[[int], Figure]:
    """Peak of a training step of one of our models over that of one of timm."""

    def measure(rounds: int) -> Figure:
        images = torch.randn(batch, 3, 224, 224)
        own, theirs = (peak_memory(_training_step(timm.create_model(each), images), CPU) for each in (name, baseline))
        return Figure(own / theirs)

    return measure


def growth(operation: Callable[[int], Operation], tokens: int) -> Callable[[int], Figure]:
    """Time of twice the tokens over that of the tokens."""
    return lambda rounds: _faster(operation(2 * tokens).calls()[1], operation(tokens).calls()[1], rounds)


def memory_exponent(operation: Callable[[int], Operation], lengths: Sequence[int]) -> Callable[[int], Figure]:
    """The power of the tokens that the peak of the forward grows with; 1 is linear."""

    def measure(rounds: int) -> Figure:
        peaks = [math.log(peak_memory(operation(length).calls()[1], CPU)) for length in lengths]
        return Figure((peaks[-1] - peaks[0]) / math.log(lengths[-1] / lengths[0]))

    return measure


def onehot_speed(training: bool) -> Callable[[int], Figure]:
    """Time of AFT-conv over that of the operation with one offset a head, of the same result."""

    def measure(rounds: int) -> Figure:
        direction = 'forward and backward' if training else 'forward'
        rows = measure_onehot(CPU, 'float32', rounds, (Shape(8, 384, 384),))
        row = next(row for row in rows if (row['direction'], row['form']) == (direction, 'one-hot'))
        return Figure(row['ratio'], row['ratio_quartiles'])

    return measure


def measure_goals(goals: Sequence[Goal], rounds: int, progress: bool = False) -> list[dict[str, Any]]:
    """Measure every goal.

    Returns:
        A row for each: `row`, `what`, `floor`, `goal`, `at_most`, `measured` (None where open), `quartiles`, `verdict`.
    """
    rows = []
    for goal in tqdm(goals, desc='goals', unit='figure', leave=False, disable=not progress):
        figure = None if goal.measure is None else goal.measure(rounds)
        row = {name: value for name, value in goal._asdict().items() if name != 'measure'}
        found = {'measured': figure and figure.value, 'quartiles': figure and figure.quartiles}
        rows.append({**row, **found, 'verdict': goal.verdict(figure)})
    return rows


def format_goals(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [f'{"row":>3} {"what":66} {"floor":>6} {"goal":>6} {"measured":>8} {"quartiles":>13}']
    for row in rows:
        value = '' if row['measured'] is None else f'{row["measured"]:8.2f}'
        quartiles = '' if row['quartiles'] is None else '{:.2f} - {:.2f}'.format(*row['quartiles'])
        sign = '<' if row['at_most'] else ' '
        bounds = f'{sign}{row["floor"]:5.2f} {sign}{row["goal"]:5.2f}'
        lines.append(f'{row["row"]:3} {row["what"]:66} {bounds} {value:8} {quartiles:>13} {row["verdict"]}')
    return '\n'.join(lines)


def _training_step(model: nn.Module, images: Tensor) -> Call:
    return with_backward(lambda: model(images), [x for x in model.parameters() if x.requires_grad])


def _faster(baseline: Call, candidate: Call, rounds: int) -> Figure:
    timing: Timing = time_interleaved([baseline, candidate], CPU, rounds)[1]
    return Figure(timing.ratio, timing.quartiles)


def _full(tokens: int = 197) -> Operation:
    return Operation('aft_full', (32, tokens, 384), 6, (tokens, tokens))


def _local(tokens: int, batch: int = 2) -> Operation:
    return Operation('aft_local_causal', (batch, tokens, 256), 2, (tokens, 256))


def make_goals() -> list[Goal]:
    """The table of goals. GPU figures need the kernels of a GPU, and are open."""
    half = torch.bfloat16
    simple = Operation('aft_simple_causal', (2, 3072, 256), 2)
    tiny, small = 'deit_tiny_patch16_224', 'deit_small_patch16_224'
    full_op, local_op = 'AFT-full op, T=197, against SDPA', 'AFT-local causal op, T=3072, s=256'
    layer = 'AFT-conv layer, k11, against attention'
    goals = [
        Goal(1, f'{full_op}: forward', 1.05, 1.35, _full().speed()),
        Goal(1, f'{full_op}: forward, bfloat16', 1.7, 2.3, _full().speed(half)),
        Goal(2, f'{full_op}: training', 0.95, 1.2, _full().speed(training=True)),
        Goal(2, f'{full_op}: training, bfloat16', 2.2, 2.7, _full().speed(half, training=True)),
        Goal(3, 'its peak memory, forward, over that of SDPA', 2.0, 1.5, _full().memory(), at_most=True),
        Goal(3, 'its bytes kept for the backward over those of SDPA', 1.3, 1.0, _full().kept(), at_most=True),
    ]
    for dim, heads in ((192, 32), (384, 16)):
        what = f'{layer}, d={dim}, h={heads}'
        goals.append(Goal(4, f'{what}: forward', 1.2, 1.5, layer_speed(dim, heads, 32, training=False)))
        goals.append(Goal(4, f'{what}: training', 1.2, 1.45, layer_speed(dim, heads, 32, training=True)))
    return [
        *goals,
        Goal(5, f'{layer}, h=d=384: forward', 0.9, 1.6, layer_speed(384, 384, 8, training=False)),
        Goal(5, f'{layer}, h=d=384: training', 0.95, 1.3, layer_speed(384, 384, 8, training=True)),
        Goal(6, f'{local_op}, against causal SDPA: forward', 2.5, 3.5, _local(3072).speed()),
        Goal(6, f'{local_op}, against causal SDPA: training', 2.5, 3.2, _local(3072).speed(training=True)),
        Goal(7, f'{local_op}: forward, bfloat16', 3.5, 4.5, _local(3072).speed(half)),
        Goal(7, 'the same, T=16384: forward', 5, 8, _local(16384, batch=1).speed()),
        Goal(8, 'AFT-local causal: time of 6144 tokens over that of 3072', 2.2, 2.05, growth(_local1, 3072), True),
        Goal(8, 'its memory as a power of T', 1.1, 1.0, memory_exponent(_local1, (3072, 12288)), at_most=True),
        Goal(9, 'AFT-simple causal op, T=3072: forward', 3.5, 5, simple.speed()),
        Goal(9, 'AFT-simple causal op, T=3072: training', 7, 9, simple.speed(training=True)),
        Goal(12, 'aft_full_tiny against DeiT, inference', 0.97, 1.05, model_speed('aft_full_tiny', tiny, 16)),
        Goal(12, 'the same, bfloat16', 1.1, 1.2, model_speed('aft_full_tiny', tiny, 16, 'bfloat16')),
        Goal(13, 'aft_conv_tiny_k11_h32, inference', 1.08, 1.2, model_speed('aft_conv_tiny_k11_h32', tiny, 16)),
        Goal(13, 'the same, bfloat16', 1.25, 1.4, model_speed('aft_conv_tiny_k11_h32', tiny, 16, 'bfloat16')),
        Goal(13, 'the same, training', 1.08, 1.15, model_speed('aft_conv_tiny_k11_h32', tiny, 16, training=True)),
        Goal(14, 'aft_conv_small (h=384), inference', 0.95, 1.25, model_speed('aft_conv_small', small, 8)),
        Goal(14, 'the same, training', 0.75, 1.1, model_speed('aft_conv_small', small, 8, training=True)),
        Goal(
            15, 'training memory of aft_full_tiny over DeiT', 1.25, 1.0, model_memory('aft_full_tiny', tiny, 16), True
        ),
        Goal(
            15, 'training memory of aft_conv_tiny over DeiT', 1.25, 1.0, model_memory('aft_conv_tiny', tiny, 16), True
        ),
        Goal(16, 'one-hot op against the convolution: forward', 1.7, 3, onehot_speed(training=False)),
        Goal(16, 'one-hot op against the convolution: training', 1.7, 3, onehot_speed(training=True)),
        Goal(17, 'GPU: full, conv, local against flash attention', 1.0, 1.2, None),
        Goal(18, 'GPU: share of the roofline', 0.4, 0.7, None),
    ]


def _local1(tokens: int) -> Operation:
    return _local(tokens, batch=1)
