// pack, unpack: copy many tensors into one bucket and back, with a cast and a scale, in one pass over the data.
//
//   bucket [count, row]       one row per rank: one segment per tensor, in the order of the tensors
//     rank first      | tensor 0's part ..0 | tensor 1's part .0 | ... |
//     rank first + 1  | tensor 0's part ..0 | tensor 1's part .0 | ... |      0: padding, written as zeros, never read back
//     ...
//
// Rank-major: row r contains rank r's part of every tensor. A reduce-scatter of a whole bucket therefore gives each rank one row with its
// parts, and an all-gather of rows gives a whole bucket. A tensor [outer, whole, inner] is split along the middle dim by the rule of
// torch.chunk (index.h). In its segment, a rank's part is stored as the contiguous tensor [outer, part, inner]. The segments of all ranks
// have the length of the largest part, padded to a multiple of 8 elements. A tensor contains the parts of the ranks whose rows are in the
// bucket: the parts of all ranks before a reduce-scatter and after an all-gather (first 0, count = parts), and the part of one rank after
// a reduce-scatter and before an all-gather.
//
// Values: bucket = to_bucket(wide(x) * scale), and back x = to_tensor(wide(bucket) * scale). wide is float, or double if either dtype is
// double. The sum of squares of each tensor adds the squares of wide(x) * scale before the value is rounded to the bucket's dtype. It is
// computed in double, in the order of sums.h within each chunk of 16384 elements of a segment, and in the same order over the tensor's
// chunks, rank by rank.
//
// Device: one block of 256 threads per chunk, one group of 8 elements per thread; 16-byte accesses if the elements of the group are
// contiguous and aligned; at least four blocks per multiprocessor. The table of pieces is in memory that the device can read. The kernels
// allocate no memory and do not wait.
#include "include/index.h"
#include "include/sums.h"
#ifndef AP_DEVICE
#include "include/threads.h"
#endif

