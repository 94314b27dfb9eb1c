// Sums in one fixed order for any number of threads: the order of autopar/kernels/packing.py, bit by bit.
//
// Elements form groups of 8 contiguous elements. Group g belongs to lane g mod 256. A lane adds its elements one by one, group by group.
// Then the lanes are added in halves: lane l adds lane l + 128, then l + 64, ..., then l + 1. A lane starts at +0, so missing elements can
// be treated as zeros. On the device, a lane is a thread of a block of 256. On the host, it is an element of an array.
#pragma once

#include "common.h"

namespace ap {

constexpr int kLanes = 256;
constexpr int64_t kStripe = int64_t(kLanes) * kGroup;  // elements that all lanes add in one pass: 2048

// The sum of the lanes on the host; `lanes` is overwritten.
template <class W> inline W add_lanes(W lanes[kLanes]) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] = lanes[lane] + lanes[lane + half];
  return lanes[0];
}

// The sum of value(0), ..., value(size - 1) on the host: lane l adds the values at l, l + 256, ..., and the lanes are added in halves.
template <class W, class Value> inline W add_all(int64_t size, const Value& value) {
  W lanes[kLanes] = {};
  for (int64_t i = 0; i < size; ++i) lanes[i % kLanes] = lanes[i % kLanes] + value(i);
  return add_lanes(lanes);
}

#ifdef AP_DEVICE
constexpr int kWarp = 32;

// The sum of each group of `threads` <= 32 lanes in a warp, in halves. The first lane of the group gets it.
template <class W> __device__ inline W add_in_warp(W own, int threads) {
  for (int half = threads / 2; half > 0; half /= 2) own = own + __shfl_down_sync(0xffffffffu, own, half);
  return own;
}

// The sum over each group of `threads` consecutive threads, a power of two. All threads of the group get it. All 256 threads of the block
// must call it. `lanes` is shared memory.
template <class W> __device__ inline W add_row(W own, W* lanes, int threads) {
  const int lane = threadIdx.x, place = lane & (threads - 1);
  __syncthreads();  // other threads may still read an earlier sum
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

// The sum over the 256 threads of the block. All threads get it.
template <class W> __device__ inline W add_block(W own, W* lanes) { return add_row(own, lanes, kLanes); }
#endif

}  // namespace ap
