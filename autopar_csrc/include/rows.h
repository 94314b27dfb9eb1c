// Rows of a matrix [rows, width] in groups of eight contiguous elements, and the number of threads of a block that share a row.
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
  int64_t row, column, left, at;  // `left`: elements of the row from `column` on; `at`: offset of the first element
};
AP_HD inline Group group_of(const Rows& r, int64_t n) {
  const int64_t per_row = groups_per_row(r), row = n < INT32_MAX ? quotient(n, per_row) : n / per_row, column = (n - row * per_row) * kGroup;
  return Group{row, column, r.width - column, row * r.width + column};
}

// A power of two, at most the size of a block. Short rows share a block.
AP_HD inline int threads_per_row(const Rows& r) {
  int threads = 1;
  while (threads < kLanes && threads < groups_per_row(r)) threads *= 2;
  return threads;
}

}  // namespace ap
