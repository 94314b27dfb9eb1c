// row_norm: the steps of the root-mean-square norm over the last dim, each in one pass. The formulas are in autopar/ops/norms.py.
//
//   x, grad, y, dx [rows, width] and weight [width] have one dtype T; squares, product [rows] and dw [width] have the dtype W, which is
//   double if T is double, else float. `n` is the length of a whole row, and `width` may be a part of it;
//   rstd = 1 / sqrt(squares / n + eps)
//   norm             y = (x * rstd) * weight, rounded to T; if `rounded`, x * rstd is rounded to T before the multiplication by the weight
//   product          sum over a row of (grad * weight) * x
//   norm_backward    dx = (grad * rstd) * weight - x * (((rstd * rstd) * rstd) * product / n), rounded to T
//   weight_gradient  dw = sum over rows of (grad * x) * rstd
// A null weight means a weight of ones.
//
// Order of sums: `threads_per_row` threads share a row (include/rows.h). Each thread adds its groups in order, then the threads are added
// in halves. For the weight's gradient, the rows of each band of 64 are added in order. Then each of 8 lanes adds its bands in order (lane
// l adds the bands l, l + 8, ...), and the lanes are added in order. The order depends only on shapes. `bands` is scratch memory of the
// caller: [ceil(rows / 64), width] in W.
//
// Device only: on a CPU, torch's own ops compute these steps. Blocks of 256 threads, one group of 8 contiguous elements per thread, 16-byte
// accesses if aligned. The kernels allocate no memory and do not wait.
#include "include/norms.h"
#include "include/rows.h"

#ifdef AP_DEVICE

namespace ap {
namespace {

constexpr int kBandLanes = 8, kBandColumns = kLanes / kBandLanes;

}  // namespace
}  // namespace ap

template <class T, class W>
__global__ void __launch_bounds__(ap::kLanes, 4)
    ap_row_norm_kernel(const T* x, const W* squares, const T* weight, T* y, ap::Rows r, int64_t n, double eps, bool rounded) {
  const int64_t number = int64_t(blockIdx.x) * ap::kLanes + threadIdx.x;
  if (number >= r.rows * ap::groups_per_row(r)) return;
  const ap::Group g = ap::group_of(r, number);
  ap::norm_group(x, weight, y, ap::rstd_of(squares[g.row], n, eps), rounded, g.at, g.column, g.left);
}

template <class T, class W>
__global__ void __launch_bounds__(ap::kLanes, 2)
    ap_row_norm_backward_kernel(const T* grad, const T* x, const W* squares, const W* product, const T* weight, T* dx, ap::Rows r, int64_t n,
                                double eps) {
  const int64_t number = int64_t(blockIdx.x) * ap::kLanes + threadIdx.x;
  if (number >= r.rows * ap::groups_per_row(r)) return;
  const ap::Group g = ap::group_of(r, number);
  const ap::Raw<T> raw_grad = ap::fetch_group(grad + g.at, g.left), raw_x = ap::fetch_group(x + g.at, g.left);
  const ap::Raw<T> raw_weight = ap::fetch_weight(weight, g.column, g.left);
  W total[ap::kGroup], values[ap::kGroup], scale[ap::kGroup];
  ap::widen(raw_grad, total);
  ap::widen(raw_x, values);
  ap::widen(raw_weight, scale);
  const W rstd = ap::rstd_of(squares[g.row], n, eps), slope = ((rstd * rstd) * rstd) * product[g.row] / W(n);
  for (int i = 0; i < ap::kGroup; ++i) total[i] = (total[i] * rstd) * scale[i] - values[i] * slope;
  ap::store_group(dx + g.at, g.left, total);
}

template <class T, class W>
__global__ void __launch_bounds__(ap::kLanes, 2)
    ap_row_product_kernel(const T* grad, const T* x, const T* weight, W* product, ap::Rows r, int threads) {
  __shared__ W lanes[ap::kLanes];
  const int64_t row = int64_t(blockIdx.x) * (ap::kLanes / threads) + threadIdx.x / threads;
  W sum = 0;
  for (int64_t column = int64_t(threadIdx.x & (threads - 1)) * ap::kGroup; row < r.rows && column < r.width; column += threads * ap::kGroup) {
    const int64_t at = row * r.width + column, left = r.width - column;
    const ap::Raw<T> raw_grad = ap::fetch_group(grad + at, left), raw_x = ap::fetch_group(x + at, left);
    const ap::Raw<T> raw_weight = ap::fetch_weight(weight, column, left);
    W gradients[ap::kGroup], values[ap::kGroup], scale[ap::kGroup];
    ap::widen(raw_grad, gradients);
    ap::widen(raw_x, values);
    ap::widen(raw_weight, scale);
    for (int i = 0; i < ap::kGroup; ++i) sum = sum + (gradients[i] * scale[i]) * values[i];  // elements past the end of the row are zeros
  }
  sum = ap::add_row(sum, lanes, threads);
  if (row < r.rows && (threadIdx.x & (threads - 1)) == 0) product[row] = sum;
}

