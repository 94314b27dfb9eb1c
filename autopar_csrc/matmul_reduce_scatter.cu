// matmul_reduce_scatter: the vendor's matmul computes each rank's partial product chunk by chunk. Each chunk is sent to the rank that owns
// its rows, which adds the chunks of all ranks in a fixed order.
//
// Shapes (terms: include/shards.h). Partial product of rank r [outer, rows, row] → result of rank r [outer, length(r), row].
//
// Order on rank r: the rows of r + 1, r + 2, … (mod size), its own rows last, each in num_chunks chunks. The product of the own rows is
// written directly into the own inbox. For every element, the sum runs over ranks 0, 1, …, size - 1, in whatever order the parts arrive:
// in fp32 for fp32, bf16 and fp16, in fp64 for fp64, in 64 bits for integers. The last step is the cast to the dtype. The result is
// therefore bitwise reproducible.
//
// Lanes. The compute lane multiplies and signals; the copy lane pushes, with the copy engine or with a kernel of few blocks
// (include/blocks.h); then the compute lane waits for its peers and computes the sum. Other ops on the sum can be fused into this step:
// reduce_add_rmsnorm.cu takes the slots as its parts. Signals of epoch e:
//   chunk flag (p, c)     "this chunk of epoch e is computed"                             r's compute lane → r's copy lane
//   peer flag (j), of d   "j's part of d's rows of epoch e is in slot (e mod 2, j) of d's inbox"     j's copy lane → d's compute lane
//
// Reuse. The inbox has two slots per rank, which are used in turn. The peer flag of epoch e also means "I have added the parts of epoch
// e - 1", because a rank computes the products of an epoch after the sum of the previous epoch. A rank that computes its products of epoch
// e has waited for all parts of e - 1. So every peer has added the parts of e - 2, which were in the same slots. The caller owns the
// partial product: a copy lane begins its epoch after all earlier work of the compute lane, and the compute lane's epoch ends after the
// copy lane's.
//
// Order of work: a rank's products before its push, or concurrently with it; the push of all ranks before the sum of any rank. No
// allocation, no synchronization.

#include "include/blocks.h"
#include "include/lanes.h"

