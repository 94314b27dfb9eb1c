// Where a step of a protocol runs: in the calling thread, or as a piece of a CUDA stream. Both do the same in the same order.
//
// Each function returns a status. On a stream it returns when the piece is enqueued; a wait that times out there (AP_DEBUG) stops the
// stream with a trap, which the caller sees as an error of the device where it synchronises.
#pragma once

#include <cstdlib>

#include "epoch.h"
#include "shards.h"
#include "stream_ops.h"

// Ends the function with the first status that is not AP_OK.
#define AP_TRY(...)                                      \
  do {                                                   \
    const int ap_status_of_it = (__VA_ARGS__);           \
    if (ap_status_of_it != AP_OK) return ap_status_of_it; \
  } while (0)

namespace ap {

// What the device has, and its emulation.
#if defined(__CUDACC__)

constexpr int64_t kMaxPitch = 2147483647;  // cudaDeviceProp.memPitch of all devices that are built for

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

constexpr int64_t kMaxPitch = 64;  // so that both ways are taken

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

// One thread each: they take part in no computation, and a stream's order makes what lies around them wait.
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
  // For what peers wrote to this device: a stream's own wait does not promise that it is seen with the flag (CU_STREAM_WAIT_VALUE_FLUSH,
  // which few platforms have), an acquiring load does.
  int wait_for_pushed(const uint64_t* flag, uint64_t epoch) const {
    AP_LAUNCH(ap_lane_wait_kernel, 1, 1, stream, flag, epoch);
    return launched();
  }
  int signal(uint64_t* flag, uint64_t epoch) const {
    if (stream_write(stream, flag, epoch)) return AP_OK;
    AP_LAUNCH(ap_lane_signal_kernel, 1, 1, stream, flag, epoch);
    return launched();
  }
  // By the copy engine: no multiprocessor is taken from the product that runs beside it.
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
