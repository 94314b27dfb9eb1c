// expert_rows: sends the rows of pairs to the ranks of their experts, which use them in the memory in which they arrive, and sends the
// results back.
//
// Shapes (terms and orders: include/routes.h). In a *step*, all ranks together send the counts once, then rows once or several times. Each
// transfer of rows uses its own regions.
//   counts [num_experts]         of this rank's pairs, by expert → table [size, num_experts], of every rank
//   x [any, row], index [pairs]  the row of the pair at sorted place i is x[index[i]] → received, at the experts' homes
//   rows [received, row]         the results of the experts → sorted, at the senders
//
// Step, epoch e of each region, all in the compute lane. Each writer signals the flag (own rank) of every rank, in the region it writes:
//   announce       writes the counts to all ranks' tables
//   table          waits for all ranks' announce, copies the table out
//   push, await    writes each row to its place at its home; waits for all ranks' push
//   return, await  writes each row to its sorted place at its sender; waits for all ranks' return
// After an await, later work of the caller's lane reads the received rows in the region itself. A view of them is valid until this rank
// announces the next step.
//
// Reuse. Every region has one slot, and is written once per step. Rows: a rank pushes or returns after it has all ranks' counts of this
// step, which they announced after all their reads of the previous steps. So it does not matter how long after its await a rank reads, or
// which steps use a region. Counts: a rank that announces has awaited all ranks' rows of the previous step, which they pushed after they
// had copied their tables. So a step that counts also pushes.
//
// Order of work: the announce of all ranks, then the table of all ranks; likewise push, then await. No allocation, no synchronization.

#include "include/lanes.h"
#include "include/routes.h"