namespace ap {
namespace {

template <class Lane> int produced(const Lane& lane, const Shards& s, uint64_t* flags, int64_t position, int64_t chunk, uint64_t epoch) {
  if (!is_valid(s) || epoch == 0 || position < 0 || position >= s.size - 1 || chunk < 0 || chunk >= s.num_chunks) return AP_BAD_ARGUMENT;
  return lane.signal(flags + chunk_flag(s, position, chunk), epoch);
}

AP_EITHER template <class Lane>
AP_HD int push(const Lane& lane, const Shards& s, const char* partial, char* const* inboxes, uint64_t* const* flags, uint64_t epoch) {
  if (!is_valid(s) || epoch == 0) return AP_BAD_ARGUMENT;
  for (int64_t position = 0; position < s.size - 1; ++position) {
    const int64_t owner = scattered_owner(s, position);
    char* const slot = inboxes[owner] + inbox_offset(s, epoch, s.rank);
    for (int64_t chunk = 0; chunk < s.num_chunks; ++chunk) {
      const Block b = block_of(s, owner, chunk);
      AP_TRY(lane.wait(flags[s.rank] + chunk_flag(s, position, chunk), epoch));
      AP_TRY(lane.copy(slot + b.in_shard, b.shard_pitch, partial + b.in_whole, b.whole_pitch, b.width, b.height));
    }
    AP_TRY(lane.signal(flags[owner] + peer_flag(s.rank), epoch));
  }
  return AP_OK;
}

#ifdef AP_DEVICE
__global__ void __launch_bounds__(kLaneThreads) ap_push_kernel(BlockLane lane, Shards s, const char* partial,
                                                               const __grid_constant__ Peers inboxes,
                                                               const __grid_constant__ Signals flags, uint64_t epoch) {
  if (push(lane, s, partial, inboxes.at, flags.at, epoch) != AP_OK) stop();
}
#endif

template <class Lane> int await_all(const Lane& lane, const Shards& s, const uint64_t* flags, uint64_t epoch) {
  if (!is_valid(s) || epoch == 0) return AP_BAD_ARGUMENT;
  for (int64_t peer = 0; peer < s.size; ++peer)
    if (peer != s.rank) AP_TRY(lane.wait_for_pushed(flags + peer_flag(peer), epoch));
  return AP_OK;
}

// --- the sum ---------------------------------------------------------------------------------------------------------------------
// Stored type → the type of the sum. Integers are added as unsigned integers, whose overflow is defined to wrap around.
template <class T> struct Sum : Wide<T> {};
template <> struct Sum<int32_t> { using type = uint64_t; };
template <> struct Sum<int64_t> { using type = uint64_t; };

// Adds elements [begin, begin + count), count <= kGroup, of all slots. `slot` is the distance between slots in bytes.
template <class T> AP_HD inline void add_group(const char* slots, int64_t slot, T* out, int64_t begin, int64_t count, int64_t size) {
  using W = typename Sum<T>::type;
  W total[kGroup], part[kGroup];
  load_group<W, T>(reinterpret_cast<const T*>(slots) + begin, count, total);
  for (int64_t rank = 1; rank < size; ++rank) {
    load_group<W, T>(reinterpret_cast<const T*>(slots + rank * slot) + begin, count, part);
    for (int i = 0; i < kGroup; ++i) total[i] += part[i];
  }
  store_group<W, T>(out + begin, count, total);
}

#ifdef AP_DEVICE
template <class T>
__global__ void __launch_bounds__(256) ap_add_kernel(const char* slots, int64_t slot, T* out, int64_t count, int64_t size) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x * kGroup;
  for (int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kGroup; i < count; i += step)
    add_group<T>(slots, slot, out, i, count - i, size);
}
#endif

template <class T> int add_all(const char* slots, int64_t slot, T* out, int64_t count, int64_t size, [[maybe_unused]] void* stream) {
  if (count == 0) return AP_OK;
#ifdef AP_DEVICE
  const int64_t blocks = min_of(ceil_div(count, 256 * kGroup), 4096);
  AP_LAUNCH(ap_add_kernel<T>, unsigned(blocks), 256, stream, slots, slot, out, count, size);
  return launched();
#else
  for (int64_t i = 0; i < count; i += kGroup) add_group<T>(slots, slot, out, i, count - i, size);
  return AP_OK;
#endif
}

int add_slots(const char* inbox, void* out, int64_t count, int32_t dtype, const Shards& s, uint64_t epoch, void* stream) {
  if (!is_valid(s) || epoch == 0 || count < 0) return AP_BAD_ARGUMENT;
  const char* const slots = inbox + inbox_offset(s, epoch, 0);
  const int64_t slot = slot_bytes(s);
  if (dtype == AP_I32) return add_all(slots, slot, static_cast<int32_t*>(out), count, s.size, stream);
  if (dtype == AP_I64) return add_all(slots, slot, static_cast<int64_t*>(out), count, s.size, stream);
  AP_FOR_FLOAT(dtype, T, return add_all(slots, slot, static_cast<T*>(out), count, s.size, stream));
  return AP_BAD_ARGUMENT;
}

}  // namespace
}  // namespace ap

#ifndef AP_DEVICE

// Signals that the chunk at `position` < size - 1 of the partial product is computed.
AP_API int ap_matmul_reduce_scatter_produced_host(uint64_t* flags, ap::Shards s, int64_t position, int64_t chunk, uint64_t epoch) {
  return ap::produced(ap::HostLane{}, s, flags, position, chunk, epoch);
}

// `inboxes` and `flags`: one address per rank, in order of the ranks.
AP_API int ap_matmul_reduce_scatter_push_host(const void* partial, void* const* inboxes, uint64_t* const* flags, ap::Shards s,
                                              uint64_t epoch) {
  return ap::push(ap::HostLane{}, s, (const char*)partial, (char* const*)inboxes, flags, epoch);
}

