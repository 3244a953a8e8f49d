"""The memory of the compiled kernels: nothing is read or written outside a tensor, and a lack of it is Python's error.

`make sanitize` runs this with the kernels built for AddressSanitizer, which sees their own memory and results too.
"""

import ctypes
import mmap
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_inputs, plain, randn
from torch import Tensor

from aft_vision import ops
from aft_vision.ops.common import build, cpp
from aft_vision.ops.declaration import OPERATIONS

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures('compiled')]

PAGE = mmap.PAGESIZE
Place = Callable[[Tensor], Tensor]


def protect(x: Tensor, at_end: bool) -> Tensor:
    """A copy whose last element ends, or whose first begins, at a page that ends the process when it is touched."""
    size = x.numel() * x.element_size()
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages + 1):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + page * PAGE), ctypes.c_size_t(PAGE), 0) == 0
    offset = (pages + 1) * PAGE - size if at_end else PAGE
    return torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape).copy_(x)


PLACES: dict[str, Place] = {
    'before_a_page': lambda x: protect(x, at_end=True),
    'after_a_page': lambda x: protect(x, at_end=False),
}


def make_mask(B: int, T: int) -> Tensor:
    mask = randn(B, T, seed=5) > -0.5
    mask[0, 0] = True
    return mask


def operators(D: int) -> list[str]:
    """Names of the operations with a form in C++, over D channels."""
    return [name for name, x in OPERATIONS.items() if x.form('cpp') and (D > 64 or name != 'aft_onehot')]


def run_operator(name: str, D: int, dtype: torch.dtype, masked: bool, fused: bool, place: Place) -> list[Tensor]:
    """Forward and backward by the C++ form, of 27 tokens, 3 x 9."""
    # A head for each channel, in `depthwise.cpp`, or few.
    heads = D if D > 64 and name != 'aft_axial' else 3 if D % 3 == 0 else 1
    s = {'aft_axial': (2, 6), 'aft_local_causal': 4}.get(name, 5)
    q, k, v, *own = plain(make_inputs(name, (3, 9), D, s, heads)).values()
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if fused:
        q, k, v = place(torch.cat([q, k, v], -1)).split((D, k.shape[2], D), -1)
    else:
        q, k, v = map(place, (q, k, v))
    own = [place(x) if isinstance(x, Tensor) else x for x in own]
    mask = place(make_mask(2, 27)) if masked else None
    inputs = (*OPERATIONS[name].inputs(q, k, v, *own)._replace(mask=mask),)
    operator, backward = (getattr(torch.ops.aft_vision, f'{name}{suffix}') for suffix in ('', '_backward'))
    with warnings.catch_warnings():
        # Of a form that does not run here.
        warnings.simplefilter('error')
        y, saved = operator(*inputs, True, 'cpp')
        grad = place(randn(*y.shape, seed=9).to(dtype))
        saved = place(saved) if saved.numel() else saved
        grads = backward(grad, place(y), saved, *inputs, bool(own), 'cpp')
    return [y, *grads]


OPERATORS = [(D, name) for D in (1, 9, 35, 75) for name in operators(D)]


