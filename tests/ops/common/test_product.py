"""Products of each kind: no more rows are written than a buffer has."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from aft_vision.ops.common import build, cpp

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures('compiled')]

SOURCE = """
#include "{folder}/guard.h"
#include "{folder}/product.h"

template <typename Op>
int multiply(int rows, int has) {{
  return guarded([&] {{
    constexpr int WORDS = LANES;
    const Buffer<typename Op::Word> weights(64 * WORDS), x(64 * WORDS * LANES);
    std::fill_n(weights.data(), 64 * WORDS, 0);
    std::fill_n(x.data(), 64 * WORDS * LANES, 0);
    const Buffer<float> out(64 * STRIPS * LANES);
    const float zero[STRIPS * LANES] = {{}};
    [[maybe_unused]] typename Op::State state;
    const Sums sums(out.data(), has * STRIPS * LANES, STRIPS * LANES, STRIPS * LANES);
    multiply_strips<WORDS>(Product<Op>{{weights.data(), 1, 0, 1, WORDS, x.data(), WORDS * LANES, 0, zero, 0, sums}},
                           rows, STRIPS);
  }});
}}

extern "C" {{
int single(int rows, int has) {{ return multiply<Single>(rows, has); }}
int pairs(int rows, int has) {{ return multiply<Pair>(rows, has); }}
int tiles(int rows, int has) {{ return multiply<Tiles>(rows, has); }}
int add(const float *sum, const float *x, const float *y, float *out, int vectors) {{
  for (int i = 0; i < vectors * LANES; i += LANES)
    store(out + i, add_products(load(sum + i, LANES), load(x + i, LANES), load(y + i, LANES)), LANES);
  return 0;
}}
int height() {{ return ROWS; }}
int lanes() {{ return LANES; }}
}}
"""


@pytest.fixture(scope='module', params=build.runnable_instructions())
def products(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> cpp.Kernels:
    folder = tmp_path_factory.mktemp('products')
    source = folder / 'products.cpp'
    source.write_text(SOURCE.format(folder=build.FOLDER))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, 'SOURCES', [source, build.FOLDER / 'guard.cpp'])
        # Compiled in less time.
        patch.setattr(build, 'FLAGS', ['-O2', *build.FLAGS[1:]])
        patch.setattr(cpp, 'STRUCTS', {})
        patch.setenv('TORCH_EXTENSIONS_DIR', str(folder))
        library = cpp._load(build.build_library(request.param, strict=True))
    return library


def test_a_product_that_writes_more_rows_than_its_buffer_has_is_an_error(products: cpp.Kernels):
    lanes, height = products.lanes(), products.height()
    # Whole tiles are written, and of vectors the rows that are asked for.
    written: dict[str, Callable[[int], int]] = {
        'single': lambda rows: rows,
        'pairs': lambda rows: rows,
        'tiles': lambda rows: lanes if rows <= lanes else 2 * lanes,
    }
    for kind, count in written.items():
        for rows in (1, height - 1, height, *((lanes, lanes + 1) if kind == 'tiles' else ())):
            assert getattr(products, kind)(rows, count(rows)) == 0
            with pytest.raises(RuntimeError, match='writes more rows than its buffer has'):
                getattr(products, kind)(rows, count(rows) - 1)


def draw_operands(count: int) -> tuple[np.ndarray, ...]:
    """Sums in float32, and pairs of bfloat16 in words of 32 bits: also subnormal, at the end of the range and NaN."""
    draw = np.random.default_rng(0)
    exponents = draw.choice([0, 1, 40, 63, 64, 120, 127, 130, 190, 254, 255], (5, count))
    bits = draw.integers(0, 2, (5, count)) << 15 | exponents << 7 | draw.integers(0, 128, (5, count))
    bits[:, : count // 2] &= 0xFF80  # infinities, and sums that are exact
    sums = (bits[0] << 16 | draw.integers(0, 1 << 16, count) * (exponents[0] < 255)).astype(np.uint32)
    x, y = ((bits[i] | bits[i + 1] << 16).astype(np.uint32) for i in (1, 3))
    return sums, x, y


def flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def test_pairs_are_added_as_the_instruction_rounds_them(products: cpp.Kernels, request: pytest.FixtureRequest):
    sums, x, y = draw_operands(16 * 4096)
    out = np.empty(sums.shape, np.float32)
    pointers = [each.ctypes.data_as(ctypes.c_void_p) for each in (sums, x, y, out)]
    products.add(*pointers, len(sums) // products.lanes())
    expected, in_range = flush(sums.view(np.float32)), np.full(len(sums), True)
    with np.errstate(all='ignore'):
        for high in (True, False):
            a, b = ((z & 0xFFFF0000 if high else z << 16).view(np.float32) for z in (x, y))
            # Exact in float64 but for sums of numbers that are far apart, which float32 rounds alike.
            product = flush(a).astype(np.float64) * flush(b).astype(np.float64)
            in_range &= (product == 0) | ((abs(product) > np.finfo(np.float32).tiny) & (abs(product) < 2.0**128))
            expected = flush((expected.astype(np.float64) + product).astype(np.float32))
    same = (out.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(out) & np.isnan(expected))
    if 'baseline' in request.node.name:
        # Without a fused operation a product that leaves the range is rounded before it is added.
        same |= ~in_range
    assert same.all(), [hex(z[~same][0]) for z in (sums, x, y, out.view(np.uint32), expected.view(np.uint32))]
    for kind in (~np.isfinite(expected), expected == 0, in_range & (expected != 0)):
        assert kind.sum() > 500
