// Index maps that host and device share.
#pragma once

#include "common.h"

namespace ap {

AP_HD inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
AP_HD inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// The rule of torch.chunk, as autopar.layout.part_range: every part has ceil(size / parts) elements until none is left.
AP_HD inline int64_t part_begin(int64_t size, int64_t parts, int64_t part) { return min_of(ceil_div(size, parts) * part, size); }
AP_HD inline int64_t part_length(int64_t size, int64_t parts, int64_t part) {
  return part_begin(size, parts, part + 1) - part_begin(size, parts, part);
}

// --- buckets: many tensors in one buffer, rank after rank (the picture is at the top of pack.cu) ----------------------------------
constexpr int64_t kAlign = 8;     // a segment's length is a multiple, so that each begins at 16 bytes in any dtype
constexpr int64_t kChunk = 4096;  // elements of a segment that one block, or one item of the host's threads, moves

// One tensor: [outer, local, inner] in memory, a part of [outer, whole, inner]. Rows of the table that the caller fills.
struct Piece {
  int64_t data;         // address of its first element
  int64_t dtype;        // a floating ap_dtype
  int64_t outer;        // elements before the dim that is cut
  int64_t whole;        // length of that dim in the whole tensor
  int64_t local;        // and in this one, which holds the parts of ranks first, ..., first + count - 1
  int64_t inner;        // elements after it
  int64_t offset;       // of its segment in a row, in elements
  int64_t first_chunk;  // number of its segment's first chunk in a row
};

struct Bucket {
  int64_t row;     // elements of a rank
  int64_t parts;   // ranks that the tensors are cut for
  int64_t first;   // the first rank whose row is here
  int64_t count;   // and how many rows are
  int64_t chunks;  // chunks of a row
};

AP_HD inline bool is_sound(const Bucket& b, int64_t num_pieces) {
  return num_pieces >= 0 && b.row >= 0 && b.row % kAlign == 0 && b.parts > 0 && b.first >= 0 && b.count > 0 &&
         b.first + b.count <= b.parts && b.chunks >= 0;
}

// Elements of a piece's segment in every row, padding included.
AP_HD inline int64_t segment_length(const Piece& piece, int64_t parts) {
  return ceil_div(piece.outer * ceil_div(piece.whole, parts) * piece.inner, kAlign) * kAlign;
}

// One rank's part of a piece: `outer` runs of `run` neighbours, `stride` apart in the tensor; in the segment one after the other.
struct Part {
  int64_t size, run, stride, begin;
};

AP_HD inline Part part_of(const Piece& piece, const Bucket& b, int64_t rank) {
  const int64_t run = part_length(piece.whole, b.parts, rank) * piece.inner;
  const int64_t begin = part_begin(piece.whole, b.parts, rank) - part_begin(piece.whole, b.parts, b.first);
  return Part{piece.outer * run, run, piece.local * piece.inner, begin * piece.inner};
}

// Where in the tensor the element at `at` < size of the segment is; `left` elements from there on are neighbours in both.
AP_HD inline int64_t element_of(const Part& part, int64_t at, int64_t* left) {
  const int64_t turn = part.run == part.size ? 0 : at / part.run, within = at - turn * part.run;
  *left = part.run - within;
  return turn * part.stride + part.begin + within;
}

// Which piece the chunk numbered `chunk` of a row belongs to: the last that begins at or before it (one without chunks begins with the next).
AP_HD inline int64_t piece_of(const Piece* pieces, int64_t num_pieces, int64_t chunk) {
  int64_t low = 0, high = num_pieces - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (pieces[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace ap