@pytest.mark.parametrize('place', PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(('D', 'name'), OPERATORS)
def test_an_operator_stays_within_its_tensors(name: str, D: int, place: Place):
    tiles = cpp.multiply_bfloat16_as(cpp.TILES)
    for dtype, context in ((torch.float32, nullcontext()), (torch.bfloat16, nullcontext()), (torch.bfloat16, tiles)):
        with context:
            for masked, fused in ((False, False), (True, True)):
                found = run_operator(name, D, dtype, masked, fused, place)
                expected = run_operator(name, D, dtype, masked, fused, lambda x: x)
                assert all(map(torch.equal, found, expected))


def run_steps(dim: int, batch: int, place: Place) -> Iterator[list[Tensor]]:
    """The result of every step, and of a decoder with every mixer, for each token, and the states after it."""
    window, row = 5, place(randn(5, seed=7).float())
    u, v = (place(x) for x in randn(2, 99, 3, seed=8).float())
    layers = [
        ops.Dense(
            *(place(x.float()) for x in (randn(n, m, seed=n), randn(n), randn(m, seed=1), randn(m, seed=2))), eps=1e-6
        )
        for n, m in ((3 * dim, dim), (dim, dim), (2 * dim + 1, dim), (dim, 2 * dim + 1))
    ]
    proj, fc2 = (layer._replace(norm_weight=None, norm_bias=None) for layer in (layers[1], layers[3]))
    dense = [layers[0], proj, layers[2]._replace(gelu=True), fc2]
    head = layers[1]
    tokens = [[place(randn(batch, dim, seed=10 * t + i).float()) for i in range(3)] for t in range(6)]
    simple, local, *states = (
        type(x)(*map(place, x))
        for x in (
            ops.aft_simple_state(batch, dim),
            ops.aft_local_state(batch, dim, window),
            ops.aft_simple_state(batch, dim),
            ops.aft_local_state(batch, dim, window),
        )
    )
    blocks = [ops.Block(*dense, True, state, (u, v), torch.neg) for state in states]
    blocks.append(ops.Block(*dense, True, (), None, lambda x: place(x[:, :dim].contiguous())))
    step = ops.compile_decoder(blocks, head, batch)
    assert step is not None
    for x in tokens:
        yield [ops.aft_simple_step(*x, simple)[0], *simple]
        yield [ops.aft_local_step(*x, row, local)[0], *local]
        yield [step(place(x[0])), *states[0], *states[1]]


@pytest.mark.parametrize('place', PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(('dim', 'batch'), [(1, 1), (9, 3), (19, 7)])
def test_a_step_stays_within_its_tensors(dim: int, batch: int, place: Place):
    for found, expected in zip(run_steps(dim, batch, place), run_steps(dim, batch, lambda x: x), strict=True):
        assert all(map(torch.equal, found, expected))


# An operator new whose nth call from now on fails, in whichever thread.
SCARCE = """
#include <atomic>
#include <cstdlib>
#include <new>
std::atomic<long> left{0};
extern "C" void allow(long count) { left = count; }
static void *take(size_t size, size_t line) {
  if (left > 0 && --left == 0) throw std::bad_alloc();
  void *found = nullptr;
  if (posix_memalign(&found, line < sizeof(void *) ? sizeof(void *) : line, size ? size : 1)) throw std::bad_alloc();
  return found;
}
void *operator new(size_t size) { return take(size, 16); }
void *operator new[](size_t size) { return take(size, 16); }
void *operator new(size_t size, std::align_val_t line) { return take(size, size_t(line)); }
void *operator new[](size_t size, std::align_val_t line) { return take(size, size_t(line)); }
void operator delete(void *x) noexcept { free(x); }
void operator delete[](void *x) noexcept { free(x); }
void operator delete(void *x, size_t) noexcept { free(x); }
void operator delete[](void *x, size_t) noexcept { free(x); }
void operator delete(void *x, std::align_val_t) noexcept { free(x); }
void operator delete[](void *x, std::align_val_t) noexcept { free(x); }
void operator delete(void *x, size_t, std::align_val_t) noexcept { free(x); }
void operator delete[](void *x, size_t, std::align_val_t) noexcept { free(x); }
"""


class Scarce:
    """The kernels, in each of whose functions the nth allocation fails, for every n."""

    def __init__(self, kernels: cpp.Kernels) -> None:
        self.kernels = kernels
        self.allow = ctypes.CDLL(None).allow
        self.failed: dict[str, int] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(self.kernels, name)

        def call(*arguments: Any) -> int:
            count = 0
            while True:
                count += 1
                self.allow(ctypes.c_long(count))
                try:
                    return function(*arguments)
                except MemoryError as error:
                    assert name in str(error)  # noqa: PT017
                    self.failed[name] = count
                finally:
                    self.allow(ctypes.c_long(0))

        return call


def run_scarce() -> None:
    """Print how many allocations of each function failed; in a process with `SCARCE` loaded."""
    kernels = cpp.library()
    assert kernels is not None
    scarce = Scarce(kernels)
    cpp.library = lambda: scarce  # type: ignore[assignment, return-value]
    torch.set_num_threads(2)
    for D in (9, 35, 75):
        for name in operators(D):
            run_operator(name, D, torch.float32, True, False, lambda x: x)
    with cpp.multiply_bfloat16_as(cpp.TILES):
        for name in ('aft_full', 'aft_conv', 'aft_local_causal'):
            run_operator(name, 35, torch.bfloat16, True, False, lambda x: x)
    for _ in run_steps(19, 3, lambda x: x):
        pass
    print(*sorted(scarce.failed))


@pytest.mark.skipif('fsanitize' in os.environ.get('CXX', ''), reason='AddressSanitizer has an operator new of its own')
def test_a_failed_allocation_is_an_error_of_python_wherever_it_happens(tmp_path: Path):
    source, scarce = tmp_path / 'scarce.cpp', tmp_path / 'scarce.so'
    source.write_text(SCARCE)
    compiler = build.chosen_compiler()
    subprocess.run([*compiler, '-std=c++17', '-shared', '-fPIC', str(source), '-o', str(scarce)], check=True)
    paths = [str(Path(__file__).parent), *sys.path]
    code = f'import sys; sys.path[:0] = {paths}; import test_memory_cpp as t; t.run_scarce()'
    # Threads that wait for one another without spinning, next to other tests.
    environment = {**os.environ, 'LD_PRELOAD': str(scarce), 'OMP_WAIT_POLICY': 'passive'}
    done = subprocess.run([sys.executable, '-c', code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {
        'aft_axial_backward',
        'aft_axial_forward',
        'aft_conv_backward',
        'aft_conv_forward',
        'aft_conv_wide_forward',
        'aft_decode',
        'aft_depthwise_backward',
        'aft_depthwise_forward',
        'aft_full_backward',
        'aft_full_forward',
        'aft_local_causal_backward',
        'aft_local_causal_forward',
        'aft_local_step',
        'aft_simple_causal_backward',
        'aft_simple_causal_forward',
    }
