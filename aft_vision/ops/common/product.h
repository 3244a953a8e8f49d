// Products of position weights with values at tokens: out[row] = start + sum of weight[row, i] x[i].
//
// The sums stay in registers. The columns of x are cut into strips as wide as a vector. The terms of a strip are
// contiguous, so that a product reads memory sequentially, and the strip of a sequence stays in the L1 cache for all
// rows.

#pragma once

#include <cstddef>
#include <type_traits>

#include "tensor.h"
#include "tile.h"

namespace {

// The sums of ROWS rows and STRIPS strips fill the vector registers.
#if defined(__AVX512F__)
constexpr int ROWS = 14;
#else
constexpr int ROWS = 6;
#endif
constexpr int STRIPS = 2;

// With fewer weights than this, starting threads costs more than they save.
constexpr int64_t FEW_WEIGHTS = 1 << 12;

// A way to multiply: a word of memory holds DEPTH consecutive terms, of which it takes STEP at a time; sums are float32.
struct Single {
  static constexpr int DEPTH = 1, STEP = 1, HEIGHT = ROWS;
  typedef float Word;
  typedef Vec Words;
  struct State {};

  static Vec add(Vec sum, Word weight, Words x) { return sum + weight * x; }

  static Words pack(const Vec *x) { return *x; }
};

// Words of bfloat16.
struct Paired {
  static constexpr int DEPTH = 2;
  typedef uint32_t Word;
  typedef Bits Words;

  static Words pack(const Vec *x) { return bits_of(join(x[0], x[1])); }
};

struct Pair : Paired {
  static constexpr int STEP = 2, HEIGHT = ROWS;
  struct State {};

