// Index maps that host and device share.
#pragma once

#include "common.h"

namespace ap {

AP_HD inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
AP_HD inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// The rule of torch.chunk, as autopar.core.layout.part_range: every part has ceil(size / parts) elements until none is left.
AP_HD inline int64_t part_begin(int64_t size, int64_t parts, int64_t part) { return min_of(ceil_div(size, parts) * part, size); }
AP_HD inline int64_t part_length(int64_t size, int64_t parts, int64_t part) {
  return part_begin(size, parts, part + 1) - part_begin(size, parts, part);
}

// --- buckets: many tensors in one buffer, rank after rank (the picture is at the top of pack.cu) ----------------------------------
constexpr int64_t kAlign = 8;      // a segment's length is a multiple, so that each begins at 16 bytes in any dtype
constexpr int64_t kChunk = 16384;  // elements of a segment that one block, or one item of the host's threads, moves
// A dim that is cut and the chunks of a bucket count less than 2^31, and so do the elements of a segment.
AP_HD inline int64_t quotient(int64_t a, int64_t b) { return uint32_t(a) / uint32_t(b); }  // of 64 bits it would be a call on the device

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
  return (piece.outer * quotient(piece.whole + parts - 1, parts) * piece.inner + kAlign - 1) & ~(kAlign - 1);
}

// What the host can see of its table; the device trusts it.
inline bool is_sound(const Piece& piece, const Bucket& b) {
  const bool cut = piece.outer >= 0 && piece.whole >= 0 && piece.whole + b.parts < INT32_MAX && piece.inner >= 0;
  if (!cut || piece.dtype < AP_F32 || piece.dtype > AP_F16) return false;
  const int64_t length = segment_length(piece, b.parts);
  return length < INT32_MAX && piece.offset >= 0 && piece.offset % kAlign == 0 && piece.offset + length <= b.row &&
         piece.first_chunk >= 0 && piece.first_chunk + ceil_div(length, kChunk) <= b.chunks;
}

// One rank's part of a piece: `outer` runs of `run` neighbours, `stride` apart in the tensor; in the segment one after the other.
struct Part {
  int64_t size, run, stride, begin;
};

AP_HD inline Part part_of(const Piece& piece, const Bucket& b, int64_t rank) {
  const int64_t most = quotient(piece.whole + b.parts - 1, b.parts);  // as part_begin and part_length
  const int64_t begin = min_of(most * rank, piece.whole), end = min_of(begin + most, piece.whole);
  const int64_t run = (end - begin) * piece.inner;
  return Part{piece.outer * run, run, piece.local * piece.inner, (begin - min_of(most * b.first, piece.whole)) * piece.inner};
}

// Where in the tensor the element at `at` < size of the segment is; `left` elements from there on are neighbours in both.
AP_HD inline int64_t element_of(const Part& part, int64_t at, int64_t* left) {
  const int64_t turn = part.run == part.size ? 0 : quotient(at, part.run), within = at - turn * part.run;
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
