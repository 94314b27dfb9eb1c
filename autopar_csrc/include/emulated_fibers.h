// The threads of an emulated block as fibers that take turns at each barrier. The order of the turns changes at each barrier, so that a
// missing barrier changes the result. A launch fails if only some threads of a block reach a barrier, or if threads wait at different
// barriers.
#pragma once

#include <ucontext.h>

#include <cstdio>
#include <vector>

inline uint3 threadIdx, blockIdx;

namespace ap_emulated {

struct Place {
  const char* file = nullptr;  // null: the thread has ended
  int line = 0;
  bool operator!=(const Place& other) const { return file != other.file || line != other.line; }
};

struct Block {
  explicit Block(unsigned size) : threads(size), places(size), stacks(size, std::vector<char>(size_t(1) << 16)) {}
  ucontext_t scheduler;
  std::vector<ucontext_t> threads;
  std::vector<Place> places;  // the barrier at which each thread waits
  std::vector<std::vector<char>> stacks;
  std::function<void()> body;
};
inline Block* block = nullptr;
inline bool diverged = false;

inline void barrier(const char* file, int line) {
  block->places[threadIdx.x] = Place{file, line};
  swapcontext(&block->threads[threadIdx.x], &block->scheduler);
}

inline void enter() {
  block->body();
  block->places[threadIdx.x] = Place{};
}

inline void resume(unsigned thread) {
  threadIdx.x = thread;
  swapcontext(&block->scheduler, &block->threads[thread]);
}

inline void begin(unsigned thread) {
  ucontext_t& context = block->threads[thread];
  getcontext(&context);
  context.uc_stack.ss_sp = block->stacks[thread].data();
  context.uc_stack.ss_size = block->stacks[thread].size();
  context.uc_link = &block->scheduler;
  makecontext(&context, enter, 0);
}

// Returns false if the threads are at different places; the block then stops.
inline bool are_together() {
  for (const Place& place : block->places)
    if (place != block->places[0]) {
      const Place& named = place.file == nullptr ? block->places[0] : place;
      fprintf(stderr, "not all threads of a block come to the barrier of %s:%d\n", named.file, named.line);
      return false;
    }
  return true;
}

inline void run_block() {
  const unsigned size = unsigned(block->threads.size());
  for (unsigned thread = 0; thread < size; ++thread) begin(thread);
  const bool mixes = (size & (size - 1)) == 0;  // for a power of two, an odd step visits every thread once
  unsigned round = 0;
  do {
    for (unsigned turn = 0; turn < size; ++turn) resume(mixes ? (turn * (101 + 2 * round) + 37 * round) % size : turn);
    ++round;
    if (!are_together()) diverged = true;
  } while (!diverged && block->places[0].file != nullptr);
}

inline void emulate(dim3 grid, dim3 threads, const std::function<void()>& body) {
  Block made(threads.x);
  made.body = body;
  block = &made;
  gridDim = grid;
  blockDim = threads;
  for (blockIdx.y = 0; blockIdx.y < grid.y && !diverged; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < grid.x && !diverged; ++blockIdx.x) run_block();
  block = nullptr;
}

// Returns whether a launch failed since the last call of this function.
inline bool has_failed() {
  const bool failed = diverged;
  diverged = false;
  return failed;
}

}  // namespace ap_emulated
