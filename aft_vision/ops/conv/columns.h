// The layout of AFT-conv with heads of several channels in `conv.cpp`: the groups of a pass, the strips that a
// product takes, and those that the gradient of the weights is made of.

#pragma once

#include <vector>

#include "../common/product.h"

namespace {

// A head's columns fill strips better the more sequences lie next to each other, and the channels of several heads fill
// vectors.
constexpr int64_t MAX_COLUMNS = 160, MAX_BYTES = 3200 << 10, MIN_CHANNELS = 3 * LANES;
constexpr double MIN_FILL = 0.75;

int64_t parts_of(int64_t size, int64_t part) { return (size + part - 1) / part; }

int64_t vectors_of(int64_t size) { return parts_of(size, LANES) * LANES; }

struct Shape {
  int64_t batch, height, width, channels, heads, reach, per_head;

  int64_t tokens() const { return height * width; }

  // The rows of the grid that a kernel over `row` reaches.
  int64_t first(int64_t row) const { return std::max<int64_t>(0, row - reach); }
  int64_t stop(int64_t row) const { return std::min(height, row + reach + 1); }
};

// The sequences and heads of a group, which is processed at a time.
struct Cut {
  int64_t images, heads;

  Cut(const Shape &s, int threads) : heads(std::min(s.heads, parts_of(MIN_CHANNELS, s.per_head))) {
    for (;; heads = parts_of(heads, 2)) {
      images = fullest(s);
      if (heads == 1 || (full(s, images) >= MIN_FILL && parts_of(s.batch, images) * parts_of(s.heads, heads) >= threads))
        return;
    }
  }

  int64_t count(const Shape &s) const { return parts_of(s.batch, images) * parts_of(s.heads, heads); }

  // The columns of a head.
  int64_t columns(const Shape &s) const { return images * (s.per_head + 1); }

 private:
  // The share of the strips that columns fill.
  static double full(const Shape &s, int64_t images) {
    const int64_t columns = images * (s.per_head + 1);
    return double(columns) / (parts_of(columns, LANES) * LANES);
  }

  int64_t fullest(const Shape &s) const {
    const int64_t columns = std::min(MAX_COLUMNS, MAX_BYTES / 4 / (s.tokens() * heads));
    const int64_t most = std::max<int64_t>(1, std::min(s.batch, columns / (s.per_head + 1)));
    int64_t found = 1;
    for (int64_t i = 2; i <= most; ++i)
      if (full(s, i) >= full(s, found)) found = i;
    return found;
  }
};

// Some heads of some sequences.
struct Group {
  const Shape &s;
  int64_t b, images, head, heads;

  Group(const Shape &s, const Cut &cut, int64_t item) : s(s) {
    const int64_t groups = parts_of(s.heads, cut.heads);
    b = item / groups * cut.images;
    head = item % groups * cut.heads;
    images = std::min(cut.images, s.batch - b);
    heads = std::min(cut.heads, s.heads - head);
  }

  int64_t first() const { return head * s.per_head; }
  int64_t width() const { return heads * s.per_head; }
  int64_t columns() const { return images * (s.per_head + 1); }
  int64_t strips() const { return parts_of(columns(), LANES); }

  // Call `f` with a place and an index into the channels of the group for each vector of a token.
  template <typename F>
  void vectors(int64_t image, int64_t t, F f) const {
    for (int64_t c = 0; c < width(); c += LANES) f(Place{b + image, t, first() + c, rest(width(), c)}, c);
  }
};

// Rows of columns, or of channels, over whose end a vector of zeros, and then another, may be written.
class Rows {
 public:
  Rows(int64_t count, int64_t width) : width_(width + 2 * LANES), buffer_(count * width_) {}

  int64_t width() const { return width_; }

  float *operator[](int64_t row) const { return buffer_.data() + row * width_; }

  // Sums in all rows but the last one, `row` floats apart.
  Sums sums(int64_t row) const { return Sums(buffer_.data(), buffer_.size() - width_, row, row); }

 private:
  int64_t width_;
  Buffer<float> buffer_;
};

// Neighbouring targets of a grid row, and the words of the sources within their reach, in whole steps.
struct Piece {
  int64_t column;
  int count;
  int64_t first, stop;
};

// Cut a grid row into pieces of at most `most` targets, whose terms are the sources in words of Op.
template <typename Op>
std::vector<Piece> pieces_of(const Shape &s, int most) {
  constexpr int64_t STEP = Op::STEP / Op::DEPTH;
  const int64_t count = parts_of(s.width, most), words = words_of<Op>(s.width);
  std::vector<Piece> found;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t column = i * s.width / count, end = (i + 1) * s.width / count;
    const int64_t first = std::max<int64_t>(0, column - s.reach) / Op::DEPTH;
    const int64_t stop = parts_of(std::min(s.width, end + s.reach), Op::DEPTH);
    const int64_t length = parts_of(stop - first, STEP) * STEP, start = std::min(first, words - length);
    found.push_back({column, int(end - column), start, start + length});
  }
  return found;
}

