// reduce_add_rmsnorm: the sum over peers, the residual add and the norm, in one pass over the peers' data.
//
//   parts[r] [rows, hidden] for r < world, residual [rows, hidden], weight [hidden], all of one dtype T
//   y       = residual + (((0 + parts[0]) + parts[1]) + ...)   in W, then rounded to T: the output that the model uses
//   squares = sum(y * y)                                       [rows], in W, of the rounded y: saved for backward
//   rstd    = 1 / sqrt(squares / hidden + eps)                 in W, recomputed wherever it is needed
//   normed  = (y * rstd) * weight                              in W, then rounded to T; if `rounded`, y * rstd is rounded to T
//                                                              before the multiplication by the weight
// W is double if T is double, else float. The peers are always added in the order of their ranks, and a row is summed in the order of
// sums.h. The result depends neither on which rank is ready first nor on the number of threads.
//
// Backward, with n the gradient of normed and g the gradient of y:
//   u = n * weight;  c = sum(u * y) / hidden;  grad = g + (u * rstd - y * (((rstd * rstd) * rstd) * c))
// grad is the gradient of the residual and of each peer's part;
//   grad_weight[h] = sum over rows of (n * y) * rstd: the rows of each band of 64 are added in order, then the bands are added in order.
//
// The addresses of the parts are in a table in memory that the device can read. The memory of the peers is read in place, and the caller
// ensures that it is ready (include/epoch.h). Device: one block of 256 threads per row; each thread reads back from the cache the y
// that it wrote. The weight's gradient reads n and y a second time. `bands` is scratch memory of the caller: [ceil(rows / 64), hidden] in
// W.
#include "include/index.h"
#include "include/norms.h"
#include "include/sums.h"
#ifndef AP_DEVICE
#include "include/threads.h"
#endif

namespace ap {
namespace {

// Rows per thread on the host.
inline int64_t grain_of(int64_t hidden) { return ceil_div(65536, hidden); }

// One group of y: the sum over peers and the residual, stored rounded. Returns `sum` plus the squares of the group.
template <class T, class W = typename Wide<T>::type>
AP_HD inline W add_group(const int64_t* parts, int world, const T* residual, T* y, int64_t at, int64_t left, W sum) {
  const Raw<T> raw_residual = fetch_group(residual + at, left);
  W total[kGroup] = {}, more[kGroup];
  for (int peer = 0; peer < world; peer += 2) {
    const bool pair = peer + 1 < world;
    const Raw<T> raw = fetch_group(reinterpret_cast<const T*>(parts[peer]) + at, left);
    const Raw<T> next = pair ? fetch_group(reinterpret_cast<const T*>(parts[peer + 1]) + at, left) : raw;
    widen(raw, more);
    for (int i = 0; i < kGroup; ++i) total[i] = total[i] + more[i];
    widen(next, more);
    for (int i = 0; pair && i < kGroup; ++i) total[i] = total[i] + more[i];
  }
  widen(raw_residual, more);
  for (int i = 0; i < kGroup; ++i) {
    total[i] = Convert<W, T>::wide(Convert<W, T>::narrow(more[i] + total[i]));
    sum = i < left ? sum + total[i] * total[i] : sum;
  }
  store_group(y + at, left, total);
  return sum;
}

// Returns `sum` plus u * y of the group.
template <class T, class W>
AP_HD inline W dot_group(const T* grad_normed, const T* y, const T* weight, int64_t at, int64_t column, int64_t left, W sum) {
  const Raw<T> raw_n = fetch_group(grad_normed + at, left), raw_y = fetch_group(y + at, left);
  const Raw<T> raw_weight = fetch_group(weight + column, left);
  W n[kGroup], values[kGroup], scale[kGroup];
  widen(raw_n, n);
  widen(raw_y, values);
  widen(raw_weight, scale);
  for (int i = 0; i < kGroup; ++i) sum = i < left ? sum + (n[i] * scale[i]) * values[i] : sum;
  return sum;
}

template <class T, class W>
AP_HD inline void grad_group(const T* grad_y, const T* grad_normed, const T* y, const T* weight, T* grad, W rstd, W mean, int64_t at,
                             int64_t column, int64_t left) {
  const Raw<T> raw_g = fetch_group(grad_y + at, left), raw_n = fetch_group(grad_normed + at, left);
  const Raw<T> raw_y = fetch_group(y + at, left), raw_weight = fetch_group(weight + column, left);
  W g[kGroup], n[kGroup], values[kGroup], scale[kGroup];
  widen(raw_g, g);
  widen(raw_n, n);
  widen(raw_y, values);
  widen(raw_weight, scale);
  const W slope = ((rstd * rstd) * rstd) * mean;
  for (int i = 0; i < kGroup; ++i) g[i] = g[i] + ((n[i] * scale[i]) * rstd - values[i] * slope);
  store_group(grad + at, left, g);
}

}  // namespace
}  // namespace ap