  static Vec add(Vec sum, Word weight, Words x) { return add_products(sum, vec_of(weight - Bits{}), vec_of(x)); }
};

struct Tiles : Paired {
  static constexpr int STEP = TILE_TERMS, HEIGHT = TILE_ROWS;
  typedef TileState State;
};

template <typename Op>
constexpr bool TILED = std::is_same_v<Op, Tiles>;

// Return the words of some terms, in whole steps.
template <typename Op>
int64_t words_of(int64_t terms) {
  return (terms + Op::STEP - 1) / Op::STEP * (Op::STEP / Op::DEPTH);
}

// Round up to whole blocks of rows.
template <typename Op>
int64_t rows_of(int64_t rows) {
  return (rows + Op::HEIGHT - 1) / Op::HEIGHT * Op::HEIGHT;
}

// Call `f` with an Op, and the words as its type.
template <typename F>
auto with_operands(int64_t operands, const void *words, F f) {
  if (operands == TILES) return f(Tiles{}, static_cast<const Tiles::Word *>(words));
  if (operands == PAIRS) return f(Pair{}, static_cast<const Pair::Word *>(words));
  return f(Single{}, static_cast<const Single::Word *>(words));
}

// Words in a row of a strip whose terms are its columns.
template <typename Op>
constexpr int ROW_WORDS = LANES / Op::DEPTH;

template <typename Op>
void store_words(typename Op::Word *to, typename Op::Words x) {
  std::memcpy(to, &x, sizeof x);
}

// Store a row of LANES columns as words.
template <typename Op>
void store_row(typename Op::Word *to, Vec x) {
  if constexpr (Op::DEPTH == 1) {
    store(to, x, LANES);
  } else {
    const HalfVec y = narrow(x);
    std::memcpy(to, &y, sizeof y);
  }
}

// The operands of a product, which say how it is multiplied: functions deduce Op from them. Strides count elements of the
// array that they belong to.
template <typename Op>
struct Product {
  const typename Op::Word *weights;  // of the first row
  int64_t step, run;                 // from a word of terms to the next, and from a run of words to the next
  int64_t runs, length;              // words of terms in a run
  const typename Op::Word *x;        // the first strip
  int64_t strip, x_run;              // from a strip to the next, and from a run to the next
  const float *start;                // a vector for each strip; in tiles null where sums start at 0
  int64_t start_row;                 // 0 where all rows have the same start
  Sums out;                          // a vector for each strip; may be `start`
};

template <int ROW, int N, int R, typename Op>
void multiply_rows(const Product<Op> &p) {
  Vec sum[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sum[r][n] = load(p.start + r * p.start_row + n * LANES, LANES);
  for (int64_t run = 0; run < p.runs; ++run) {
    const typename Op::Word *weight = p.weights + run * p.run, *x = p.x + run * p.x_run;
    for (int64_t i = 0; i < p.length; ++i, weight += p.step, x += LANES) {
      typename Op::Words columns[N];
      for (int n = 0; n < N; ++n) std::memcpy(&columns[n], x + n * p.strip, sizeof columns[n]);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) sum[r][n] = Op::add(sum[r][n], weight[r * ROW], columns[n]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(p.out.data + r * p.out.row + n * LANES, sum[r][n], LANES);
}

// Multiply `rows` rows, at most ROWS, whose weights are ROW words apart, by N strips.
template <int ROW, int N, int R = ROWS, typename Op>
void multiply(const Product<Op> &p, int rows) {
  if (rows == R)
    multiply_rows<ROW, N, R>(p);
  else if constexpr (R > 1)
    multiply<ROW, N, R - 1>(p, rows);
}

// Multiply `rows` rows by all strips, STRIPS at a time; in tiles by at most STRIPS, and all rows of one tile or two, in
// runs of LANES words.
template <int ROW, typename Op>
void multiply_strips(Product<Op> p, int rows, int64_t strips) {
  if constexpr (TILED<Op>) {
    constexpr int64_t SIZE = sizeof(typename Op::Word);
    multiply_tiles(TileProduct{p.weights, ROW * SIZE, rows > LANES ? LANES * ROW * SIZE : 0, p.run * SIZE, p.x,
                               LANES * SIZE, strips > 1 ? p.strip * SIZE : 0, p.x_run * SIZE, p.runs, p.start,
                               p.start_row, p.out});
  } else {
    p.out.check(rows);
    for (; strips >= STRIPS; strips -= STRIPS) {
      multiply<ROW, STRIPS>(p, rows);
      p.x += STRIPS * p.strip;
      p.start += STRIPS * LANES;
      p.out.data += STRIPS * LANES;
    }
    if (strips) multiply<ROW, 1>(p, rows);
  }
}

// Terms of a partial sum. A longer float32 sum loses precision.
constexpr int64_t SPAN = 512;

// Multiply with a partial sum for every span, of whole runs or of a part of the only run.
template <int ROW, typename Op>
void multiply_spans(Product<Op> p, int rows, int64_t strips) {
  float buffer[Op::HEIGHT * STRIPS * LANES];
  const Sums part(buffer, STRIPS * LANES);
  const float zero[STRIPS * LANES] = {};
  const int64_t runs = p.runs > 1 ? std::max<int64_t>(1, SPAN / p.length) : 1, length = p.runs > 1 ? p.length : SPAN;
  const int64_t count = p.runs > 1 ? (p.runs + runs - 1) / runs : (p.length + length - 1) / length;
  for (int64_t i = 0; i < count; ++i) {
    Product<Op> span = p;
    span.runs = std::min(runs, p.runs - (p.runs > 1 ? i * runs : 0));
    span.length = std::min(length, p.length - (p.runs > 1 ? 0 : i * length));
    span.weights += p.runs > 1 ? i * runs * p.run : i * length * p.step;
    span.x += p.runs > 1 ? i * runs * p.x_run : i * length * LANES;
    if (!i) {
      multiply_strips<ROW>(span, rows, strips);
      continue;
    }
    for (int64_t strip = 0; strip < strips; strip += STRIPS) {
      const int64_t some = std::min<int64_t>(STRIPS, strips - strip);
      span.start = zero, span.start_row = 0, span.out = part;
      multiply_strips<ROW>(span, rows, some);
      for (int r = 0; r < rows; ++r)
        for (int64_t n = 0; n < some * LANES; n += LANES) {
          float *to = p.out.data + r * p.out.row + strip * LANES + n;
          store(to, load(to, LANES) + load(part.data + r * part.row + n, LANES), LANES);
        }
      span.x += STRIPS * p.strip;
    }
  }
}

// A square of LANES tokens by LANES channels; a row is a vector.
struct Tile {
  Vec row[LANES] = {};

  // Each pass interleaves the two halves of the rows. After log2(LANES) passes rows are columns.
  void transpose() {
    for (int width = LANES; width > 1; width /= 2) {
      Vec mixed[LANES];
      for (int i = 0; i < LANES / 2; ++i) {
        const Vec x = row[i], y = row[i + LANES / 2];
#if defined(__AVX512F__)
        mixed[2 * i] = SHUFFLE(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        mixed[2 * i + 1] = SHUFFLE(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
        mixed[2 * i] = SHUFFLE(x, y, 0, 8, 1, 9, 2, 10, 3, 11);
        mixed[2 * i + 1] = SHUFFLE(x, y, 4, 12, 5, 13, 6, 14, 7, 15);
#endif
      }
      std::copy_n(mixed, LANES, row);
    }
  }

  // Write the columns as the terms of a strip, packed into words.
  template <typename Op>
  void store_terms(typename Op::Word *to) {
    transpose();
    for (int i = 0; i < LANES; i += Op::DEPTH) store_words<Op>(to + i / Op::DEPTH * LANES, Op::pack(row + i));
  }
};

// Uninitialised memory, aligned to a cache line.
template <typename T>
class Buffer {
 public:
  Buffer(int64_t count) : count_(count), data_(new T[count + LINE / sizeof(T)]) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(data_);
    aligned_ = reinterpret_cast<T *>((start + LINE - 1) / LINE * LINE);
  }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;
  ~Buffer() { delete[] data_; }

  T *data() const { return aligned_; }
  int64_t size() const { return count_; }

 private:
  static constexpr size_t LINE = 64;
  int64_t count_;
  T *data_, *aligned_;
};

}  // namespace