template <class W>
__global__ void __launch_bounds__(ap::kLanes, 2) ap_row_weight_kernel(const W* bands, W* dw, int64_t num_bands, int64_t width) {
  __shared__ W lanes[ap::kLanes];
  const int64_t column = int64_t(blockIdx.x) * ap::kBandColumns + threadIdx.x % ap::kBandColumns;
  W sum = 0;
  AP_UNROLL_16
  for (int64_t band = threadIdx.x / ap::kBandColumns; band < num_bands && column < width; band += ap::kBandLanes)
    sum = sum + bands[band * width + column];
  lanes[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= ap::kBandColumns || column >= width) return;
  for (int lane = 1; lane < ap::kBandLanes; ++lane) sum = sum + lanes[lane * ap::kBandColumns + threadIdx.x];
  dw[column] = sum;
}

namespace ap {
namespace {

inline unsigned blocks_of(const Rows& r) { return unsigned(ceil_div(r.rows * groups_per_row(r), kLanes)); }
inline bool fits(const Rows& r) { return is_sound(r) && ceil_div(r.rows * groups_per_row(r), kLanes) <= INT32_MAX; }

}  // namespace
}  // namespace ap

AP_API int ap_row_norm_cuda(const void* x, const void* squares, const void* weight, void* y, int dtype, int64_t rows, int64_t width,
                            int64_t n, double eps, int rounded, void* stream) {
  const ap::Rows r{rows, width};
  if (!ap::fits(r) || n < width) return AP_BAD_ARGUMENT;
  AP_FOR_FLOAT(dtype, T, {
    using W = typename ap::Wide<T>::type;
    if (rows > 0)
      AP_LAUNCH(ap_row_norm_kernel, ap::blocks_of(r), ap::kLanes, stream, static_cast<const T*>(x), static_cast<const W*>(squares),
                static_cast<const T*>(weight), static_cast<T*>(y), r, n, eps, rounded != 0);
  })
  return ap::launched();
}

AP_API int ap_row_product_cuda(const void* grad, const void* x, const void* weight, void* product, int dtype, int64_t rows, int64_t width,
                               void* stream) {
  const ap::Rows r{rows, width};
  if (!ap::fits(r)) return AP_BAD_ARGUMENT;
  const int threads = ap::threads_per_row(r);
  const unsigned blocks = unsigned(ap::ceil_div(rows, ap::kLanes / threads));
  AP_FOR_FLOAT(dtype, T, {
    using W = typename ap::Wide<T>::type;
    if (rows > 0)
      AP_LAUNCH(ap_row_product_kernel, blocks, ap::kLanes, stream, static_cast<const T*>(grad), static_cast<const T*>(x),
                static_cast<const T*>(weight), static_cast<W*>(product), r, threads);
  })
  return ap::launched();
}

AP_API int ap_row_norm_backward_cuda(const void* grad, const void* x, const void* squares, const void* product, const void* weight, void* dx,
                                     int dtype, int64_t rows, int64_t width, int64_t n, double eps, void* stream) {
  const ap::Rows r{rows, width};
  if (!ap::fits(r) || n < width) return AP_BAD_ARGUMENT;
  AP_FOR_FLOAT(dtype, T, {
    using W = typename ap::Wide<T>::type;
    if (rows > 0)
      AP_LAUNCH(ap_row_norm_backward_kernel, ap::blocks_of(r), ap::kLanes, stream, static_cast<const T*>(grad), static_cast<const T*>(x),
                static_cast<const W*>(squares), static_cast<const W*>(product), static_cast<const T*>(weight), static_cast<T*>(dx), r, n,
                eps);
  })
  return ap::launched();
}

AP_API int ap_row_weight_gradient_cuda(const void* grad, const void* x, const void* squares, void* dw, void* bands, int dtype, int64_t rows,
                                       int64_t width, int64_t n, double eps, void* stream) {
  const ap::Rows r{rows, width};
  const int64_t num_bands = ap::ceil_div(rows, ap::kBand);
  if (!ap::fits(r) || n < width || num_bands > 65535) return AP_BAD_ARGUMENT;  // limit of a grid's second dim
  const dim3 grid(unsigned(ap::ceil_div(ap::groups_per_row(r), ap::kLanes)), unsigned(num_bands));
  AP_FOR_FLOAT(dtype, T, {
    using W = typename ap::Wide<T>::type;
    if (rows > 0)
      AP_LAUNCH(ap_norm_bands_kernel, grid, ap::kLanes, stream, static_cast<const T*>(grad), static_cast<const T*>(x),
                static_cast<const W*>(squares), static_cast<W*>(bands), rows, width, n, eps);
    AP_LAUNCH(ap_row_weight_kernel, unsigned(ap::ceil_div(width, ap::kBandColumns)), ap::kLanes, stream, static_cast<const W*>(bands),
              static_cast<W*>(dw), num_bands, width);
  })
  return ap::launched();
}

#endif
