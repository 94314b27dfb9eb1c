// moe_dispatch, moe_combine: send rows of tokens to the ranks of their experts and back, and permute them on the way.
//
// Shapes (terms and orders: include/routes.h). x [tokens, row], experts [tokens, choices] → rows [size · most, row] on every rank: first
// the received rows, then zeros; table [size, num_experts]; position [tokens, choices], the pair's sorted place.
// rows, of the same shape → returned [tokens · choices, row], sorted; y [tokens, row] = Σ_c weights[t, c] · returned[position[t, c]], added
// over c = 0, 1, … in fp32 (fp64 for fp64), without contraction. The last step is the cast to the dtype.
//
// Dispatch, epoch e, all in the compute lane:
//   count, announce   counts pairs by expert, writes the counts to all ranks' tables         signals counts flag (own rank) of every rank
//   push              waits for all counts, then writes each row to its place at its home    signals rows flag (own rank) of every rank
//   collect           waits for all rows, copies them out
// Combine:  push      writes each row back to its sorted place at its sender                 signals rows flag (own rank) of every rank
//           sum       waits for all rows, copies them out and adds them
//
// Reuse. Dispatch has one slot. Counts: a rank that announces e has collected e - 1. So all peers have pushed e - 1, and have copied their
// tables before that. Rows: a rank that pushes e has all peers' counts of e, which they announced after they had collected e - 1. Combine
// has two slots, which are used in turn: a rank that pushes e has computed the sum of e - 1. So it has all peers' rows of e - 1, which they
// pushed after they had computed the sum of e - 2.
//
// Order of work: the announce of all ranks, then the push of all ranks, then collect or sum. No allocation, no synchronization.

#include "include/lanes.h"
#include "include/routes.h"

