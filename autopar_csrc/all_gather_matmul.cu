// all_gather_matmul: copies every rank's shard to every rank, chunk by chunk, while the vendor's matmul multiplies the chunks that have
// arrived.
//
// Shapes (terms: include/shards.h). Shard of rank r [outer, length(r), row] → gathered [outer, rows, row] on every rank. The caller
// computes the product with the other operand, chunk by chunk along `rows`.
//
// Order on rank r: its own shard, then the shards of r + 1, r + 2, … (mod size), each in num_chunks chunks.
//
// Lanes. The compute lane publishes. Then, for each position and chunk, it waits and multiplies. The copy lane pulls, with the copy engine
// or with a kernel of few blocks (include/blocks.h). Signals of epoch e:
//   own flag              "the shard of epoch e is in slot e mod 2 of my source"         r's compute lane → all peers' copy lanes
//   chunk flag (p, c)     "this chunk of epoch e is in gathered"                          r's copy lane → r's compute lane
//
// Reuse. The source has two slots, which are used in turn. The own flag of epoch e also means "I have read all shards of epoch e - 1",
// because a rank publishes after its waits for all chunks of the previous epoch. A rank that writes its shard of epoch e has waited for all
// chunks of e - 1. So every peer has published e - 1, and has therefore read e - 2, which was in the same slot. The caller owns `gathered`:
// a copy lane begins its epoch after all earlier work of the compute lane, and the compute lane's epoch ends after the copy lane's.
//
// Order of work: the publish of all ranks before the pull of any rank; a rank's pull before its waits, or concurrently with them. No
// allocation, no synchronization.

#include "include/blocks.h"
#include "include/lanes.h"

namespace ap {
namespace {

// Copies one chunk of the shard at address `shard` to its place in `gathered`.
AP_EITHER template <class Lane> AP_HD int place(const Lane& lane, const Shards& s, char* gathered, const char* shard, int64_t owner, int64_t chunk) {
  const Block b = block_of(s, owner, chunk);
  return lane.copy(gathered + b.in_whole, b.whole_pitch, shard + b.in_shard, b.shard_pitch, b.width, b.height);
}

template <class Lane>
int publish(const Lane& lane, const Shards& s, const char* x, char* source, char* gathered, uint64_t* flags, uint64_t epoch) {
  if (!is_valid(s) || epoch == 0) return AP_BAD_ARGUMENT;
  const int64_t num_bytes = s.outer * shard_of(s, s.rank).length * s.row_bytes;
  AP_TRY(lane.copy(source + source_offset(s, epoch), num_bytes, x, num_bytes, num_bytes, 1));
  AP_TRY(lane.signal(flags + own_flag(), epoch));
  for (int64_t chunk = 0; chunk < s.num_chunks; ++chunk) AP_TRY(place(lane, s, gathered, x, s.rank, chunk));
  return AP_OK;
}

AP_EITHER template <class Lane>
AP_HD int pull(const Lane& lane, const Shards& s, char* gathered, const char* const* sources, uint64_t* const* flags, uint64_t epoch) {
  if (!is_valid(s) || epoch == 0) return AP_BAD_ARGUMENT;
  uint64_t* const own = flags[s.rank];
  for (int64_t position = 1; position < s.size; ++position) {
    const int64_t owner = gathered_owner(s, position);
    const char* const shard = sources[owner] + source_offset(s, epoch);
    AP_TRY(lane.wait(flags[owner] + own_flag(), epoch));
    for (int64_t chunk = 0; chunk < s.num_chunks; ++chunk) {
      AP_TRY(place(lane, s, gathered, shard, owner, chunk));
      AP_TRY(lane.signal(own + chunk_flag(s, position, chunk), epoch));
    }
  }
  return AP_OK;
}

template <class Lane>
int wait_chunk(const Lane& lane, const Shards& s, const uint64_t* flags, int64_t position, int64_t chunk, uint64_t epoch) {
  if (!is_valid(s) || position < 1 || position >= s.size || chunk < 0 || chunk >= s.num_chunks) return AP_BAD_ARGUMENT;
  return lane.wait(flags + chunk_flag(s, position, chunk), epoch);
}

#ifdef AP_DEVICE
__global__ void __launch_bounds__(kLaneThreads) ap_pull_kernel(BlockLane lane, Shards s, char* gathered, const __grid_constant__ Peers sources,
                                                               const __grid_constant__ Signals flags, uint64_t epoch) {
  if (pull(lane, s, gathered, sources.at, flags.at, epoch) != AP_OK) stop();
}
#endif

}  // namespace
}  // namespace ap

