// The threads of an emulated block as host threads, so that ThreadSanitizer checks their accesses to shared memory and to each other's
// results between two barriers. Races between blocks are not detected, because blocks run one after the other.
#pragma once

#include <pthread.h>

#include <thread>
#include <vector>

inline thread_local uint3 threadIdx, blockIdx;

namespace ap_emulated {

// Two barriers are used in turn. With one, ThreadSanitizer would order a thread that leaves late after the threads that arrive at the next
// use, and would miss races between them.
inline pthread_barrier_t barriers[2];
inline thread_local unsigned turn = 0;

inline void barrier(const char*, int) { pthread_barrier_wait(&barriers[turn++ % 2]); }

inline void emulate(dim3 grid, dim3 threads, const std::function<void()>& body) {
  gridDim = grid;
  blockDim = threads;
  for (auto& one : barriers) pthread_barrier_init(&one, nullptr, threads.x);
  const auto run = [&](unsigned thread) {
    threadIdx.x = thread;
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
        body();
        barrier(__FILE__, __LINE__);
      }
  };
  std::vector<std::thread> made;
  for (unsigned thread = 0; thread < threads.x; ++thread) made.emplace_back(run, thread);
  for (auto& thread : made) thread.join();
  for (auto& one : barriers) pthread_barrier_destroy(&one);
}

inline bool has_failed() { return false; }

}  // namespace ap_emulated
