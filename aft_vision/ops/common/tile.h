// Products of bfloat16 in matrix tiles with sums in float32: by AMX, or by loops of the same arithmetic, so that every
// machine can test what calls them, as it can with those of pairs (`bfloat16.h`).
//
// A tile has LANES rows of LANES words. A word is a sum, or a pair of terms: of a row on the left, of a column on the right.

#pragma once

#include <stdexcept>

#include "bfloat16.h"

// Only Linux has to be asked for them.
#if defined(AFT_AMX) && !defined(__linux__)
#undef AFT_AMX
#endif
#if defined(AFT_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// The operands of products, as Python names them: float32, pairs of bfloat16 in vectors, or in tiles.
constexpr int SINGLE = 0, PAIRS = 1, TILES = 2;

// Rows, terms and columns of a product of two by two tiles, so that four loads serve four multiplications.
constexpr int TILE_ROWS = 2 * LANES, TILE_TERMS = 2 * LANES, TILE_COLUMNS = 2 * LANES;

// Return whether the processor has tiles and Linux lets this process use them, which is asked for once.
bool has_tiles() {
#if defined(AFT_AMX)
  static const bool granted = [] {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    unsigned a, b, c, found;
    const bool known = __get_cpuid_count(7, 0, &a, &b, &c, &found) && found >> 22 & 1 && found >> 24 & 1;
    return known && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  }();
  return granted;
#else
  return false;
#endif
}

// Out of the way of the loops that check.
[[noreturn, gnu::cold, gnu::noinline]] void refuse_rows() {
  throw std::logic_error("a product writes more rows than its buffer has");
}

// A buffer of sums, from a place in it on: rows that are `row` floats apart.
struct Sums {
  float *data;
  int64_t row, rows;

  // Count the rows of which `width` floats lie within the `size` floats from here on.
  Sums(float *data, int64_t size, int64_t row, int64_t width)
      : data(data), row(row), rows(size < width ? 0 : (size - width) / row + 1) {}

  template <size_t SIZE>
  Sums(float (&buffer)[SIZE], int64_t row) : Sums(buffer, SIZE, row, row) {}

  // Throw an exception if a product writes more rows than there are.
  void check(int64_t written) const {
    if (__builtin_expect(written > rows, false)) refuse_rows();
  }
};

// A sum over `count` steps of TILE_TERMS terms, in one or two by one or two tiles. Strides of operands count bytes, and are 0
// where there is no second tile.
struct TileProduct {
  const void *left;
  int64_t row, block, left_step;  // from a row to the next, from LANES rows to the next, and from a step to the next
  const void *right;
  int64_t word, strip, right_step;  // from a pair of terms to the next, from LANES columns to the next, of a step
  int64_t count;
  const float *start;  // null: sums start at 0
  int64_t start_row;   // 0 where all rows have the same start
  Sums out;            // may be `start`
};

#if defined(AFT_AMX)
struct Amx {
  template <int T>
  void start(const float *from, int64_t stride) {
    if (from)
      load<T>(reinterpret_cast<const char *>(from), stride * sizeof(float));
    else
      asm volatile("tilezero %%tmm%c0" : : "i"(T));
  }

  template <int T>
  void load(const char *from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(from), "r"(stride) : "memory");
  }

  template <int SUM, int LEFT, int RIGHT>
  void add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(LEFT), "i"(RIGHT));
  }

  template <int T>
  void store(float *to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(T), "r"(to), "r"(stride * sizeof(float)) : "memory");
  }
};
#endif

// Compute what the instruction computes: the sums of the first and of the second terms of pairs are separate until they join the tile, and a
// number too small to be normal is 0.
struct Loops {
  struct Operand {
    const char *data;
    int64_t stride;

    Bits words(int i) const {
      Bits x;
      std::memcpy(&x, data + i * stride, sizeof x);
      return x;
    }
  };

  Vec sums[4][LANES];
  Operand operands[8];

  template <int T>
  void start(const float *from, int64_t stride) {
    for (int row = 0; row < LANES; ++row) sums[T][row] = from ? ::load(from + row * stride, LANES) : Vec{};
  }