namespace ap {
namespace {

#ifdef AP_DEVICE

// One thread per rank, so that the flags of all ranks need only one launch.
__global__ void __launch_bounds__(kMaxRanks) ap_rows_tell_kernel(Routes r, Signals signals, uint64_t epoch) {
  if (threadIdx.x < r.size && signal(signals.at[threadIdx.x] + come_flag(r.rank), epoch) != AP_OK) stop();
}
__global__ void __launch_bounds__(kMaxRanks) ap_rows_await_kernel(Routes r, const uint64_t* flags, uint64_t epoch) {
  if (threadIdx.x < r.size && wait(flags + come_flag(threadIdx.x), epoch) != AP_OK) stop();
}

// One block per rank.
__global__ void __launch_bounds__(128) ap_rows_announce_kernel(Routes r, const int64_t* counts, Peers tables, Signals signals,
                                                               uint64_t epoch) {
  const unsigned peer = blockIdx.x;
  int64_t* const to = reinterpret_cast<int64_t*>(tables.at[peer]) + r.rank * r.num_experts;
  for (int64_t expert = threadIdx.x; expert < r.num_experts; expert += blockDim.x) to[expert] = counts[expert];
  __syncthreads();
  if (threadIdx.x == 0 && signal(signals.at[peer] + come_flag(r.rank), epoch) != AP_OK) stop();
}

__global__ void __launch_bounds__(128) ap_rows_push_kernel(Routes r, const char* x, const int64_t* index, const int64_t* table,
                                                           Peers homes) {
  push_block(r, x, index, table, homes, blockIdx.x, blockIdx.y, gridDim.y, threadIdx.x, blockDim.x);
}

__global__ void __launch_bounds__(128) ap_rows_return_kernel(Routes r, const char* rows, const int64_t* table, Peers senders) {
  return_block(r, rows, table, senders, 0, blockIdx.x, blockIdx.y, gridDim.y, threadIdx.x, blockDim.x);
}

// Enough blocks share the rows from one rank for one expert that all blocks together fill a device, but at most one block per row.
dim3 grid_of(const Routes& r) {
  return dim3(unsigned(r.num_experts), unsigned(min_of(min_of(ceil_div(4096, r.num_experts), 512), r.most < 1 ? 1 : r.most)));
}

int tell(const StreamLane& lane, const Routes& r, uint64_t* const* flags, uint64_t epoch) {
  AP_LAUNCH(ap_rows_tell_kernel, 1, unsigned(kMaxRanks), lane.stream, r, signals_at(r.size, flags), epoch);
  return launched();
}
int wait_for_all(const StreamLane& lane, const Routes& r, const uint64_t* flags, uint64_t epoch) {
  AP_LAUNCH(ap_rows_await_kernel, 1, unsigned(kMaxRanks), lane.stream, r, flags, epoch);
  return launched();
}
int write_counts(const StreamLane& lane, const Routes& r, const int64_t* counts, const Peers& tables, uint64_t* const* flags,
                 uint64_t epoch) {
  AP_LAUNCH(ap_rows_announce_kernel, unsigned(r.size), 128, lane.stream, r, counts, tables, signals_at(r.size, flags), epoch);
  return launched();
}
int push_rows(const StreamLane& lane, const Routes& r, const char* x, const int64_t* index, const int64_t* table, const Peers& homes) {
  AP_LAUNCH(ap_rows_push_kernel, grid_of(r), 128, lane.stream, r, x, index, table, homes);
  return launched();
}
int return_rows(const StreamLane& lane, const Routes& r, const char* rows, const int64_t* table, const Peers& senders) {
  AP_LAUNCH(ap_rows_return_kernel, grid_of(r), 128, lane.stream, r, rows, table, senders);
  return launched();
}

#else

int tell(const HostLane& lane, const Routes& r, uint64_t* const* flags, uint64_t epoch) {
  for (int64_t peer = 0; peer < r.size; ++peer) AP_TRY(lane.signal(flags[peer] + come_flag(r.rank), epoch));
  return AP_OK;
}
int wait_for_all(const HostLane& lane, const Routes& r, const uint64_t* flags, uint64_t epoch) {
  for (int64_t peer = 0; peer < r.size; ++peer) AP_TRY(lane.wait_for_pushed(flags + come_flag(peer), epoch));
  return AP_OK;
}
int write_counts(const HostLane& lane, const Routes& r, const int64_t* counts, const Peers& tables, uint64_t* const* flags,
                 uint64_t epoch) {
  const size_t num_bytes = size_t(r.num_experts) * 8;
  for (int64_t peer = 0; peer < r.size; ++peer) memcpy(tables.at[peer] + size_t(r.rank) * num_bytes, counts, num_bytes);
  return tell(lane, r, flags, epoch);
}
int push_rows(const HostLane&, const Routes& r, const char* x, const int64_t* index, const int64_t* table, const Peers& homes) {
  for (int64_t e = 0; e < r.num_experts; ++e) push_block(r, x, index, table, homes, e, 0, 1, 0, 1);
  return AP_OK;
}
int return_rows(const HostLane&, const Routes& r, const char* rows, const int64_t* table, const Peers& senders) {
  for (int64_t block = 0; block < r.num_experts; ++block) return_block(r, rows, table, senders, 0, block, 0, 1, 0, 1);
  return AP_OK;
}

#endif

// --- the steps -------------------------------------------------------------------------------------------------------------------
template <class Lane> int await(const Lane& lane, const Routes& r, uint64_t* const* flags, uint64_t epoch) {
  if (!can_run(r, epoch)) return AP_BAD_ARGUMENT;
  return wait_for_all(lane, r, flags[r.rank], epoch);
}

template <class Lane>
int announce(const Lane& lane, const Routes& r, const int64_t* counts, void* const* memory, uint64_t* const* flags, uint64_t epoch) {
  if (!can_run(r, epoch)) return AP_BAD_ARGUMENT;
  return write_counts(lane, r, counts, peers_at(r.size, memory), flags, epoch);
}

template <class Lane>
int copy_table(const Lane& lane, const Routes& r, int64_t* table, void* const* memory, uint64_t* const* flags, uint64_t epoch) {
  AP_TRY(await(lane, r, flags, epoch));
  const int64_t num_bytes = r.size * r.num_experts * 8;
  return lane.copy(reinterpret_cast<char*>(table), num_bytes, static_cast<const char*>(memory[r.rank]), num_bytes, num_bytes, 1);
}

template <class Lane>
int push(const Lane& lane, const Routes& r, const char* x, const int64_t* index, const int64_t* table, void* const* memory,
         uint64_t* const* flags, uint64_t epoch) {
  if (!can_run(r, epoch)) return AP_BAD_ARGUMENT;
  AP_TRY(push_rows(lane, r, x, index, table, peers_at(r.size, memory)));
  return tell(lane, r, flags, epoch);
}

template <class Lane>
int give_back(const Lane& lane, const Routes& r, const char* rows, const int64_t* table, void* const* memory, uint64_t* const* flags,
              uint64_t epoch) {
  if (!can_run(r, epoch)) return AP_BAD_ARGUMENT;
  AP_TRY(return_rows(lane, r, rows, table, peers_at(r.size, memory)));
  return tell(lane, r, flags, epoch);
}

}  // namespace
}  // namespace ap