namespace ap {
namespace {

#ifdef AP_DEVICE

// One block per expert: it visits all pairs in order, so that `within` is stable and needs no atomics.
__global__ void __launch_bounds__(256) ap_count_kernel(const int64_t* experts, int64_t pairs, int64_t* counts, int64_t* within) {
  __shared__ int sums[2][256];  // inclusive prefix sums over this tile's pairs: sums over 1, 2, 4, … neighbors
  const int thread = int(threadIdx.x);
  int64_t before = 0;
  for (int64_t tile = 0; tile < pairs; tile += 256) {
    const int64_t p = tile + thread, expert = p < pairs ? experts[p] : 0;
    if (expert < 0 || expert >= int64_t(gridDim.x)) stop();  // the host path returns an error
    const bool mine = p < pairs && expert == int64_t(blockIdx.x);
    int now = 0;
    sums[now][thread] = mine;
    __syncthreads();
    for (int step = 1; step < 256; step *= 2, now = 1 - now) {
      sums[1 - now][thread] = sums[now][thread] + (thread >= step ? sums[now][thread - step] : 0);
      __syncthreads();
    }
    if (mine) within[p] = before + sums[now][thread] - 1;
    before += sums[now][255];
    __syncthreads();
  }
  if (thread == 0) counts[blockIdx.x] = before;
}

__global__ void ap_route_offsets_kernel(Routes r, const int64_t* table, int64_t* offsets) {
  const int64_t expert = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (expert < r.num_experts) fill_offsets(r, table, offsets, expert);
}

__global__ void __launch_bounds__(128) ap_route_push_kernel(Routes r, const char* x, const int64_t* experts, const int64_t* within,
                                                   const int64_t* offsets, Peers homes, int64_t* position) {
  for (int64_t p = blockIdx.x; p < num_pairs(r); p += gridDim.x)
    push_pair(r, x, experts, within, offsets, homes, position, p, threadIdx.x, blockDim.x);
}

__global__ void __launch_bounds__(128) ap_route_collect_kernel(Routes r, const char* inbox, const int64_t* offsets, char* rows) {
  const int64_t received = offsets[2 * r.num_experts];
  for (int64_t row = blockIdx.x; row < r.size * r.most; row += gridDim.x)
    collect_row(r, inbox, rows, received, row, threadIdx.x, blockDim.x);
}

__global__ void __launch_bounds__(128) ap_route_return_kernel(Routes r, const char* rows, const int64_t* table, Peers senders,
                                                              uint64_t epoch) {
  return_block(r, rows, table, senders, returned_offset(r, epoch), blockIdx.x, blockIdx.y, gridDim.y, threadIdx.x, blockDim.x);
}

template <class T>
__global__ void __launch_bounds__(128, 4) ap_route_sum_kernel(const T* returned, const int64_t* position, const WideOf<T>* weights, T* y,
                                                           int64_t tokens, int64_t choices, int64_t width) {
  for (int64_t token = blockIdx.x; token < tokens; token += gridDim.x)
    for (int64_t i = int64_t(threadIdx.x) * kGroup; i < width; i += int64_t(blockDim.x) * kGroup)
      sum_group<T>(returned, position, weights, y, choices, width, token, i);
}

unsigned grid_of(int64_t items) { return unsigned(min_of(items < 1 ? 1 : items, 65535)); }

int count_pairs(const StreamLane& lane, const Routes& r, const int64_t* experts, int64_t* counts, int64_t* within) {
  AP_LAUNCH(ap_count_kernel, unsigned(r.num_experts), 256, lane.stream, experts, num_pairs(r), counts, within);
  return launched();
}
int push_pairs(const StreamLane& lane, const Routes& r, const char* x, const int64_t* experts, const int64_t* within, const int64_t* table,
               int64_t* offsets, const Peers& homes, int64_t* position) {
  AP_LAUNCH(ap_route_offsets_kernel, unsigned(ceil_div(r.num_experts, 128)), 128, lane.stream, r, table, offsets);
  AP_LAUNCH(ap_route_push_kernel, grid_of(num_pairs(r)), 128, lane.stream, r, x, experts, within, offsets, homes, position);
  return launched();
}
int collect_rows(const StreamLane& lane, const Routes& r, const char* inbox, const int64_t* offsets, char* rows) {
  AP_LAUNCH(ap_route_collect_kernel, grid_of(r.size * r.most), 128, lane.stream, r, inbox, offsets, rows);
  return launched();
}
int return_rows(const StreamLane& lane, const Routes& r, const char* rows, const int64_t* table, const Peers& senders, uint64_t epoch) {
  const dim3 grid(unsigned(r.num_experts), 32);  // num_experts = size · experts per rank
  AP_LAUNCH(ap_route_return_kernel, grid, 128, lane.stream, r, rows, table, senders, epoch);
  return launched();
}
template <class T>
int sum_rows(const StreamLane& lane, const Routes& r, const T* returned, const int64_t* position, const WideOf<T>* weights, T* y) {
  const int64_t width = r.row_bytes / int64_t(sizeof(T));
  AP_LAUNCH(ap_route_sum_kernel<T>, grid_of(r.tokens), 128, lane.stream, returned, position, weights, y, r.tokens, r.choices, width);
  return launched();
}

#else

int count_pairs(const HostLane&, const Routes& r, const int64_t* experts, int64_t* counts, int64_t* within) {
  for (int64_t e = 0; e < r.num_experts; ++e) counts[e] = 0;
  for (int64_t p = 0; p < num_pairs(r); ++p) {
    if (experts[p] < 0 || experts[p] >= r.num_experts) return AP_BAD_ARGUMENT;
    within[p] = counts[experts[p]]++;
  }
  return AP_OK;
}
int push_pairs(const HostLane&, const Routes& r, const char* x, const int64_t* experts, const int64_t* within, const int64_t* table,
               int64_t* offsets, const Peers& homes, int64_t* position) {
  for (int64_t e = 0; e < r.num_experts; ++e) fill_offsets(r, table, offsets, e);
  for (int64_t p = 0; p < num_pairs(r); ++p) push_pair(r, x, experts, within, offsets, homes, position, p, 0, 1);
  return AP_OK;
}
int collect_rows(const HostLane&, const Routes& r, const char* inbox, const int64_t* offsets, char* rows) {
  for (int64_t row = 0; row < r.size * r.most; ++row) collect_row(r, inbox, rows, offsets[2 * r.num_experts], row, 0, 1);
  return AP_OK;
}
int return_rows(const HostLane&, const Routes& r, const char* rows, const int64_t* table, const Peers& senders, uint64_t epoch) {
  const int64_t offset = returned_offset(r, epoch);
  for (int64_t block = 0; block < r.num_experts; ++block) return_block(r, rows, table, senders, offset, block, 0, 1, 0, 1);
  return AP_OK;
}
template <class T>
int sum_rows(const HostLane&, const Routes& r, const T* returned, const int64_t* position, const WideOf<T>* weights, T* y) {
  const int64_t width = r.row_bytes / int64_t(sizeof(T));
  for (int64_t token = 0; token < r.tokens; ++token)
    for (int64_t i = 0; i < width; i += kGroup) sum_group<T>(returned, position, weights, y, r.choices, width, token, i);
  return AP_OK;
}

#endif

// --- the steps -------------------------------------------------------------------------------------------------------------------
template <class Lane>
int announce(const Lane& lane, const Routes& r, const int64_t* experts, int64_t* counts, int64_t* within, void* const* memory,
             uint64_t* const* flags, uint64_t epoch) {
  if (!can_run(r, epoch)) return AP_BAD_ARGUMENT;
  AP_TRY(count_pairs(lane, r, experts, counts, within));
  const int64_t num_bytes = r.num_experts * 8, place = r.rank * num_bytes;
  const char* const from = reinterpret_cast<const char*>(counts);
  for (int64_t peer = 0; peer < r.size; ++peer) {
    AP_TRY(lane.copy(static_cast<char*>(memory[peer]) + place, num_bytes, from, num_bytes, num_bytes, 1));
    AP_TRY(lane.signal(flags[peer] + counts_flag(r.rank), epoch));
  }
  return AP_OK;
}

template <class Lane>
int push(const Lane& lane, const Routes& r, const char* x, const int64_t* experts, const int64_t* within, int64_t* table, int64_t* offsets,
         int64_t* position, void* const* memory, uint64_t* const* flags, uint64_t epoch) {
  if (!can_run(r, epoch)) return AP_BAD_ARGUMENT;
  for (int64_t peer = 0; peer < r.size; ++peer) AP_TRY(lane.wait_for_pushed(flags[r.rank] + counts_flag(peer), epoch));
  const int64_t num_bytes = r.size * r.num_experts * 8;
  AP_TRY(lane.copy(reinterpret_cast<char*>(table), num_bytes, static_cast<const char*>(memory[r.rank]), num_bytes, num_bytes, 1));
  AP_TRY(push_pairs(lane, r, x, experts, within, table, offsets, peers_at(r.size, memory), position));
  for (int64_t peer = 0; peer < r.size; ++peer) AP_TRY(lane.signal(flags[peer] + rows_flag(r, r.rank), epoch));
  return AP_OK;
}

template <class Lane> int await_rows(const Lane& lane, const Routes& r, uint64_t* const* flags, uint64_t epoch) {
  if (!can_run(r, epoch)) return AP_BAD_ARGUMENT;
  for (int64_t peer = 0; peer < r.size; ++peer) AP_TRY(lane.wait_for_pushed(flags[r.rank] + rows_flag(r, peer), epoch));
  return AP_OK;
}

template <class Lane>
int collect(const Lane& lane, const Routes& r, const int64_t* offsets, char* rows, void* const* memory, uint64_t* const* flags,
            uint64_t epoch) {
  AP_TRY(await_rows(lane, r, flags, epoch));
  return collect_rows(lane, r, static_cast<const char*>(memory[r.rank]), offsets, rows);
}

template <class Lane>
int give_back(const Lane& lane, const Routes& r, const char* rows, const int64_t* table, void* const* memory, uint64_t* const* flags,
              uint64_t epoch) {
  if (!can_run(r, epoch)) return AP_BAD_ARGUMENT;
  AP_TRY(return_rows(lane, r, rows, table, peers_at(r.size, memory), epoch));
  for (int64_t peer = 0; peer < r.size; ++peer) AP_TRY(lane.signal(flags[peer] + rows_flag(r, r.rank), epoch));
  return AP_OK;
}

template <class Lane>
int add_up(const Lane& lane, const Routes& r, const int64_t* position, const void* weights, void* returned, void* y, int32_t dtype,
           void* const* memory, uint64_t* const* flags, uint64_t epoch) {
  AP_TRY(await_rows(lane, r, flags, epoch));
  const int64_t num_bytes = num_pairs(r) * r.row_bytes;
  const char* const come = static_cast<const char*>(memory[r.rank]) + returned_offset(r, epoch);
  AP_TRY(lane.copy(static_cast<char*>(returned), num_bytes, come, num_bytes, num_bytes, 1));
  AP_FOR_FLOAT(dtype, T, {
    const auto* factors = static_cast<const WideOf<T>*>(weights);
    return sum_rows(lane, r, static_cast<const T*>(returned), position, factors, static_cast<T*>(y));
  });
  return AP_BAD_ARGUMENT;
}

}  // namespace
}  // namespace ap

