// Lanes. A lane runs the steps of a protocol, either in the calling thread or on a CUDA stream, with the same operations in the same order.
//
// Each function returns a status. On a stream it returns once the operation is enqueued. A wait that times out there (AP_DEBUG) stops the
// stream with a trap, which the caller sees as a device error when it synchronizes.
#pragma once

#include <cstdlib>

#include "epoch.h"
#include "shards.h"
#include "stream_ops.h"

// Returns from the function with the status, unless it is AP_OK.
#define AP_TRY(...)                                      \
  do {                                                   \
    const int ap_status_of_it = (__VA_ARGS__);           \
    if (ap_status_of_it != AP_OK) return ap_status_of_it; \
  } while (0)

namespace ap {

// Copies on the device, and their emulation.
#if defined(__CUDACC__)

constexpr int64_t kMaxPitch = 2147483647;  // cudaDeviceProp.memPitch of all target devices

__device__ inline void stop() { __trap(); }
inline int copy_run(char* to, const char* from, int64_t num_bytes, void* stream) {
  const auto error = cudaMemcpyAsync(to, from, size_t(num_bytes), cudaMemcpyDefault, stream_of(stream));
  return error == cudaSuccess ? AP_OK : AP_LAUNCH_FAILED;
}
inline int copy_runs(char* to, int64_t to_pitch, const char* from, int64_t from_pitch, int64_t width, int64_t height, void* stream) {
  const auto error = cudaMemcpy2DAsync(to, size_t(to_pitch), from, size_t(from_pitch), size_t(width), size_t(height), cudaMemcpyDefault,
                                       stream_of(stream));
  return error == cudaSuccess ? AP_OK : AP_LAUNCH_FAILED;
}

#elif defined(AP_EMULATED)

constexpr int64_t kMaxPitch = 64;  // small, so that tests reach both branches of the copy

inline void stop() { abort(); }
inline int copy_run(char* to, const char* from, int64_t num_bytes, void*) {
  memcpy(to, from, size_t(num_bytes));
  return AP_OK;
}
inline int copy_runs(char* to, int64_t to_pitch, const char* from, int64_t from_pitch, int64_t width, int64_t height, void*) {
  for (int64_t run = 0; run < height; ++run) memcpy(to + run * to_pitch, from + run * from_pitch, size_t(width));
  return AP_OK;
}

#endif

#ifdef AP_DEVICE

namespace {

// Kernels of one thread: they compute nothing, and the order of the stream delays the work after them.
__global__ void ap_lane_wait_kernel(const uint64_t* flag, uint64_t epoch) {
  if (wait(flag, epoch) != AP_OK) stop();
}
__global__ void ap_lane_signal_kernel(uint64_t* flag, uint64_t epoch) {
  if (signal(flag, epoch) != AP_OK) stop();
}

}  // namespace

struct StreamLane {
  void* stream;

  int wait(const uint64_t* flag, uint64_t epoch) const { return stream_wait(stream, flag, epoch) ? AP_OK : wait_for_pushed(flag, epoch); }
  // For data that peers wrote to this device. A stream's wait does not guarantee that the data are visible once the flag is
  // (CU_STREAM_WAIT_VALUE_FLUSH, which few platforms support); an acquire load does.
  int wait_for_pushed(const uint64_t* flag, uint64_t epoch) const {
    AP_LAUNCH(ap_lane_wait_kernel, 1, 1, stream, flag, epoch);
    return launched();
  }
  int signal(uint64_t* flag, uint64_t epoch) const {
    if (stream_write(stream, flag, epoch)) return AP_OK;
    AP_LAUNCH(ap_lane_signal_kernel, 1, 1, stream, flag, epoch);
    return launched();
  }
  // Uses the copy engine, so that the concurrent product keeps all multiprocessors.
  int copy(char* to, int64_t to_pitch, const char* from, int64_t from_pitch, int64_t width, int64_t height) const {
    if (width == 0 || height == 0) return AP_OK;
    if (height == 1 || (width == to_pitch && width == from_pitch)) return copy_run(to, from, width * height, stream);
    if (to_pitch <= kMaxPitch && from_pitch <= kMaxPitch) return copy_runs(to, to_pitch, from, from_pitch, width, height, stream);
    for (int64_t run = 0; run < height; ++run) AP_TRY(copy_run(to + run * to_pitch, from + run * from_pitch, width, stream));
    return AP_OK;
  }
};

#else

struct HostLane {
  int wait(const uint64_t* flag, uint64_t epoch) const { return ap::wait(flag, epoch); }
  int wait_for_pushed(const uint64_t* flag, uint64_t epoch) const { return ap::wait(flag, epoch); }
  int signal(uint64_t* flag, uint64_t epoch) const { return ap::signal(flag, epoch); }
  int copy(char* to, int64_t to_pitch, const char* from, int64_t from_pitch, int64_t width, int64_t height) const {
    for (int64_t run = 0; run < height; ++run) memcpy(to + run * to_pitch, from + run * from_pitch, size_t(width));
    return AP_OK;
  }
};

#endif

}  // namespace ap
