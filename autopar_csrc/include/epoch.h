// Signals between ranks: each flag is one 64-bit counter that only increases and is never reset.
//
// A producer writes its data and then signals epoch e. A consumer waits until the flag is at least e, and then sees everything that the
// producer wrote before the signal. Both sides count epochs from 1 (the n-th use of a buffer is epoch n). So a flag needs no reset between
// uses, and the ranks need not agree on when it is clear. A late waiter finds that the flag has passed its epoch.
// On every stream and in every thread, producers are enqueued before the consumers that wait for them. Therefore every wait ends.
//
// If built with AP_DEBUG, a wait fails with AP_TIMED_OUT after AP_TIMEOUT_S seconds, and a signal that does not increase its flag fails
// with AP_BAD_ARGUMENT. Without AP_DEBUG, a wait has no timeout and a signal is a single store.
#pragma once

#include "common.h"

#ifndef __CUDACC__
#include <chrono>
#include <thread>
#endif

#ifndef AP_TIMEOUT_S
#define AP_TIMEOUT_S 2
#endif

namespace ap {

#ifdef __CUDACC__

// System scope, because the flag may be in the memory of another device or of the host.
__device__ inline uint64_t read_flag(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

// Called by one thread, after a barrier of the threads whose writes the signal publishes.
__device__ inline int signal(uint64_t* flag, uint64_t epoch) {
#ifdef AP_DEBUG
  if (read_flag(flag) >= epoch) return AP_BAD_ARGUMENT;
#endif
  __threadfence_system();  // covers the writes of the other threads before the barrier
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(epoch) : "memory");
  return AP_OK;
}

__device__ inline uint64_t now_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

// Called by one thread; a barrier after it makes the data visible to the block.
__device__ inline int wait(const uint64_t* flag, uint64_t epoch) {
#ifdef AP_DEBUG
  const uint64_t start = now_ns();
#endif
  while (read_flag(flag) < epoch) {
#ifdef AP_DEBUG
    if (now_ns() - start > uint64_t(AP_TIMEOUT_S) * 1000000000u) return AP_TIMED_OUT;
#endif
    __nanosleep(100);
  }
  return AP_OK;
}

// Returns the number of earlier arrivals. The earlier writes of the caller, and of the threads in its last barrier, are visible to callers
// that arrive later.
__device__ inline uint64_t arrive(uint64_t* count) {
  __threadfence_system();
  return atomicAdd_system(reinterpret_cast<unsigned long long*>(count), 1ull);
}

#else

inline uint64_t read_flag(const uint64_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }

inline int signal(uint64_t* flag, uint64_t epoch) {
#ifdef AP_DEBUG
  if (read_flag(flag) >= epoch) return AP_BAD_ARGUMENT;
#endif
  __atomic_store_n(flag, epoch, __ATOMIC_RELEASE);
  return AP_OK;
}

inline int wait(const uint64_t* flag, uint64_t epoch) {
#ifdef AP_DEBUG
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(AP_TIMEOUT_S);
#endif
  while (read_flag(flag) < epoch) {
#ifdef AP_DEBUG
    if (std::chrono::steady_clock::now() > end) return AP_TIMED_OUT;
#endif
    std::this_thread::yield();  // there may be more ranks than cores
  }
  return AP_OK;
}

inline uint64_t arrive(uint64_t* count) { return __atomic_fetch_add(count, 1, __ATOMIC_ACQ_REL); }

inline uint64_t now_ns() {
  return uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
}

#endif

}  // namespace ap
