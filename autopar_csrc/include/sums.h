// Sums in one fixed order, whatever the number of threads: the order of autopar/kernels/packing.py, to the last bit.
//
// Elements come in groups of 8 neighbours. Group g belongs to lane g mod 256; a lane adds its elements one by one, group after group; then
// lanes are added in halves: lane l takes lane l + 128, then l + 64, ..., then l + 1. A lane starts at +0, so elements that are not
// there may count as zeros. On the device a lane is a thread of a block of 256; on the host it is an element of an array.
#pragma once

#include "common.h"

namespace ap {

constexpr int kLanes = 256;
constexpr int64_t kStripe = int64_t(kLanes) * kGroup;  // what all lanes take in one go: 2048 elements

// The sum of the lanes on the host; `lanes` is overwritten.
template <class W> inline W add_lanes(W lanes[kLanes]) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] = lanes[lane] + lanes[lane + half];
  return lanes[0];
}

// The sum of value(0), ..., value(size - 1) on the host: lane l adds those at l, l + 256, ... and the lanes are added in halves.
template <class W, class Value> inline W add_all(int64_t size, const Value& value) {
  W lanes[kLanes] = {};
  for (int64_t i = 0; i < size; ++i) lanes[i % kLanes] = lanes[i % kLanes] + value(i);
  return add_lanes(lanes);
}

#ifdef AP_DEVICE
constexpr int kWarp = 32;

// The sum of the first `threads` <= 32 lanes of each such group in a warp, in its first lane: again in halves.
template <class W> __device__ inline W add_in_warp(W own, int threads) {
  for (int half = threads / 2; half > 0; half /= 2) own = own + __shfl_down_sync(0xffffffffu, own, half);
  return own;
}

// The sum over each group of `threads` neighbours, a power of two, for all of them. All threads of the block, 256, call it; `lanes` is
// shared memory.
template <class W> __device__ inline W add_row(W own, W* lanes, int threads) {
  const int lane = threadIdx.x, place = lane & (threads - 1);
  __syncthreads();  // an earlier sum may still be read
  lanes[lane] = own;
  __syncthreads();
  for (int half = threads / 2; half >= kWarp; half /= 2) {
    if (place < half) lanes[lane] = lanes[lane] + lanes[lane + half];
    __syncthreads();
  }
  own = lanes[lane];
  __syncthreads();
  own = add_in_warp(own, threads < kWarp ? threads : kWarp);
  if (place == 0) lanes[lane] = own;
  __syncthreads();
  return lanes[lane - place];
}

// The sum of the block's lanes, one per thread of 256, for all of its threads.
template <class W> __device__ inline W add_block(W own, W* lanes) { return add_row(own, lanes, kLanes); }
#endif

}  // namespace ap