namespace ap {
namespace {

constexpr int64_t kGrain = 4;  // chunks per thread on the host

// Copies the group at `at` of one part into the segment. With kSquares, adds the squares to `sum` one by one.
template <bool kSquares, class S, class B>
AP_HD inline double pack_group(const S* data, const Part& part, B* segment, int64_t at, double factor, double sum) {
  using W = typename Wider<S, B>::type;
  W values[kGroup];
  int64_t left = 0;
  const int64_t begin = at < part.size ? element_of(part, at, &left) : 0;
  if (left >= kGroup || at + left >= part.size) {
    load_group<W>(data + begin, left, values);
  } else {
    for (int i = 0; i < kGroup; ++i)
      values[i] = at + i < part.size ? Convert<W, S>::wide(data[element_of(part, at + i, &left)]) : W(0);
  }
  for (int i = 0; i < kGroup; ++i) {
    values[i] = at + i < part.size ? values[i] * W(factor) : W(0);  // padding stays +0 for any factor
    if (kSquares) sum = sum + double(values[i]) * double(values[i]);
  }
  store_group(segment + at, kGroup, values);
  return sum;
}

// Packs two groups, and loads both before it stores the first. Returns false if a group is not full or not contiguous.
template <bool kSquares, class S, class B>
AP_HD inline bool pack_pair(const S* data, const Part& part, B* segment, int64_t at, int64_t next, double factor, double* sum) {
  using W = typename Wider<S, B>::type;
  if (next + kGroup > part.size) return false;
  int64_t left = 0, then = 0;
  const int64_t begin = element_of(part, at, &left), second = element_of(part, next, &then);
  if (left < kGroup || then < kGroup) return false;
  const Raw<S> raw = fetch_group(data + begin, kGroup), next_raw = fetch_group(data + second, kGroup);
  W values[2][kGroup];
  widen(raw, values[0]);
  widen(next_raw, values[1]);
  for (int turn = 0; turn < 2; ++turn)
    for (int i = 0; i < kGroup; ++i) {
      values[turn][i] = values[turn][i] * W(factor);
      if (kSquares) *sum = *sum + double(values[turn][i]) * double(values[turn][i]);
    }
  store_group(segment + at, kGroup, values[0]);
  store_group(segment + next, kGroup, values[1]);
  return true;
}

template <class S, class B> AP_HD inline void unpack_group(S* data, const Part& part, const B* segment, int64_t at, double factor) {
  using W = typename Wider<S, B>::type;
  if (at >= part.size) return;
  W values[kGroup];
  load_group<W>(segment + at, kGroup, values);
  for (int i = 0; i < kGroup; ++i) values[i] = values[i] * W(factor);
  int64_t left = 0;
  const int64_t begin = element_of(part, at, &left);
  if (left >= kGroup || at + left >= part.size) {
    store_group(data + begin, left, values);
  } else {
    for (int i = 0; i < kGroup && at + i < part.size; ++i) data[element_of(part, at + i, &left)] = Convert<W, S>::narrow(values[i]);
  }
}

// Calls each(part, at) for the groups g of a chunk with g mod `step` == `lane`, in increasing order.
template <class Each> AP_HD inline void groups_of_chunk(const Part& part, int64_t begin, int64_t end, int lane, int step, const Each& each) {
  for (int64_t at = begin + int64_t(lane) * kGroup; at < end; at += int64_t(step) * kGroup) each(part, at);
}

// A chunk: its piece, its range [begin, end) in the segment, the segment's offset in the bucket, and the rank's part of the piece.
struct Chunk {
  int64_t piece, begin, end, offset;
  Part part;
};

AP_HD inline Chunk chunk_of(const Piece* pieces, int64_t num_pieces, const Bucket& b, int64_t index) {
  const int64_t turn = quotient(index, b.chunks), number = index - turn * b.chunks, found = piece_of(pieces, num_pieces, number);
  const Piece& piece = pieces[found];
  const int64_t begin = (number - piece.first_chunk) * kChunk;
  const int64_t end = min_of(begin + kChunk, segment_length(piece, b.parts));
  return Chunk{found, begin, end, turn * b.row + piece.offset, part_of(piece, b, b.first + turn)};
}

// The number of a piece's k-th chunk, counted rank by rank, among all chunks of the bucket.
AP_HD inline int64_t nth_chunk(const Piece& piece, const Bucket& b, int64_t per_row, int64_t k) {
  const int64_t turn = quotient(k, per_row);
  return turn * b.chunks + piece.first_chunk + (k - turn * per_row);
}

AP_HD inline int64_t chunks_of(const Piece& piece, const Bucket& b) { return (segment_length(piece, b.parts) + kChunk - 1) / kChunk; }

template <bool kSquares, class B>
AP_HD inline int pack_lane(const Piece& piece, const Chunk& chunk, B* bucket, double scale, int lane, int step, double* sums) {
  AP_FOR_FLOAT(piece.dtype, S, {
    const S* data = reinterpret_cast<const S*>(piece.data);
    const int64_t stride = int64_t(step) * kGroup;
    int64_t group = lane;
    for (int64_t at = chunk.begin + int64_t(lane) * kGroup; at < chunk.end; at += stride, ++group) {
      double& sum = sums[group % (step == 1 ? kLanes : 1)];
      const int64_t next = at + stride;
      if (step > 1 && next < chunk.end && pack_pair<kSquares>(data, chunk.part, bucket + chunk.offset, at, next, scale, &sum)) {
        at = next;
      } else {
        sum = pack_group<kSquares>(data, chunk.part, bucket + chunk.offset, at, scale, sum);
      }
    }
  })
  return AP_OK;
}

template <class B>
AP_HD inline int unpack_lane(const Piece& piece, const Chunk& chunk, const B* bucket, double scale, int lane, int step) {
  AP_FOR_FLOAT(piece.dtype, S, {
    S* data = reinterpret_cast<S*>(piece.data);
    groups_of_chunk(chunk.part, chunk.begin, chunk.end, lane, step,
                    [&](const Part& part, int64_t at) { unpack_group(data, part, bucket + chunk.offset, at, scale); });
  })
  return AP_OK;
}

}  // namespace
}  // namespace ap

#ifdef AP_DEVICE

template <bool kSquares, class B>
__global__ void __launch_bounds__(ap::kLanes, 4)
    ap_pack_kernel(const ap::Piece* pieces, int64_t num_pieces, B* bucket, ap::Bucket b, double scale, double* chunk_sums) {
  __shared__ double lanes[kSquares ? ap::kLanes : 1];
  const ap::Chunk chunk = ap::chunk_of(pieces, num_pieces, b, blockIdx.x);
  double sum = 0;
  ap::pack_lane<kSquares>(pieces[chunk.piece], chunk, bucket, scale, threadIdx.x, ap::kLanes, &sum);
  if (kSquares) {
    sum = ap::add_block(sum, lanes);
    if (threadIdx.x == 0) chunk_sums[blockIdx.x] = sum;
  }
}

// One block per tensor.
__global__ void __launch_bounds__(ap::kLanes, 4)
    ap_pack_squares_kernel(const ap::Piece* pieces, ap::Bucket b, const double* chunk_sums, double* squares) {
  __shared__ double lanes[ap::kLanes];
  const ap::Piece piece = pieces[blockIdx.x];
  const int64_t per_row = ap::chunks_of(piece, b);
  double sum = 0;
  for (int64_t k = threadIdx.x; k < per_row * b.count; k += ap::kLanes) sum = sum + chunk_sums[ap::nth_chunk(piece, b, per_row, k)];
  sum = ap::add_block(sum, lanes);
  if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}

template <class B>
__global__ void __launch_bounds__(ap::kLanes, 4)
    ap_unpack_kernel(const ap::Piece* pieces, int64_t num_pieces, const B* bucket, ap::Bucket b, double scale) {
  const ap::Chunk chunk = ap::chunk_of(pieces, num_pieces, b, blockIdx.x);
  ap::unpack_lane(pieces[chunk.piece], chunk, bucket, scale, threadIdx.x, ap::kLanes);
}

