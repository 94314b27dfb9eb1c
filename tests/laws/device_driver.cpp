// The device's kernels of buckets, norms, losses and routes, each thread of a block one of the host's (include/emulated_threads.h), as
// ThreadSanitizer shall see them: `driver`. What they compute is tests/unit/kernels/test_device_code.py's to compare.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "include/common.h"
#include "include/index.h"
#include "include/routes.h"

extern "C" {
int ap_pack_bucket_cuda(const ap::Piece*, int64_t, void*, int, int64_t, int64_t, int64_t, int64_t, int64_t, double, double*, double*, void*);
int ap_unpack_bucket_cuda(const ap::Piece*, int64_t, const void*, int, int64_t, int64_t, int64_t, int64_t, int64_t, double, void*);
int ap_reduce_add_rmsnorm_forward_cuda(const int64_t*, int, const void*, const void*, void*, void*, void*, int, int64_t, int64_t, double, int,
                                       void*);
int ap_reduce_add_rmsnorm_backward_cuda(const void*, const void*, const void*, const void*, const void*, void*, void*, void*, int, int64_t,
                                        int64_t, double, void*);
int ap_row_product_cuda(const void*, const void*, const void*, void*, int, int64_t, int64_t, void*);
int ap_row_weight_gradient_cuda(const void*, const void*, const void*, void*, void*, int, int64_t, int64_t, int64_t, double, void*);
int ap_sum_exp_cuda(const void*, const void*, void*, int, int64_t, int64_t, void*);
int ap_moe_dispatch_announce_cuda(const int64_t*, int64_t*, int64_t*, void* const*, uint64_t* const*, ap::Routes, uint64_t, void*);
}

namespace {

void check(int status, const char* what) {
  if (status == AP_OK) return;
  fprintf(stderr, "%s: status %d\n", what, status);
  std::_Exit(2);
}

template <class T> std::vector<T> drawn(int64_t count) {
  std::vector<T> made;
  for (int64_t i = 0; i < count; ++i) made.push_back(T(1 + i * 7919 % 13));
  return made;
}

// Three tensors, one of more than a chunk, cut for three ranks.
void pack_and_unpack() {
  const int64_t shapes[][3] = {{1, 5, 3}, {2, 4000, 7}, {3, 1, 1}};  // outer, the dim that is cut, inner
  std::vector<std::vector<float>> tensors;
  std::vector<ap::Piece> pieces;
  ap::Bucket b{0, 3, 0, 3, 0};
  for (const auto& [outer, whole, inner] : shapes) {
    tensors.push_back(drawn<float>(outer * whole * inner));
    pieces.push_back(ap::Piece{int64_t(tensors.back().data()), AP_F32, outer, whole, whole, inner, b.row, b.chunks});
    const int64_t length = ap::segment_length(pieces.back(), b.parts);
    b.row += length, b.chunks += ap::ceil_div(length, ap::kChunk);
  }
  std::vector<float> bucket(size_t(b.row * b.count));
  std::vector<double> sums(size_t(b.chunks * b.count)), squares(pieces.size());
  const int64_t count = int64_t(pieces.size());
  check(ap_pack_bucket_cuda(pieces.data(), count, bucket.data(), AP_F32, b.row, b.parts, b.first, b.count, b.chunks, 0.5, sums.data(),
                            squares.data(), nullptr), "pack");
  check(ap_unpack_bucket_cuda(pieces.data(), count, bucket.data(), AP_F32, b.row, b.parts, b.first, b.count, b.chunks, 2, nullptr), "unpack");
}

// Rows that a block has to itself, that a warp shares, and that share a warp.
void norms_and_losses(int64_t rows, int64_t width) {
  const auto x = drawn<float>(rows * width), grad = drawn<float>(rows * width), weight = drawn<float>(width), most = drawn<float>(rows);
  std::vector<float> y(x.size()), normed(x.size()), squares(most), made(most.size()), dx(x.size()), dw(weight.size());
  std::vector<float> bands(size_t(ap::ceil_div(rows, 64) * width));
  const int64_t parts[] = {int64_t(x.data()), int64_t(grad.data()), int64_t(x.data())};
  check(ap_reduce_add_rmsnorm_forward_cuda(parts, 3, grad.data(), weight.data(), y.data(), normed.data(), squares.data(), AP_F32, rows, width,
                                           1e-5, 0, nullptr), "norm");
  check(ap_reduce_add_rmsnorm_backward_cuda(x.data(), grad.data(), y.data(), squares.data(), weight.data(), dx.data(), dw.data(), bands.data(),
                                            AP_F32, rows, width, 1e-5, nullptr), "norm's backward");
  check(ap_row_product_cuda(grad.data(), x.data(), weight.data(), made.data(), AP_F32, rows, width, nullptr), "product");
  check(ap_row_weight_gradient_cuda(grad.data(), x.data(), squares.data(), dw.data(), bands.data(), AP_F32, rows, width, width, 1e-5, nullptr),
        "weight's gradient");
  check(ap_sum_exp_cuda(x.data(), most.data(), made.data(), AP_F32, rows, width, nullptr), "sum of exponentials");
}

// More pairs than a tile has.
void routes() {
  const ap::Routes r{150, 2, 16, 3, 1, 0, 300};
  std::vector<int64_t> experts, counts(size_t(r.num_experts)), within(size_t(ap::num_pairs(r)));
  for (int64_t p = 0; p < ap::num_pairs(r); ++p) experts.push_back(p * p % r.num_experts);
  std::vector<char> memory(size_t(ap::dispatch_bytes(r)));
  std::vector<uint64_t> flags(size_t(ap::num_route_flags(r)));
  void* const memories[] = {memory.data()};
  uint64_t* const signals[] = {flags.data()};
  check(ap_moe_dispatch_announce_cuda(experts.data(), counts.data(), within.data(), memories, signals, r, 1, nullptr), "announce");
}

}  // namespace

int main() {
  pack_and_unpack();
  norms_and_losses(2, 2500);
  norms_and_losses(70, 100);
  norms_and_losses(40, 9);
  routes();
}
