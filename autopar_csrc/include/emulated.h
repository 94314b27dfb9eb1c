// Runs device code on the CPU, for tests without a device. Blocks run one after the other. The threads of a block run in turns as fibers
// (emulated_fibers.h), or concurrently as host threads with AP_EMULATED_THREADS (emulated_threads.h), for ThreadSanitizer. The emulation
// shows what a kernel computes, which memory it accesses, and whether barriers are missing. It shows nothing about time, memory order or
// other devices. Compiled if AP_EMULATED is defined.
#pragma once

#include <functional>

#define __global__ static
#define __device__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

struct uint3 {
  unsigned x = 0, y = 0, z = 0;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
using cudaStream_t = void*;

inline dim3 blockDim(1), gridDim(1);

#ifdef AP_EMULATED_THREADS
#include "emulated_threads.h"
#else
#include "emulated_fibers.h"
#endif

// A macro, so that a barrier is identified by its source location.
#define __syncthreads() ap_emulated::barrier(__FILE__, __LINE__)

// For all 32 lanes of each warp. The block must consist of whole warps, and all of its threads must call it.
template <class T> inline T __shfl_down_sync(unsigned, T own, int delta) {
  static T held[1024];
  const unsigned thread = threadIdx.x, lane = thread % 32;
  held[thread] = own;
  __syncthreads();
  const T other = lane + unsigned(delta) < 32 ? held[thread + unsigned(delta)] : own;
  __syncthreads();
  return other;
}