#ifdef AP_DEVICE

template <class T>
__global__ void __launch_bounds__(ap::kLanes, 2) ap_rmsnorm_forward_kernel(const int64_t* parts, int world, const T* residual, const T* weight,
                                                                        T* y, T* normed, typename ap::Wide<T>::type* squares,
                                                                        int64_t hidden, double eps, bool rounded) {
  using W = typename ap::Wide<T>::type;
  __shared__ W lanes[ap::kLanes];
  const int64_t row = int64_t(blockIdx.x) * hidden, first = int64_t(threadIdx.x) * ap::kGroup;
  W sum = 0;
  for (int64_t column = first; column < hidden; column += ap::kStripe)
    sum = ap::add_group(parts, world, residual, y, row + column, hidden - column, sum);
  sum = ap::add_block(sum, lanes);
  const W rstd = ap::rstd_of(sum, hidden, eps);
  for (int64_t column = first; column < hidden; column += ap::kStripe)
    ap::norm_group(y, weight, normed, rstd, rounded, row + column, column, hidden - column);
  if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}

template <class T>
__global__ void __launch_bounds__(ap::kLanes, 2)
    ap_rmsnorm_backward_kernel(const T* grad_y, const T* grad_normed, const T* y, const typename ap::Wide<T>::type* squares,
                               const T* weight, T* grad, int64_t hidden, double eps) {
  using W = typename ap::Wide<T>::type;
  __shared__ W lanes[ap::kLanes];
  const int64_t row = int64_t(blockIdx.x) * hidden, first = int64_t(threadIdx.x) * ap::kGroup;
  W sum = 0;
  for (int64_t column = first; column < hidden; column += ap::kStripe)
    sum = ap::dot_group(grad_normed, y, weight, row + column, column, hidden - column, sum);
  const W mean = ap::add_block(sum, lanes) / W(hidden), rstd = ap::rstd_of(squares[blockIdx.x], hidden, eps);
  for (int64_t column = first; column < hidden; column += ap::kStripe)
    ap::grad_group(grad_y, grad_normed, y, weight, grad, rstd, mean, row + column, column, hidden - column);
}

template <class T, class W>
__global__ void __launch_bounds__(ap::kLanes, 2) ap_rmsnorm_weight_kernel(const W* bands, T* grad_weight, int64_t num_bands, int64_t hidden) {
  const int64_t column = int64_t(blockIdx.x) * ap::kLanes + threadIdx.x;
  if (column >= hidden) return;
  W sum = 0;
  AP_UNROLL_16
  for (int64_t band = 0; band < num_bands; ++band) sum = sum + bands[band * hidden + column];
  grad_weight[column] = ap::Convert<W, T>::narrow(sum);
}

AP_API int ap_reduce_add_rmsnorm_forward_cuda(const int64_t* parts, int world, const void* residual, const void* weight, void* y,
                                              void* normed, void* squares, int dtype, int64_t rows, int64_t hidden, double eps,
                                              int rounded, void* stream) {
  if (world < 1 || rows < 0 || hidden < 1 || rows > INT32_MAX) return AP_BAD_ARGUMENT;
  AP_FOR_FLOAT(dtype, T, {
    using W = typename ap::Wide<T>::type;
    if (rows > 0)
      AP_LAUNCH(ap_rmsnorm_forward_kernel<T>, unsigned(rows), ap::kLanes, stream, parts, world, static_cast<const T*>(residual),
                static_cast<const T*>(weight), static_cast<T*>(y), static_cast<T*>(normed), static_cast<W*>(squares), hidden, eps,
                rounded != 0);
  })
  return ap::launched();
}

AP_API int ap_reduce_add_rmsnorm_backward_cuda(const void* grad_y, const void* grad_normed, const void* y, const void* squares,
                                               const void* weight, void* grad, void* grad_weight, void* bands, int dtype, int64_t rows,
                                               int64_t hidden, double eps, void* stream) {
  if (rows < 0 || hidden < 1 || rows > INT32_MAX) return AP_BAD_ARGUMENT;
  const int64_t num_bands = ap::ceil_div(rows, ap::kBand);
  const unsigned columns = unsigned(ap::ceil_div(hidden, ap::kLanes));
  if (num_bands > 65535) return AP_BAD_ARGUMENT;  // limit of a grid's second dim
  AP_FOR_FLOAT(dtype, T, {
    using W = typename ap::Wide<T>::type;
    const T *n = static_cast<const T*>(grad_normed), *values = static_cast<const T*>(y);
    const W* squared = static_cast<const W*>(squares);
    if (rows > 0) {
      const dim3 grid(unsigned(ap::ceil_div(ap::ceil_div(hidden, ap::kGroup), ap::kLanes)), unsigned(num_bands));
      AP_LAUNCH(ap_rmsnorm_backward_kernel<T>, unsigned(rows), ap::kLanes, stream, static_cast<const T*>(grad_y), n, values, squared,
                static_cast<const T*>(weight), static_cast<T*>(grad), hidden, eps);
      AP_LAUNCH(ap_norm_bands_kernel, grid, ap::kLanes, stream, n, values, squared, static_cast<W*>(bands), rows, hidden, hidden, eps);
    }
    const W* sums = static_cast<const W*>(bands);
    AP_LAUNCH(ap_rmsnorm_weight_kernel, columns, ap::kLanes, stream, sums, static_cast<T*>(grad_weight), num_bands, hidden);
  })
  return ap::launched();
}

