// The device's code on the CPU, for tests where there is no device: blocks one after the other, the threads of a block as fibers that take
// turns at each barrier, in another mixed order each time, so that a missing barrier shows in the result. It shows what a kernel computes;
// nothing about time, memory order or other devices. Compiled with AP_EMULATED, single-threaded.
#pragma once

#include <ucontext.h>

#include <functional>
#include <vector>

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

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim(1), gridDim(1);

namespace ap_emulated {

struct Block {
  explicit Block(unsigned size) : threads(size), ended(size), stacks(size, std::vector<char>(size_t(1) << 16)) {}
  ucontext_t scheduler;
  std::vector<ucontext_t> threads;
  std::vector<bool> ended;
  std::vector<std::vector<char>> stacks;
  std::function<void()> body;
};
inline Block* block = nullptr;

inline void enter() {
  block->body();
  block->ended[threadIdx.x] = true;
}

inline void resume(unsigned thread) {
  if (block->ended[thread]) return;
  threadIdx.x = thread;
  swapcontext(&block->scheduler, &block->threads[thread]);
}

inline void run_block() {
  const unsigned size = unsigned(block->threads.size());
  for (unsigned thread = 0; thread < size; ++thread) {
    ucontext_t& context = block->threads[thread];
    getcontext(&context);
    context.uc_stack.ss_sp = block->stacks[thread].data();
    context.uc_stack.ss_size = block->stacks[thread].size();
    context.uc_link = &block->scheduler;
    makecontext(&context, enter, 0);
    block->ended[thread] = false;
  }
  const auto is_running = [&] {
    for (const bool ended : block->ended)
      if (!ended) return true;
    return false;
  };
  const bool mixes = (size & (size - 1)) == 0;  // an odd step visits every thread once
  for (unsigned round = 0; is_running(); ++round)
    for (unsigned turn = 0; turn < size; ++turn) resume(mixes ? (turn * (101 + 2 * round) + 37 * round) % size : turn);
}

inline void emulate(dim3 grid, dim3 threads, const std::function<void()>& body) {
  Block made(threads.x);
  made.body = body;
  block = &made;
  gridDim = grid;
  blockDim = threads;
  for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) run_block();
  block = nullptr;
}

}  // namespace ap_emulated

inline void __syncthreads() { swapcontext(&ap_emulated::block->threads[threadIdx.x], &ap_emulated::block->scheduler); }