// The targets of a product: a piece of a grid row, and in tiles that of the next row too.
struct Targets {
  int64_t row, rows, piece, column, count, width;

  // Call `f` with the index of a target, its token and the row of its sums, which are from the last target to the first.
  template <typename F>
  void each(F f) const {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < count; ++j) f(i * count + j, (row + i) * width + column + j, i * LANES + count - 1 - j);
  }
};

// The operands of a product over the tokens of a grid, for each head: strips of words, with a grid row in whole steps, the sums of
// the rows before and after each one, and of what is aside from a piece in each row.
template <typename Op>
class Sources {
 public:
  Sources(const Shape &s, const Cut &cut)
      : s_(s),
        words_(words_of<Op>(s.width)),
        strips_(parts_of(cut.columns(s), LANES)),
        pieces_(pieces_of<Op>(s, TILED<Op> ? LANES : ROWS)),
        clipped_(pieces_[0].stop - pieces_[0].first < words_),
        buffer_(cut.heads * strips_ * strip()),
        before_(cut.heads * sums()),
        after_(cut.heads * sums()),
        aside_(clipped_ ? pieces() * cut.heads * sums() : 0) {
    // The words beyond the tokens of a row stay 0.
    if (TILED<Op>) std::fill_n(buffer_.data(), cut.heads * strips_ * strip(), 0);
  }

  int64_t row() const { return words_ * LANES; }
  int64_t strip() const { return s_.height * row(); }
  const Piece &piece(int64_t i) const { return pieces_[i]; }
  const typename Op::Word *data(int64_t head, int64_t row_, int64_t word) const {
    return buffer_.data() + head * strips_ * strip() + (row_ * words_ + word) * LANES;
  }

  // Call `f` with the row and the word of some tokens, the first of them and how many.
  template <typename F>
  void each_word(F f) const {
    for (int64_t row = 0; row < s_.height; ++row)
      for (int64_t word = 0; word < parts_of(s_.width, Op::DEPTH); ++word)
        f(row, word, row * s_.width + word * Op::DEPTH, std::min<int64_t>(Op::DEPTH, s_.width - word * Op::DEPTH));
  }

  // Call `f` with the targets of each product.
  template <typename F>
  void each_product(F f) const {
    constexpr int64_t TOGETHER = TILED<Op> ? 2 : 1;
    for (int64_t row = 0; row < s_.height; row += TOGETHER)
      for (int64_t i = 0; i < pieces(); ++i)
        f(Targets{row, std::min(TOGETHER, s_.height - row), i, pieces_[i].column, pieces_[i].count, s_.width});
  }

  // Columns of a word's tokens.
  void set(int64_t head, int64_t row, int64_t word, const Rows &columns, int count, int64_t strips) {
    for (int64_t i = 0; i < strips; ++i) {
      Vec x[Op::DEPTH];
      for (int j = 0; j < Op::DEPTH; ++j) x[j] = j < count ? load(columns[j] + i * LANES, LANES) : Vec{};
      store_words<Op>(buffer_.data() + head * strips_ * strip() + i * strip() + (row * words_ + word) * LANES, Op::pack(x));
      for (int j = 1; j < Op::DEPTH; ++j) x[0] += x[j];
      accumulate(sum_of(before_, head, row + 1, i), word, x[0]);
      for (int64_t j = 0; clipped_ && j < pieces(); ++j) {
        const bool outside = word < pieces_[j].first || word >= pieces_[j].stop;
        accumulate(sum_of(aside_, head * pieces() + j, row, i), word, outside ? x[0] : Vec{});
      }
    }
  }

  // Call it after all columns have been set.
  void finish(int64_t heads, int64_t strips) {
    for (int64_t head = 0; head < heads; ++head) sum_rows(head, strips);
  }

  // The sum over the tokens that are not the terms of a piece in the rows [first, stop).
  Vec beyond(int64_t head, int64_t first, int64_t stop, int64_t piece, int64_t strip) const {
    Vec sum = load(sum_of(before_, head, first, strip), LANES) + load(sum_of(after_, head, stop, strip), LANES);
    for (int64_t i = first; clipped_ && i < stop; ++i)
      sum += load(sum_of(aside_, head * pieces() + piece, i, strip), LANES);
    return sum;
  }

 private:
  int64_t pieces() const { return pieces_.size(); }

  // Made from the sums of single rows, which lie after each row.
  void sum_rows(int64_t head, int64_t strips) {
    for (int64_t i = 0; i < strips; ++i) {
      store(sum_of(after_, head, s_.height, i), Vec{}, LANES);
      store(sum_of(before_, head, 0, i), Vec{}, LANES);
      for (int64_t row = s_.height; row-- > 0;)
        store(sum_of(after_, head, row, i),
              load(sum_of(after_, head, row + 1, i), LANES) + load(sum_of(before_, head, row + 1, i), LANES), LANES);
      for (int64_t row = 0; row < s_.height; ++row)
        store(sum_of(before_, head, row + 1, i),
              load(sum_of(before_, head, row, i), LANES) + load(sum_of(before_, head, row + 1, i), LANES), LANES);
    }
  }