#else

AP_API int ap_reduce_add_rmsnorm_forward_host(const int64_t* parts, int world, const void* residual, const void* weight, void* y,
                                              void* normed, void* squares, int dtype, int64_t rows, int64_t hidden, double eps,
                                              int rounded, int num_threads) {
  if (world < 1 || rows < 0 || hidden < 1) return AP_BAD_ARGUMENT;
  AP_FOR_FLOAT(dtype, T, {
    using W = typename ap::Wide<T>::type;
    ap::for_each_item(rows, num_threads, [&](int64_t row) {
      W lanes[ap::kLanes] = {};
      const int64_t begin = row * hidden;
      T* made = static_cast<T*>(y);
      for (int64_t column = 0; column < hidden; column += ap::kGroup) {
        W& lane = lanes[column / ap::kGroup % ap::kLanes];
        lane = ap::add_group(parts, world, static_cast<const T*>(residual), made, begin + column, hidden - column, lane);
      }
      const W sum = ap::add_lanes(lanes), rstd = ap::rstd_of(sum, hidden, eps);
      for (int64_t column = 0; column < hidden; column += ap::kGroup)
        ap::norm_group(made, static_cast<const T*>(weight), static_cast<T*>(normed), rstd, rounded != 0, begin + column, column,
                       hidden - column);
      static_cast<W*>(squares)[row] = sum;
    }, ap::grain_of(hidden));
  })
  return AP_OK;
}

AP_API int ap_reduce_add_rmsnorm_backward_host(const void* grad_y, const void* grad_normed, const void* y, const void* squares,
                                               const void* weight, void* grad, void* grad_weight, void* bands, int dtype, int64_t rows,
                                               int64_t hidden, double eps, int num_threads) {
  if (rows < 0 || hidden < 1) return AP_BAD_ARGUMENT;
  const int64_t num_bands = ap::ceil_div(rows, ap::kBand);
  AP_FOR_FLOAT(dtype, T, {
    using W = typename ap::Wide<T>::type;
    const T *n = static_cast<const T*>(grad_normed), *values = static_cast<const T*>(y), *scale = static_cast<const T*>(weight);
    const W* squared = static_cast<const W*>(squares);
    W* sums = static_cast<W*>(bands);
    ap::for_each_item(rows, num_threads, [&](int64_t row) {
      W lanes[ap::kLanes] = {};
      const int64_t begin = row * hidden;
      for (int64_t column = 0; column < hidden; column += ap::kGroup) {
        W& lane = lanes[column / ap::kGroup % ap::kLanes];
        lane = ap::dot_group(n, values, scale, begin + column, column, hidden - column, lane);
      }
      const W mean = ap::add_lanes(lanes) / W(hidden), rstd = ap::rstd_of(squared[row], hidden, eps);
      for (int64_t column = 0; column < hidden; column += ap::kGroup)
        ap::grad_group(static_cast<const T*>(grad_y), n, values, scale, static_cast<T*>(grad), rstd, mean, begin + column, column,
                       hidden - column);
    }, ap::grain_of(hidden));
    ap::for_each_item(num_bands, num_threads, [&](int64_t band) {
      const int64_t begin = band * ap::kBand, end = ap::min_of(begin + ap::kBand, rows);
      W rstd[ap::kBand];
      for (int64_t row = begin; row < end; ++row) rstd[row - begin] = ap::rstd_of(squared[row], hidden, eps);
      for (int64_t column = 0; column < hidden; column += ap::kGroup) {
        W shares[ap::kGroup];
        ap::band_group(n, values, rstd, begin, end, hidden, column, shares);
        ap::store_group(sums + band * hidden + column, hidden - column, shares);
      }
    }, ap::ceil_div(ap::grain_of(hidden), ap::kBand));
    for (int64_t column = 0; column < hidden; ++column) {
      W sum = 0;
      for (int64_t band = 0; band < num_bands; ++band) sum = sum + sums[band * hidden + column];
      static_cast<T*>(grad_weight)[column] = ap::Convert<W, T>::narrow(sum);
    }
  })
  return AP_OK;
}

#endif
