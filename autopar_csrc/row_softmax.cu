// row_softmax: the softmax of a cross entropy over the last dim, each step in one pass. The formulas are in autopar/ops/vocabulary.py.
//
//   x, grad [rows, width] have one dtype T; m, s, scale [rows] have the dtype W: double if T is double, else float; index [rows], int64
//   sum_exp                 s = sum over a row of exp(x - m)
//   cross_entropy_backward  grad = (exp(x - m) / s - (column == index - start)) * scale, rounded to T; grad may use the memory of x
//
// Order of sums: `threads_per_row` threads share a row (include/rows.h). Each thread adds its groups in order, then the threads are added
// in halves. The order depends only on shapes. Device only: on a CPU, torch's own ops compute these steps. Blocks of 256 threads, one group
// of 8 contiguous elements per thread, 16-byte accesses if aligned. The kernels allocate no memory and do not wait.
#include "include/rows.h"

#include <cmath>

#ifdef AP_DEVICE

template <class T, class W>
__global__ void __launch_bounds__(ap::kLanes, 4) ap_sum_exp_kernel(const T* x, const W* m, W* s, ap::Rows r, int threads) {
  __shared__ W lanes[ap::kLanes];
  const int64_t row = int64_t(blockIdx.x) * (ap::kLanes / threads) + threadIdx.x / threads;
  const W most = row < r.rows ? m[row] : W(0);
  W sum = 0;
  for (int64_t column = int64_t(threadIdx.x & (threads - 1)) * ap::kGroup; row < r.rows && column < r.width; column += threads * ap::kGroup) {
    W values[ap::kGroup];
    ap::load_group<W>(x + row * r.width + column, r.width - column, values);
    for (int i = 0; i < ap::kGroup; ++i) sum = column + i < r.width ? sum + std::exp(values[i] - most) : sum;
  }
  sum = ap::add_row(sum, lanes, threads);
  if (row < r.rows && (threadIdx.x & (threads - 1)) == 0) s[row] = sum;
}

template <class T, class W>
__global__ void __launch_bounds__(ap::kLanes, 4)
    ap_cross_entropy_backward_kernel(const T* x, const W* m, const W* s, const int64_t* index, const W* scale, T* grad, ap::Rows r,
                                     int64_t start) {
  const int64_t number = int64_t(blockIdx.x) * ap::kLanes + threadIdx.x;
  if (number >= r.rows * ap::groups_per_row(r)) return;
  const ap::Group g = ap::group_of(r, number);
  const W most = m[g.row], total = s[g.row], factor = scale[g.row];
  const int64_t one = index[g.row] - start - g.column;
  W values[ap::kGroup];
  ap::load_group<W>(x + g.at, g.left, values);
  for (int i = 0; i < ap::kGroup; ++i) {
    const W share = std::exp(values[i] - most) / total;
    values[i] = (i == one ? share - W(1) : share) * factor;
  }
  ap::store_group(grad + g.at, g.left, values);
}

AP_API int ap_sum_exp_cuda(const void* x, const void* m, void* s, int dtype, int64_t rows, int64_t width, void* stream) {
  const ap::Rows r{rows, width};
  if (!ap::is_sound(r)) return AP_BAD_ARGUMENT;
  const int threads = ap::threads_per_row(r);
  const unsigned blocks = unsigned(ap::ceil_div(rows, ap::kLanes / threads));
  AP_FOR_FLOAT(dtype, T, {
    using W = typename ap::Wide<T>::type;
    if (rows > 0)
      AP_LAUNCH(ap_sum_exp_kernel, blocks, ap::kLanes, stream, static_cast<const T*>(x), static_cast<const W*>(m), static_cast<W*>(s), r,
                threads);
  })
  return ap::launched();
}

AP_API int ap_cross_entropy_backward_cuda(const void* x, const void* m, const void* s, const int64_t* index, const void* scale, void* grad,
                                          int dtype, int64_t rows, int64_t width, int64_t start, void* stream) {
  const ap::Rows r{rows, width};
  const int64_t blocks = ap::is_sound(r) ? ap::ceil_div(rows * ap::groups_per_row(r), ap::kLanes) : -1;
  if (blocks < 0 || blocks > INT32_MAX) return AP_BAD_ARGUMENT;
  AP_FOR_FLOAT(dtype, T, {
    using W = typename ap::Wide<T>::type;
    if (rows > 0)
      AP_LAUNCH(ap_cross_entropy_backward_kernel, unsigned(blocks), ap::kLanes, stream, static_cast<const T*>(x), static_cast<const W*>(m),
                static_cast<const W*>(s), index, static_cast<const W*>(scale), static_cast<T*>(grad), r, start);
  })
  return ap::launched();
}

#endif