  template <int T>
  void load(const char *from, int64_t stride) {
    operands[T] = {from, stride};
  }

  template <int SUM, int LEFT, int RIGHT>
  void add() {
    for (int row = 0; row < LANES; ++row) {
      const Bits pairs = operands[LEFT].words(row);
      Vec first{}, second{};
      for (int i = 0; i < LANES; ++i) {
        const Vec x = vec_of(Bits{} + pairs[i]), y = vec_of(operands[RIGHT].words(i));
        first = flush(first + flush(low_half(x)) * flush(low_half(y)));
        second = flush(second + flush(high_half(x)) * flush(high_half(y)));
      }
      sums[SUM][row] = flush(sums[SUM][row] + flush(first + second));
    }
  }

  template <int T>
  void store(float *to, int64_t stride) {
    for (int row = 0; row < LANES; ++row) ::store(to + row * stride, sums[T][row], LANES);
  }
};

// Multiply with a unit: the instructions, or loops. TALL: there are two tiles of rows. WIDE: there are two of columns.
template <typename Unit, bool TALL, bool WIDE>
void multiply_with(const TileProduct &p) {
  Unit tiles;
  const auto start = [&](int64_t row, int64_t column) {
    return p.start ? p.start + row * p.start_row + column : nullptr;
  };
  tiles.template start<0>(start(0, 0), p.start_row);
  if (WIDE) tiles.template start<1>(start(0, LANES), p.start_row);
  if (TALL) tiles.template start<2>(start(LANES, 0), p.start_row);
  if (TALL && WIDE) tiles.template start<3>(start(LANES, LANES), p.start_row);
  const char *left = static_cast<const char *>(p.left), *right = static_cast<const char *>(p.right);
  const int64_t row = p.row, block = p.block, left_step = p.left_step;
  const int64_t word = p.word, strip = p.strip, right_step = p.right_step;
  for (int64_t i = p.count; i > 0; --i, left += left_step, right += right_step) {
    tiles.template load<4>(left, row);
    tiles.template load<6>(right, word);
    if (WIDE) tiles.template load<7>(right + strip, word);
    if (TALL) tiles.template load<5>(left + block, row);
    tiles.template add<0, 4, 6>();
    if (WIDE) tiles.template add<1, 4, 7>();
    if (TALL) tiles.template add<2, 5, 6>();
    if (TALL && WIDE) tiles.template add<3, 5, 7>();
  }
  p.out.check(TALL ? TILE_ROWS : LANES);
  float *upper = p.out.data, *lower = upper + LANES * p.out.row;
  tiles.template store<0>(upper, p.out.row);
  if (WIDE) tiles.template store<1>(upper + LANES, p.out.row);
  if (TALL) tiles.template store<2>(lower, p.out.row);
  if (TALL && WIDE) tiles.template store<3>(lower + LANES, p.out.row);
}

template <typename Unit>
void multiply_with(const TileProduct &p) {
  if (p.block)
    p.strip ? multiply_with<Unit, true, true>(p) : multiply_with<Unit, true, false>(p);
  else
    p.strip ? multiply_with<Unit, false, true>(p) : multiply_with<Unit, false, false>(p);
}

void multiply_tiles(const TileProduct &p) {
#if defined(AFT_AMX)
  if (has_tiles()) return multiply_with<Amx>(p);
#endif
  multiply_with<Loops>(p);
}

// A thread may multiply tiles while it has one.
class TileState {
 public:
  TileState() {
#if defined(AFT_AMX)
    if (!has_tiles()) return;
    struct {
      uint8_t palette = 1, rest[15] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } sizes;
    asm volatile("ldtilecfg %0" : : "m"(sizes));
#endif
  }
  TileState(const TileState &) = delete;
  TileState &operator=(const TileState &) = delete;
  ~TileState() {
#if defined(AFT_AMX)
    if (has_tiles()) asm volatile("tilerelease");
#endif
  }
};

}  // namespace
