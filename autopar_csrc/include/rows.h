// Rows of a matrix [rows, width] in groups of eight neighbours, and how many threads of a block share a row.
#pragma once

#include "index.h"
#include "sums.h"

namespace ap {

struct Rows {
  int64_t rows, width;
};

AP_HD inline bool is_sound(const Rows& r) { return r.rows >= 0 && r.width >= 1 && r.rows < INT32_MAX && r.width < INT32_MAX; }
AP_HD inline int64_t groups_per_row(const Rows& r) { return ceil_div(r.width, kGroup); }

// The n-th group of the matrix.
struct Group {
  int64_t row, column, left, at;  // `left`: elements of the row from here on; `at`: the first one's place in memory
};
AP_HD inline Group group_of(const Rows& r, int64_t n) {
  const int64_t per_row = groups_per_row(r), row = n < INT32_MAX ? quotient(n, per_row) : n / per_row, column = (n - row * per_row) * kGroup;
  return Group{row, column, r.width - column, row * r.width + column};
}

// A power of two, at most a block: short rows share one.
AP_HD inline int threads_per_row(const Rows& r) {
  int threads = 1;
  while (threads < kLanes && threads < groups_per_row(r)) threads *= 2;
  return threads;
}

#ifdef AP_DEVICE
// The sum over each row's threads, which are neighbours, for all of them. All threads of the block call it.
template <class W> __device__ inline W add_row(W own, W* lanes, int threads) {
  const int lane = threadIdx.x, place = lane & (threads - 1);
  __syncthreads();
  lanes[lane] = own;
  __syncthreads();
  for (int half = threads / 2; half > 0; half /= 2) {
    if (place < half) lanes[lane] = lanes[lane] + lanes[lane + half];
    __syncthreads();
  }
  return lanes[lane - place];
}
#endif

}  // namespace ap