// Returns when all peers' parts of epoch `epoch` are in this rank's inbox.
AP_API int ap_matmul_reduce_scatter_arrive_host(const uint64_t* flags, ap::Shards s, uint64_t epoch) {
  return ap::await_all(ap::HostLane{}, s, flags, epoch);
}

// out [count] = the sum of all slots of this epoch, `count` elements of `dtype` each.
AP_API int ap_matmul_reduce_scatter_reduce_host(const void* inbox, void* out, int64_t count, int32_t dtype, ap::Shards s, uint64_t epoch) {
  return ap::add_slots((const char*)inbox, out, count, dtype, s, epoch, nullptr);
}

// order [size, num_chunks, 3]: owner, first row and number of rows of each chunk, in the order of production.
AP_API int ap_matmul_reduce_scatter_order_host(int64_t* order, ap::Shards s) {
  if (!ap::is_valid(s)) return AP_BAD_ARGUMENT;
  for (int64_t position = 0; position < s.size; ++position)
    for (int64_t chunk = 0; chunk < s.num_chunks; ++chunk, order += 3) {
      const int64_t owner = ap::scattered_owner(s, position);
      const ap::Range inside = ap::chunk_of(s, owner, chunk);
      order[0] = owner, order[1] = ap::shard_of(s, owner).begin + inside.begin, order[2] = inside.length;
    }
  return AP_OK;
}

// sizes [3]: bytes of a rank's inbox, words of its flags, offset of slot (epoch mod 2, rank) in the inbox.
AP_API int ap_matmul_reduce_scatter_sizes_host(int64_t* sizes, ap::Shards s, uint64_t epoch) {
  if (!ap::is_valid(s)) return AP_BAD_ARGUMENT;
  sizes[0] = 2 * s.size * ap::slot_bytes(s), sizes[1] = ap::num_flag_words(s), sizes[2] = ap::inbox_offset(s, epoch, s.rank);
  return AP_OK;
}

#else

AP_API int ap_matmul_reduce_scatter_produced_cuda(uint64_t* flags, ap::Shards s, int64_t position, int64_t chunk, uint64_t epoch,
                                                  void* stream) {
  return ap::produced(ap::StreamLane{stream}, s, flags, position, chunk, epoch);
}

// `inboxes` and `flags` are host arrays of device addresses.
AP_API int ap_matmul_reduce_scatter_push_cuda(const void* partial, void* const* inboxes, uint64_t* const* flags, ap::Shards s,
                                              uint64_t epoch, void* stream) {
  return ap::push(ap::StreamLane{stream}, s, (const char*)partial, (char* const*)inboxes, flags, epoch);
}

// Like push, with one kernel of `num_blocks` blocks, which together copy at most `bytes_per_s`; 0 means no limit.
AP_API int ap_matmul_reduce_scatter_push_by_blocks_cuda(const void* partial, void* const* inboxes, uint64_t* const* flags, ap::Shards s,
                                                        uint64_t epoch, int64_t num_blocks, double bytes_per_s, void* stream) {
  if (!ap::can_run(s, epoch, num_blocks, bytes_per_s)) return AP_BAD_ARGUMENT;
  AP_LAUNCH(ap::ap_push_kernel, unsigned(num_blocks), unsigned(ap::kLaneThreads), stream, ap::lane_of(bytes_per_s), s,
            (const char*)partial, ap::peers_at(s.size, inboxes), ap::signals_at(s.size, flags), epoch);
  return ap::launched();
}

AP_API int ap_matmul_reduce_scatter_arrive_cuda(const uint64_t* flags, ap::Shards s, uint64_t epoch, void* stream) {
  return ap::await_all(ap::StreamLane{stream}, s, flags, epoch);
}

AP_API int ap_matmul_reduce_scatter_reduce_cuda(const void* inbox, void* out, int64_t count, int32_t dtype, ap::Shards s, uint64_t epoch,
                                                void* stream) {
  return ap::add_slots((const char*)inbox, out, count, dtype, s, epoch, stream);
}

#endif