#ifndef AP_DEVICE

// In all steps, `memory` and `flags` contain one address per rank, in order of the ranks. This step computes counts [num_experts] and
// within [tokens, choices] for the later steps.
AP_API int ap_moe_dispatch_announce_host(const int64_t* experts, int64_t* counts, int64_t* within, void* const* memory,
                                         uint64_t* const* flags, ap::Routes r, uint64_t epoch) {
  return ap::announce(ap::HostLane{}, r, experts, counts, within, memory, flags, epoch);
}

// This step computes table, position and offsets [2 · num_experts + 1].
AP_API int ap_moe_dispatch_push_host(const void* x, const int64_t* experts, const int64_t* within, int64_t* table, int64_t* offsets,
                                     int64_t* position, void* const* memory, uint64_t* const* flags, ap::Routes r, uint64_t epoch) {
  return ap::push(ap::HostLane{}, r, (const char*)x, experts, within, table, offsets, position, memory, flags, epoch);
}

AP_API int ap_moe_dispatch_collect_host(const int64_t* offsets, void* rows, void* const* memory, uint64_t* const* flags, ap::Routes r,
                                        uint64_t epoch) {
  return ap::collect(ap::HostLane{}, r, offsets, (char*)rows, memory, flags, epoch);
}

AP_API int ap_moe_combine_push_host(const void* rows, const int64_t* table, void* const* memory, uint64_t* const* flags, ap::Routes r,
                                    uint64_t epoch) {
  return ap::give_back(ap::HostLane{}, r, (const char*)rows, table, memory, flags, epoch);
}