  static void accumulate(float *sum, int64_t index, Vec x) { store(sum, index ? load(sum, LANES) + x : x, LANES); }

  int64_t sums() const { return (s_.height + 1) * strips_ * LANES; }
  float *sum_of(const Buffer<float> &x, int64_t head, int64_t row, int64_t strip) const {
    return x.data() + head * sums() + (row * strips_ + strip) * LANES;
  }

  const Shape &s_;
  int64_t words_, strips_;
  const std::vector<Piece> pieces_;
  bool clipped_;
  Buffer<typename Op::Word> buffer_;
  Buffer<float> before_, after_, aside_;
};

// The gradient of a head's table: rows of targets, whose terms are columns, times strips of the sources of grid rows.
template <typename Op>
class Outer {
 public:
  Outer(const Shape &s, const Cut &cut)
      : s_(s),
        strips_(parts_of(s.width, LANES)),
        words_(runs(parts_of(cut.columns(s), LANES)) * WORDS),
        targets_(cut.heads * s.tokens() * words_ + Op::HEIGHT * WORDS),
        sources_(s.height * strips_ * words_ * LANES),
        found_(Op::HEIGHT * s.height * LANES),
        pieces_(pieces_of<Single>(s, Op::HEIGHT)) {}

  // Call `f` with the row and the index of LANES columns of the grid, the first token and how many.
  template <typename F>
  void each_strip(F f) const {
    for (int64_t row = 0; row < s_.height; ++row)
      for (int64_t i = 0; i < strips_; ++i) f(row, i, row * s_.width + i * LANES, rest(s_.width, i * LANES));
  }

  void set_target(int64_t head, int64_t t, const float *columns, int64_t strips) {
    for (int64_t i = 0; i < runs(strips) * RUN; ++i)
      store_row<Op>(target(head, t) + i / RUN * s_.tokens() * WORDS + i % RUN * ROW_WORDS<Op>,
                    i < strips ? load(columns + i * LANES, LANES) : Vec{});
  }

  void set_sources(int64_t row, int64_t strip, const Rows &columns, int count, int64_t strips) {
    for (int64_t i = 0; i < runs(strips) * RUN; ++i) {
      Tile tile;
      for (int j = 0; i < strips && j < count; ++j) tile.row[j] = load(columns[j] + i * LANES, LANES);
      tile.template store_terms<Op>(sources_.data() + ((row * strips_ + strip) * words_ + i * ROW_WORDS<Op>) * LANES);
    }
  }

  // Add to (2H - 1, 2W - 1) of a head; numbers after it may be written again with their own values.
  void add(int64_t head, float *table, int64_t strips) {
    for (int64_t row = 0; row < s_.height; ++row)
      for (const Piece &piece : pieces_) {
        const int64_t first = piece.first / LANES * LANES;
        for (int64_t column = first; column < std::min(piece.stop, s_.width); column += LANES)
          add_block(head, row, piece, column, table, strips);
      }
  }

 private:
  // Strips of columns that are neighbouring terms, and their words.
  static constexpr int64_t RUN = TILED<Op> ? STRIPS : 1, WORDS = RUN * ROW_WORDS<Op>;

  static int64_t runs(int64_t strips) { return parts_of(strips, RUN); }

  typename Op::Word *target(int64_t head, int64_t t) {
    return targets_.data() + head * s_.tokens() * words_ + t * WORDS;
  }

  // The targets of a piece with the sources of LANES columns in the grid rows within reach.
  void add_block(int64_t head, int64_t row, const Piece &piece, int64_t column, float *table, int64_t strips) {
    const int64_t first = s_.first(row), rows = s_.stop(row) - first, distances = 2 * s_.width - 1;
    const float zero[STRIPS * LANES] = {};
    for (int64_t i = 0; i < rows; i += STRIPS) {
      const int64_t some = std::min<int64_t>(STRIPS, rows - i);
      multiply_strips<WORDS>(
          Product<Op>{target(head, row * s_.width + piece.column), 1, s_.tokens() * WORDS, runs(strips), WORDS,
                      sources_.data() + ((first + i) * strips_ + column / LANES) * words_ * LANES,
                      strips_ * words_ * LANES, WORDS * LANES, TILED<Op> ? nullptr : zero, 0,
                      Sums(found_.data() + i * LANES, found_.size() - i * LANES, rows * LANES, some * LANES)},
          piece.count, some);
    }
    for (int i = 0; i < piece.count; ++i)
      for (int64_t j = 0; j < rows; ++j) {
        float *to = table + (s_.height - 1 + first + j - row) * distances + s_.width - 1 - (piece.column + i) + column;
        store(to, load(to, LANES) + load(found_.data() + (i * rows + j) * LANES, LANES), LANES);
      }
  }

  const Shape &s_;
  int64_t strips_, words_;
  Buffer<typename Op::Word> targets_, sources_;
  Buffer<float> found_;
  const std::vector<Piece> pieces_;
};

}  // namespace
