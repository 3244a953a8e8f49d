"""The table of goals: what is promised, with its floor and its goal, and how each figure is measured."""

from collections.abc import Iterator

import torch

from tools.benchmark import figures
from tools.benchmark.goals import Goal
from tools.benchmark.operations import Operation
from tools.benchmark.roofline import gpu_goals

TINY, SMALL = 'deit_tiny_patch16_224', 'deit_small_patch16_224'


def make_goals() -> list[Goal]:
    """The table of goals. Those of rows 17 and 18 are open without a CUDA device."""
    return [*_operations(), *_layers(), *_causal(), *_decoding(), *_models(), *gpu_goals()]


def _operations() -> Iterator[Goal]:
    half, what = torch.bfloat16, 'AFT-full op, T=197, against SDPA'
    full = Operation('aft_full', (32, 197, 384), 6, (197, 197))
    yield Goal(1, f'{what}: forward', 1.05, 1.35, figures.speed(full))
    yield Goal(1, f'{what}: forward, bfloat16', 1.7, 2.3, figures.speed(full, half))
    yield Goal(2, f'{what}: training', 0.95, 1.2, figures.speed(full, training=True))
    yield Goal(2, f'{what}: training, bfloat16', 2.2, 2.7, figures.speed(full, half, training=True))
    yield Goal(3, 'its peak memory, forward, over that of SDPA', 2.0, 1.5, figures.memory(full), True)
    yield Goal(3, 'its bytes kept for the backward over those of SDPA', 1.3, 1.0, figures.kept(full), True)


def _layers() -> Iterator[Goal]:
    layer = 'AFT-conv layer, k11, against attention'
    for dim, heads in ((192, 32), (384, 16)):
        what = f'{layer}, d={dim}, h={heads}'
        yield Goal(4, f'{what}: forward', 1.2, 1.5, figures.layer_speed(dim, heads, 32, training=False))
        yield Goal(4, f'{what}: training', 1.2, 1.45, figures.layer_speed(dim, heads, 32, training=True))
    yield Goal(5, f'{layer}, h=d=384: forward', 0.9, 1.6, figures.layer_speed(384, 384, 8, training=False))
    yield Goal(5, f'{layer}, h=d=384: training', 0.95, 1.3, figures.layer_speed(384, 384, 8, training=True))


def _causal() -> Iterator[Goal]:
    what, three = 'AFT-local causal op, T=3072, s=256', _local(3072)
    simple = Operation('aft_simple_causal', (2, 3072, 256), 2)
    exponent = figures.memory_exponent(_local1, (3072, 12288))
    yield Goal(6, f'{what}, against causal SDPA: forward', 2.5, 3.5, figures.speed(three))
    yield Goal(6, f'{what}, against causal SDPA: training', 2.5, 3.2, figures.speed(three, training=True))
    yield Goal(7, f'{what}: forward, bfloat16', 3.5, 4.5, figures.speed(three, torch.bfloat16))
    half = figures.speed(three, torch.bfloat16, training=True)
    yield Goal(7, f'{what}: training, bfloat16', 3.5, 4.5, half)
    yield Goal(7, 'AFT-local causal op, T=16384, s=256: forward', 5, 8, figures.speed(_local1(16384)))
    growth = figures.growth(_local1, 3072)
    yield Goal(8, 'AFT-local causal: time of 6144 tokens over that of 3072', 2.2, 2.05, growth, True, most_rounds=5)
    yield Goal(8, 'its memory as a power of T', 1.1, 1.0, exponent, True)
    yield Goal(9, 'AFT-simple causal op, T=3072: forward', 3.5, 5, figures.speed(simple))
    yield Goal(9, 'AFT-simple causal op, T=3072: training', 7, 9, figures.speed(simple, training=True))


def _decoding() -> Iterator[Goal]:
    local, simple, what = 'aft_local_pixel', 'aft_simple_pixel', 'decoding 3,072 tokens against a KV cache'
    decoding = figures.Decoding()
    for batch, name, floor, goal in ((1, local, 1.5, 2.5), (16, local, 4, 5), (16, simple, 7, 9)):
        kind = name.split('_')[1]
        yield Goal(10, f'{what}: {kind}, B={batch}', floor, goal, decoding.speed(name, batch), most_rounds=5)
    for batch, name in ((1, local), (1, simple), (16, local), (16, simple)):
        kind = name.split('_')[1]
        text = f'decoding, time of a token at t=3071 over t=300: {kind}, B={batch}'
        yield Goal(11, text, 1.15, 1.02, decoding.flatness(name, batch), True, most_rounds=5)


def _models() -> Iterator[Goal]:
    speed, memory, few = figures.model_speed, figures.model_memory, 'aft_conv_tiny_k11_h32'
    yield Goal(12, 'aft_full_tiny against DeiT, inference', 0.97, 1.05, speed('aft_full_tiny', TINY, 16))
    yield Goal(12, 'the same, bfloat16', 1.1, 1.2, speed('aft_full_tiny', TINY, 16, 'bfloat16'))
    yield Goal(13, f'{few}, inference', 1.08, 1.2, speed(few, TINY, 16))
    yield Goal(13, 'the same, bfloat16', 1.25, 1.4, speed(few, TINY, 16, 'bfloat16'))
    yield Goal(13, 'the same, training', 1.08, 1.15, speed(few, TINY, 16, training=True))
    yield Goal(14, 'aft_conv_small (h=384), inference', 0.95, 1.25, speed('aft_conv_small', SMALL, 8))
    yield Goal(14, 'the same, training', 0.75, 1.1, speed('aft_conv_small', SMALL, 8, training=True))
    for name in ('aft_full_tiny', 'aft_conv_tiny'):
        yield Goal(15, f'training memory of {name} over DeiT', 1.25, 1.0, memory(name, TINY, 16), True)
    yield Goal(16, 'one-hot op against the convolution: forward', 1.7, 3, figures.onehot_speed(training=False))
    yield Goal(16, 'one-hot op against the convolution: training', 1.7, 3, figures.onehot_speed(training=True))


def _local(tokens: int, batch: int = 2) -> Operation:
    return Operation('aft_local_causal', (batch, tokens, 256), 2, (tokens, 256))


def _local1(tokens: int) -> Operation:
    return _local(tokens, batch=1)
