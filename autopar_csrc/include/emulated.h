// The device's code on the CPU, for tests where there is no device: blocks one after the other, the threads of a block by turns as fibers
// (emulated_fibers.h), or at once as threads of the host with AP_EMULATED_THREADS (emulated_threads.h), for ThreadSanitizer. It shows what
// a kernel computes, which memory it touches, and whether barriers are there; nothing about time, memory order or other devices.
// Compiled with AP_EMULATED.
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

// A macro, so that each barrier is known by its place in the source.
#define __syncthreads() ap_emulated::barrier(__FILE__, __LINE__)

// Of all 32 lanes of each warp, in blocks of whole warps whose threads all come here.
template <class T> inline T __shfl_down_sync(unsigned, T own, int delta) {
  static T held[1024];
  const unsigned thread = threadIdx.x, lane = thread % 32;
  held[thread] = own;
  __syncthreads();
  const T other = lane + unsigned(delta) < 32 ? held[thread + unsigned(delta)] : own;
  __syncthreads();
  return other;
}