#ifndef AP_DEVICE

// In all steps, `memory` and `flags` contain one address per rank, of one region, in order of the ranks. `r.tokens` and
// `r.choices` are unused.
AP_API int ap_expert_rows_announce_host(const int64_t* counts, void* const* memory, uint64_t* const* flags, ap::Routes r, uint64_t epoch) {
  return ap::announce(ap::HostLane{}, r, counts, memory, flags, epoch);
}

AP_API int ap_expert_rows_table_host(int64_t* table, void* const* memory, uint64_t* const* flags, ap::Routes r, uint64_t epoch) {
  return ap::copy_table(ap::HostLane{}, r, table, memory, flags, epoch);
}

AP_API int ap_expert_rows_push_host(const void* x, const int64_t* index, const int64_t* table, void* const* memory, uint64_t* const* flags,
                                    ap::Routes r, uint64_t epoch) {
  return ap::push(ap::HostLane{}, r, (const char*)x, index, table, memory, flags, epoch);
}

AP_API int ap_expert_rows_return_host(const void* rows, const int64_t* table, void* const* memory, uint64_t* const* flags, ap::Routes r,
                                      uint64_t epoch) {
  return ap::give_back(ap::HostLane{}, r, (const char*)rows, table, memory, flags, epoch);
}

AP_API int ap_expert_rows_await_host(void* const*, uint64_t* const* flags, ap::Routes r, uint64_t epoch) {
  return ap::await(ap::HostLane{}, r, flags, epoch);
}

// sizes [4]: bytes per rank of the regions of counts, of received rows and of sorted rows, and words of each region's flags.
AP_API int ap_expert_rows_sizes_host(int64_t* sizes, ap::Routes r) {
  if (!ap::is_valid(r)) return AP_BAD_ARGUMENT;
  sizes[0] = ap::counts_bytes(r), sizes[1] = ap::received_bytes(r), sizes[2] = ap::sorted_bytes(r), sizes[3] = ap::num_come_flags(r);
  return AP_OK;
}

#else

// `memory` and `flags` are host arrays of device addresses.
AP_API int ap_expert_rows_announce_cuda(const int64_t* counts, void* const* memory, uint64_t* const* flags, ap::Routes r, uint64_t epoch,
                                        void* stream) {
  return ap::announce(ap::StreamLane{stream}, r, counts, memory, flags, epoch);
}

AP_API int ap_expert_rows_table_cuda(int64_t* table, void* const* memory, uint64_t* const* flags, ap::Routes r, uint64_t epoch,
                                     void* stream) {
  return ap::copy_table(ap::StreamLane{stream}, r, table, memory, flags, epoch);
}

AP_API int ap_expert_rows_push_cuda(const void* x, const int64_t* index, const int64_t* table, void* const* memory, uint64_t* const* flags,
                                    ap::Routes r, uint64_t epoch, void* stream) {
  return ap::push(ap::StreamLane{stream}, r, (const char*)x, index, table, memory, flags, epoch);
}

AP_API int ap_expert_rows_return_cuda(const void* rows, const int64_t* table, void* const* memory, uint64_t* const* flags, ap::Routes r,
                                      uint64_t epoch, void* stream) {
  return ap::give_back(ap::StreamLane{stream}, r, (const char*)rows, table, memory, flags, epoch);
}

AP_API int ap_expert_rows_await_cuda(void* const*, uint64_t* const* flags, ap::Routes r, uint64_t epoch, void* stream) {
  return ap::await(ap::StreamLane{stream}, r, flags, epoch);
}

#endif
