// The root-mean-square norm of a group of eight elements, for reduce_add_rmsnorm.cu and row_norm.cu.
#pragma once

#include <cmath>

#include "sums.h"

namespace ap {

template <class W> AP_HD inline W rstd_of(W squares, int64_t hidden, double eps) {
  return W(1) / std::sqrt(squares / W(hidden) + W(eps));
}

// Eight weights, or ones if `weight` is null.
template <class T> AP_HD inline Raw<T> fetch_weight(const T* weight, int64_t column, int64_t left) {
  if (weight != nullptr) return fetch_group(weight + column, left);
  Raw<T> ones;
  for (int i = 0; i < kGroup; ++i) ones.items[i] = Convert<typename Wide<T>::type, T>::narrow(1);
  return ones;
}

// `rounded`: whether the normalized value is rounded to T before the multiplication by the weight.
template <class T, class W>
AP_HD inline void norm_group(const T* y, const T* weight, T* normed, W rstd, bool rounded, int64_t at, int64_t column, int64_t left) {
  const Raw<T> raw_y = fetch_group(y + at, left), raw_weight = fetch_weight(weight, column, left);
  W values[kGroup], scale[kGroup];
  widen(raw_y, values);
  widen(raw_weight, scale);
  for (int i = 0; i < kGroup; ++i) {
    const W scaled = values[i] * rstd;
    values[i] = (rounded ? Convert<W, T>::wide(Convert<W, T>::narrow(scaled)) : scaled) * scale[i];
  }
  store_group(normed + at, left, values);
}

// The weight's gradient for the eight columns that begin at `column`, summed in order over one band of rows. `rstd` has only the rows of
// the band.
template <class T, class W>
AP_HD inline void band_group(const T* grad_normed, const T* y, const W* rstd, int64_t begin, int64_t end, int64_t hidden, int64_t column,
                             W sums[kGroup]) {
  constexpr int kAhead = sizeof(T) < 4 ? 4 : 2;  // rows that are fetched together
  for (int i = 0; i < kGroup; ++i) sums[i] = W(0);
  for (int64_t row = begin; row < end; row += kAhead) {
    Raw<T> raw_n[kAhead], raw_y[kAhead];
    for (int turn = 0; turn < kAhead; ++turn) {
      const int64_t at = row + turn < end ? row + turn : end - 1;
      raw_n[turn] = fetch_group(grad_normed + at * hidden + column, hidden - column);
      raw_y[turn] = fetch_group(y + at * hidden + column, hidden - column);
    }
    for (int turn = 0; turn < kAhead; ++turn) {
      if (row + turn >= end) break;
      W gradients[kGroup], values[kGroup];
      widen(raw_n[turn], gradients);
      widen(raw_y[turn], values);
      for (int i = 0; i < kGroup; ++i) sums[i] = sums[i] + (gradients[i] * values[i]) * rstd[row + turn - begin];
    }
  }
}

constexpr int kBand = 64;  // rows

}  // namespace ap

#ifdef AP_DEVICE

namespace {

// `band_group` for all columns and bands: one thread per group of columns, one row of blocks per band. `n` is the length of a whole row.
template <class T, class W>
__global__ void __launch_bounds__(ap::kLanes, 2) ap_norm_bands_kernel(const T* grad_normed, const T* y, const W* squares, W* bands, int64_t rows,
                                                                   int64_t hidden, int64_t n, double eps) {
  __shared__ W rstd[ap::kBand];
  const int64_t column = (int64_t(blockIdx.x) * ap::kLanes + threadIdx.x) * ap::kGroup, begin = int64_t(blockIdx.y) * ap::kBand;
  const int64_t end = begin + ap::kBand < rows ? begin + ap::kBand : rows;
  if (begin + threadIdx.x < end) rstd[threadIdx.x] = ap::rstd_of(squares[begin + threadIdx.x], n, eps);
  __syncthreads();
  if (column >= hidden) return;
  W sums[ap::kGroup];
  ap::band_group(grad_normed, y, rstd, begin, end, hidden, column, sums);
  ap::store_group(bands + blockIdx.y * hidden + column, hidden - column, sums);
}

}  // namespace
#endif
