"""Products of each kind: no more rows are written than a buffer has."""

from collections.abc import Callable
from pathlib import Path

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
    multiply_strips<WORDS>(Product<Op>{{weights.data(), 1, 0, 1, WORDS, x.data(), WORDS * LANES, 0, zero, 0,
                                      Sums{{out.data(), STRIPS * LANES, has}}}}, rows, STRIPS);
  }});
}}

extern "C" {{
int single(int rows, int has) {{ return multiply<Single>(rows, has); }}
int pairs(int rows, int has) {{ return multiply<Pair>(rows, has); }}
int tiles(int rows, int has) {{ return multiply<Tiles>(rows, has); }}
int height() {{ return ROWS; }}
int lanes() {{ return LANES; }}
}}
"""


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> cpp.Kernels:
    source = tmp_path / 'products.cpp'
    source.write_text(SOURCE.format(folder=build.FOLDER))
    monkeypatch.setattr(build, 'SOURCES', [source, build.FOLDER / 'guard.cpp'])
    monkeypatch.setattr(cpp, 'STRUCTS', {})
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path / 'kept'))
    return cpp._load(build.build_library(strict=True))


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


def test_a_list_in_braces_is_no_product(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    # It would be converted to one of any kind.
    source = SOURCE.format(folder=build.FOLDER)
    (tmp_path / 'products.cpp').write_text(source.replace('(Product<Op>{', '({'))
    monkeypatch.setattr(build, 'SOURCES', [tmp_path / 'products.cpp'])
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path / 'kept'))
    with pytest.raises(RuntimeError, match='no matching function'):
        build.build_library()