#ifndef AP_DEVICE

// x [outer, length(rank), row], contiguous; `source` and `flags` are in this rank's shared memory.
AP_API int ap_all_gather_matmul_publish_host(const void* x, void* source, void* gathered, uint64_t* flags, ap::Shards s, uint64_t epoch) {
  return ap::publish(ap::HostLane{}, s, (const char*)x, (char*)source, (char*)gathered, flags, epoch);
}

// `sources` and `flags`: one address per rank, in order of the ranks.
AP_API int ap_all_gather_matmul_pull_host(void* gathered, const void* const* sources, uint64_t* const* flags, ap::Shards s,
                                          uint64_t epoch) {
  return ap::pull(ap::HostLane{}, s, (char*)gathered, (const char* const*)sources, flags, epoch);
}

// Returns when the chunk at `position` >= 1 is in `gathered`. Position 0 is the own shard, which publish has copied there.
AP_API int ap_all_gather_matmul_wait_host(const uint64_t* flags, ap::Shards s, int64_t position, int64_t chunk, uint64_t epoch) {
  return ap::wait_chunk(ap::HostLane{}, s, flags, position, chunk, epoch);
}

// order [size, num_chunks, 3]: owner, first row and number of rows of each chunk, in the order of consumption.
AP_API int ap_all_gather_matmul_order_host(int64_t* order, ap::Shards s) {
  if (!ap::is_valid(s)) return AP_BAD_ARGUMENT;
  for (int64_t position = 0; position < s.size; ++position)
    for (int64_t chunk = 0; chunk < s.num_chunks; ++chunk, order += 3) {
      const int64_t owner = ap::gathered_owner(s, position);
      const ap::Range inside = ap::chunk_of(s, owner, chunk);
      order[0] = owner, order[1] = ap::shard_of(s, owner).begin + inside.begin, order[2] = inside.length;
    }
  return AP_OK;
}

// sizes [2]: bytes of a rank's source, words of its flags.
AP_API int ap_all_gather_matmul_sizes_host(int64_t* sizes, ap::Shards s) {
  if (!ap::is_valid(s)) return AP_BAD_ARGUMENT;
  sizes[0] = 2 * ap::slot_bytes(s), sizes[1] = ap::num_flag_words(s);
  return AP_OK;
}

#else

AP_API int ap_all_gather_matmul_publish_cuda(const void* x, void* source, void* gathered, uint64_t* flags, ap::Shards s, uint64_t epoch,
                                             void* stream) {
  return ap::publish(ap::StreamLane{stream}, s, (const char*)x, (char*)source, (char*)gathered, flags, epoch);
}

// `sources` and `flags` are host arrays of device addresses.
AP_API int ap_all_gather_matmul_pull_cuda(void* gathered, const void* const* sources, uint64_t* const* flags, ap::Shards s, uint64_t epoch,
                                          void* stream) {
  return ap::pull(ap::StreamLane{stream}, s, (char*)gathered, (const char* const*)sources, flags, epoch);
}

// Like pull, with one kernel of `num_blocks` blocks, which together copy at most `bytes_per_s`; 0 means no limit.
AP_API int ap_all_gather_matmul_pull_by_blocks_cuda(void* gathered, void* const* sources, uint64_t* const* flags, ap::Shards s,
                                                    uint64_t epoch, int64_t num_blocks, double bytes_per_s, void* stream) {
  if (!ap::can_run(s, epoch, num_blocks, bytes_per_s)) return AP_BAD_ARGUMENT;
  AP_LAUNCH(ap::ap_pull_kernel, unsigned(num_blocks), unsigned(ap::kLaneThreads), stream, ap::lane_of(bytes_per_s), s, (char*)gathered,
            ap::peers_at(s.size, sources), ap::signals_at(s.size, flags), epoch);
  return ap::launched();
}

AP_API int ap_all_gather_matmul_wait_cuda(const uint64_t* flags, ap::Shards s, int64_t position, int64_t chunk, uint64_t epoch,
                                          void* stream) {
  return ap::wait_chunk(ap::StreamLane{stream}, s, flags, position, chunk, epoch);
}

#endif