AP_API int ap_pack_bucket_cuda(const ap::Piece* pieces, int64_t num_pieces, void* bucket, int dtype, int64_t row, int64_t parts,
                               int64_t first, int64_t count, int64_t chunks, double scale, double* chunk_sums, double* squares,
                               void* stream) {
  const ap::Bucket b{row, parts, first, count, chunks};
  if (!ap::is_sound(b, num_pieces) || chunks * count > INT32_MAX || (squares != nullptr && chunk_sums == nullptr)) return AP_BAD_ARGUMENT;
  const unsigned blocks = unsigned(chunks * count);
  AP_FOR_FLOAT(dtype, B, {
    B* to = static_cast<B*>(bucket);
    if (blocks > 0 && squares != nullptr) {
      AP_LAUNCH(ap_pack_kernel<true>, blocks, ap::kLanes, stream, pieces, num_pieces, to, b, scale, chunk_sums);
    } else if (blocks > 0) {
      AP_LAUNCH(ap_pack_kernel<false>, blocks, ap::kLanes, stream, pieces, num_pieces, to, b, scale, chunk_sums);
    }
  })
  if (squares != nullptr && num_pieces > 0)
    AP_LAUNCH(ap_pack_squares_kernel, unsigned(num_pieces), ap::kLanes, stream, pieces, b, chunk_sums, squares);
  return ap::launched();
}

AP_API int ap_unpack_bucket_cuda(const ap::Piece* pieces, int64_t num_pieces, const void* bucket, int dtype, int64_t row, int64_t parts,
                                 int64_t first, int64_t count, int64_t chunks, double scale, void* stream) {
  const ap::Bucket b{row, parts, first, count, chunks};
  if (!ap::is_sound(b, num_pieces) || chunks * count > INT32_MAX) return AP_BAD_ARGUMENT;
  AP_FOR_FLOAT(dtype, B, {
    const B* from = static_cast<const B*>(bucket);
    if (chunks > 0) AP_LAUNCH(ap_unpack_kernel, unsigned(chunks * count), ap::kLanes, stream, pieces, num_pieces, from, b, scale);
  })
  return ap::launched();
}

#else

AP_API int ap_pack_bucket_host(const ap::Piece* pieces, int64_t num_pieces, void* bucket, int dtype, int64_t row, int64_t parts,
                               int64_t first, int64_t count, int64_t chunks, double scale, double* chunk_sums, double* squares,
                               int num_threads) {
  const ap::Bucket b{row, parts, first, count, chunks};
  if (!ap::is_sound(b, num_pieces) || (squares != nullptr && chunk_sums == nullptr)) return AP_BAD_ARGUMENT;
  for (int64_t i = 0; i < num_pieces; ++i)
    if (!ap::is_sound(pieces[i], b)) return AP_BAD_ARGUMENT;
  AP_FOR_FLOAT(dtype, B, {
    ap::for_each_item(chunks * count, num_threads, [&](int64_t index) {
      const ap::Chunk chunk = ap::chunk_of(pieces, num_pieces, b, index);
      double lanes[ap::kLanes] = {};
      if (squares != nullptr) {
        ap::pack_lane<true>(pieces[chunk.piece], chunk, static_cast<B*>(bucket), scale, 0, 1, lanes);
        chunk_sums[index] = ap::add_lanes(lanes);
      } else {
        ap::pack_lane<false>(pieces[chunk.piece], chunk, static_cast<B*>(bucket), scale, 0, 1, lanes);
      }
    }, ap::kGrain);
  })
  for (int64_t i = 0; squares != nullptr && i < num_pieces; ++i) {
    const int64_t per_row = ap::chunks_of(pieces[i], b);
    const auto value = [&](int64_t k) { return chunk_sums[ap::nth_chunk(pieces[i], b, per_row, k)]; };
    squares[i] = ap::add_all<double>(per_row * count, value);
  }
  return AP_OK;
}

AP_API int ap_unpack_bucket_host(const ap::Piece* pieces, int64_t num_pieces, const void* bucket, int dtype, int64_t row, int64_t parts,
                                 int64_t first, int64_t count, int64_t chunks, double scale, int num_threads) {
  const ap::Bucket b{row, parts, first, count, chunks};
  if (!ap::is_sound(b, num_pieces)) return AP_BAD_ARGUMENT;
  for (int64_t i = 0; i < num_pieces; ++i)
    if (!ap::is_sound(pieces[i], b)) return AP_BAD_ARGUMENT;
  AP_FOR_FLOAT(dtype, B, {
    ap::for_each_item(chunks * count, num_threads, [&](int64_t index) {
      const ap::Chunk chunk = ap::chunk_of(pieces, num_pieces, b, index);
      ap::unpack_lane(pieces[chunk.piece], chunk, static_cast<const B*>(bucket), scale, 0, 1);
    }, ap::kGrain);
  })
  return AP_OK;
}

#endif
