// The root-mean-square norm of a group of eight elements, as reduce_add_rmsnorm.cu and row_norm.cu have it.
#pragma once

#include <cmath>

#include "common.h"

namespace ap {

template <class W> AP_HD inline W rstd_of(W squares, int64_t hidden, double eps) {
  return W(1) / std::sqrt(squares / W(hidden) + W(eps));
}

// Eight weights, or ones where there are none.
template <class T, class W> AP_HD inline void load_weight(const T* weight, int64_t column, int64_t left, W out[kGroup]) {
  for (int i = 0; i < kGroup; ++i) out[i] = W(1);
  if (weight != nullptr) load_group<W>(weight + column, left, out);
}

// `rounded`: whether what is normed is rounded before the weight.
template <class T, class W>
AP_HD inline void norm_group(const T* y, const T* weight, T* normed, W rstd, bool rounded, int64_t at, int64_t column, int64_t left) {
  W values[kGroup], scale[kGroup];
  load_group<W>(y + at, left, values);
  load_weight(weight, column, left, scale);
  for (int i = 0; i < kGroup; ++i) {
    const W scaled = values[i] * rstd;
    values[i] = (rounded ? Convert<W, T>::wide(Convert<W, T>::narrow(scaled)) : scaled) * scale[i];
  }
  store_group(normed + at, left, values);
}

// The weight's gradient at eight columns from `column` on, over one band of rows, one after the other; `rstd` has the band's rows alone.
template <class T, class W>
AP_HD inline void band_group(const T* grad_normed, const T* y, const W* rstd, int64_t begin, int64_t end, int64_t hidden, int64_t column,
                             W sums[kGroup]) {
  for (int i = 0; i < kGroup; ++i) sums[i] = W(0);
  AP_UNROLL_4
  for (int64_t row = begin; row < end; ++row) {
    W gradients[kGroup], values[kGroup];
    load_group<W>(grad_normed + row * hidden + column, hidden - column, gradients);
    load_group<W>(y + row * hidden + column, hidden - column, values);
    for (int i = 0; i < kGroup; ++i) sums[i] = sums[i] + (gradients[i] * values[i]) * rstd[row - begin];
  }
}

}  // namespace ap
