// Index maps for host and device.
#pragma once

#include "common.h"

namespace ap {

AP_HD inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
AP_HD inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// The rule of torch.chunk, like autopar.core.layout.part_range: each part has ceil(size / parts) elements until none are left.
AP_HD inline int64_t part_begin(int64_t size, int64_t parts, int64_t part) { return min_of(ceil_div(size, parts) * part, size); }
AP_HD inline int64_t part_length(int64_t size, int64_t parts, int64_t part) {
  return part_begin(size, parts, part + 1) - part_begin(size, parts, part);
}

// --- buckets: many tensors in one buffer, rank by rank (see the diagram at the top of pack.cu) -------------------------------------
constexpr int64_t kAlign = 8;      // segment lengths are multiples of it, so that segments are 16-byte aligned in any dtype
constexpr int64_t kChunk = 16384;  // elements of a segment per block, or per item of the host threads
// The length of a split dim, the number of chunks of a bucket and the number of elements of a segment are less than 2^31.
AP_HD inline int64_t quotient(int64_t a, int64_t b) { return uint32_t(a) / uint32_t(b); }  // 64-bit division is a call on the device

// One tensor: [outer, local, inner] in memory, a part of [outer, whole, inner]. A row of the table that the caller provides.
struct Piece {
  int64_t data;         // address of the first element
  int64_t dtype;        // a floating-point ap_dtype
  int64_t outer;        // product of the dims before the split dim
  int64_t whole;        // length of the split dim in the whole tensor
  int64_t local;        // its length in this tensor, which contains the parts of ranks first, ..., first + count - 1
  int64_t inner;        // product of the dims after it
  int64_t offset;       // offset of the segment in a row, in elements
  int64_t first_chunk;  // index of the segment's first chunk in a row
};

struct Bucket {
  int64_t row;     // elements per rank
  int64_t parts;   // number of ranks over which the tensors are split
  int64_t first;   // first rank whose row is in the bucket
  int64_t count;   // number of rows in the bucket
  int64_t chunks;  // chunks per row
};

AP_HD inline bool is_sound(const Bucket& b, int64_t num_pieces) {
  return num_pieces >= 0 && b.row >= 0 && b.row % kAlign == 0 && b.parts > 0 && b.first >= 0 && b.count > 0 &&
         b.first + b.count <= b.parts && b.chunks >= 0;
}

// Number of elements of a piece's segment in each row, including padding.
AP_HD inline int64_t segment_length(const Piece& piece, int64_t parts) {
  return (piece.outer * quotient(piece.whole + parts - 1, parts) * piece.inner + kAlign - 1) & ~(kAlign - 1);
}

// Checks a piece on the host. The device does not check its table.
inline bool is_sound(const Piece& piece, const Bucket& b) {
  const bool cut = piece.outer >= 0 && piece.whole >= 0 && piece.whole + b.parts < INT32_MAX && piece.inner >= 0;
  if (!cut || piece.dtype < AP_F32 || piece.dtype > AP_F16) return false;
  const int64_t length = segment_length(piece, b.parts);
  return length < INT32_MAX && piece.offset >= 0 && piece.offset % kAlign == 0 && piece.offset + length <= b.row &&
         piece.first_chunk >= 0 && piece.first_chunk + ceil_div(length, kChunk) <= b.chunks;
}

// One rank's part of a piece: `outer` runs of `run` contiguous elements. In the tensor the runs are `stride` apart; in the segment they are
// contiguous.
struct Part {
  int64_t size, run, stride, begin;
};

AP_HD inline Part part_of(const Piece& piece, const Bucket& b, int64_t rank) {
  const int64_t most = quotient(piece.whole + b.parts - 1, b.parts);  // same rule as part_begin and part_length
  const int64_t begin = min_of(most * rank, piece.whole), end = min_of(begin + most, piece.whole);
  const int64_t run = (end - begin) * piece.inner;
  return Part{piece.outer * run, run, piece.local * piece.inner, (begin - min_of(most * b.first, piece.whole)) * piece.inner};
}

// Offset in the tensor of the element at offset `at` < size of the segment. `left` elements from there on are contiguous in both.
AP_HD inline int64_t element_of(const Part& part, int64_t at, int64_t* left) {
  const int64_t turn = part.run == part.size ? 0 : quotient(at, part.run), within = at - turn * part.run;
  *left = part.run - within;
  return turn * part.stride + part.begin + within;
}

// Index of the piece that contains chunk `chunk` of a row: the last piece whose first chunk is at or before it. A piece without chunks has
// the first chunk of the next piece.
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
