// The threaded host path, for ThreadSanitizer: each mode exits 0 where all went well.
//
//   pack      packs, sums squares and unpacks with four threads
//   norm      forward and backward with four threads
//   hand      a producer hands a buffer to a consumer, epoch after epoch
//   early     the same, but it signals before it has written: a fault planted for the sanitizer to find
//   overlap   two threads write the same element: another
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "include/common.h"
#include "include/epoch.h"
#include "include/threads.h"

AP_API int ap_pack_bucket_host(const int64_t*, int64_t, void*, int, int64_t, int64_t, int64_t, int64_t, int64_t, double, double*, double*, int);
AP_API int ap_unpack_bucket_host(const int64_t*, int64_t, const void*, int, int64_t, int64_t, int64_t, int64_t, int64_t, double, int);
AP_API int ap_reduce_add_rmsnorm_forward_host(const int64_t*, int, const void*, const void*, void*, void*, void*, int, int64_t, int64_t,
                                              double, int, int);
AP_API int ap_reduce_add_rmsnorm_backward_host(const void*, const void*, const void*, const void*, const void*, void*, void*, void*, int,
                                               int64_t, int64_t, double, int);

namespace {

int64_t address(const void* p) { return reinterpret_cast<int64_t>(p); }

// A tensor [3, 50001] cut along its second dim for 2 ranks: two rows of 75008 elements, 5 chunks each.
int pack() {
  std::vector<float> tensor(3 * 50001), back(3 * 50001), bucket(2 * 75008);
  for (size_t i = 0; i < tensor.size(); ++i) tensor[i] = float(i % 97);
  std::vector<double> sums(10), squares(1);
  int64_t piece[8] = {address(tensor.data()), AP_F32, 3, 50001, 50001, 1, 0, 0};
  int status = ap_pack_bucket_host(piece, 1, bucket.data(), AP_F32, 75008, 2, 0, 2, 5, 1.0, sums.data(), squares.data(), 4);
  piece[0] = address(back.data());
  status = status ? status : ap_unpack_bucket_host(piece, 1, bucket.data(), AP_F32, 75008, 2, 0, 2, 5, 1.0, 4);
  return status ? status : int(back != tensor);
}

int norm() {
  const int64_t rows = 200, hidden = 1024;
  std::vector<float> part(rows * hidden, 1.0f), weight(hidden, 2.0f), y(rows * hidden), normed(rows * hidden), squares(rows);
  std::vector<float> grad(rows * hidden), grad_weight(hidden), bands(4 * hidden);
  const int64_t parts[2] = {address(part.data()), address(part.data())};
  const int status = ap_reduce_add_rmsnorm_forward_host(parts, 2, part.data(), weight.data(), y.data(), normed.data(), squares.data(),
                                                        AP_F32, rows, hidden, 1e-6, 1, 4);
  return status ? status
                : ap_reduce_add_rmsnorm_backward_host(part.data(), normed.data(), y.data(), squares.data(), weight.data(), grad.data(),
                                                      grad_weight.data(), bands.data(), AP_F32, rows, hidden, 1e-6, 4);
}

int hand(bool early) {
  uint64_t full = 0, empty = 0;
  int64_t value = 0, wrong = 0;
  std::thread producer([&] {
    for (uint64_t epoch = 1; epoch <= 100; ++epoch) {
      if (epoch > 1) ap::wait(&empty, epoch - 1);
      if (early) ap::signal(&full, epoch);
      value = int64_t(epoch);
      if (!early) ap::signal(&full, epoch);
    }
  });
  for (uint64_t epoch = 1; epoch <= 100; ++epoch) {
    if (ap::wait(&full, epoch) != AP_OK) ++wrong;
    if (value != int64_t(epoch)) ++wrong;
    ap::signal(&empty, epoch);
  }
  producer.join();
  return int(wrong != 0);
}

int overlap() {
  std::vector<int64_t> values(8);
  ap::for_each_item(8, 4, [&](int64_t item) { values[item / 4 * 4] = item; });
  return 0;
}

}  // namespace

int main(int num_arguments, char** arguments) {
  const char* mode = num_arguments > 1 ? arguments[1] : "";
  if (!strcmp(mode, "pack")) return pack();
  if (!strcmp(mode, "norm")) return norm();
  if (!strcmp(mode, "hand")) return hand(false);
  if (!strcmp(mode, "early")) return hand(true);
  if (!strcmp(mode, "overlap")) return overlap();
  fprintf(stderr, "no mode %s\n", mode);
  return 2;
}
