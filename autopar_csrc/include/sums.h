// Sums in one fixed order, whatever the number of threads: the order of autopar/kernels/ordered.py, to the last bit.
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
// The sum of the block's lanes, one per thread of 256, for all of its threads; `lanes` is shared memory.
template <class W> __device__ inline W add_block(W own, W* lanes) {
  const int lane = threadIdx.x;
  __syncthreads();  // an earlier sum may still be read
  lanes[lane] = own;
  __syncthreads();
  for (int half = kLanes / 2; half > 0; half /= 2) {
    if (lane < half) lanes[lane] = lanes[lane] + lanes[lane + half];
    __syncthreads();
  }
  return lanes[0];
}
#endif

}  // namespace ap