// weights [tokens, choices]: fp64 if `dtype` is fp64, else fp32.
AP_API int ap_moe_combine_sum_host(const int64_t* position, const void* weights, void* returned, void* y, int32_t dtype,
                                   void* const* memory, uint64_t* const* flags, ap::Routes r, uint64_t epoch) {
  return ap::add_up(ap::HostLane{}, r, position, weights, returned, y, dtype, memory, flags, epoch);
}

// sizes [3]: bytes per rank of the shared memory of dispatch and of combine, words of their flags.
AP_API int ap_moe_sizes_host(int64_t* sizes, ap::Routes r) {
  if (!ap::is_valid(r)) return AP_BAD_ARGUMENT;
  sizes[0] = ap::dispatch_bytes(r), sizes[1] = ap::combine_bytes(r), sizes[2] = ap::num_route_flags(r);
  return AP_OK;
}

#else

// `memory` and `flags` are host arrays of device addresses.
AP_API int ap_moe_dispatch_announce_cuda(const int64_t* experts, int64_t* counts, int64_t* within, void* const* memory,
                                         uint64_t* const* flags, ap::Routes r, uint64_t epoch, void* stream) {
  return ap::announce(ap::StreamLane{stream}, r, experts, counts, within, memory, flags, epoch);
}

AP_API int ap_moe_dispatch_push_cuda(const void* x, const int64_t* experts, const int64_t* within, int64_t* table, int64_t* offsets,
                                     int64_t* position, void* const* memory, uint64_t* const* flags, ap::Routes r, uint64_t epoch,
                                     void* stream) {
  return ap::push(ap::StreamLane{stream}, r, (const char*)x, experts, within, table, offsets, position, memory, flags, epoch);
}

AP_API int ap_moe_dispatch_collect_cuda(const int64_t* offsets, void* rows, void* const* memory, uint64_t* const* flags, ap::Routes r,
                                        uint64_t epoch, void* stream) {
  return ap::collect(ap::StreamLane{stream}, r, offsets, (char*)rows, memory, flags, epoch);
}

AP_API int ap_moe_combine_push_cuda(const void* rows, const int64_t* table, void* const* memory, uint64_t* const* flags, ap::Routes r,
                                    uint64_t epoch, void* stream) {
  return ap::give_back(ap::StreamLane{stream}, r, (const char*)rows, table, memory, flags, epoch);
}

AP_API int ap_moe_combine_sum_cuda(const int64_t* position, const void* weights, void* returned, void* y, int32_t dtype,
                                   void* const* memory, uint64_t* const* flags, ap::Routes r, uint64_t epoch, void* stream) {
  return ap::add_up(ap::StreamLane{stream}, r, position, weights, returned, y, dtype, memory, flags, epoch);
}

#endif
