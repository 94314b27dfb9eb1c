// Signals between ranks: one 64-bit counter per flag that only rises, never reset.
//
// A producer writes its data and then signals epoch e: everything it wrote before is seen by whoever has waited for e. A consumer
// waits until the flag is at least e. Epochs are counted from 1 by both sides alike (the n-th use of a buffer is epoch n), so a flag
// needs no reset between uses and no one has to agree on when it is clear; a waiter that comes late finds the flag already past.
// Producers are enqueued before those who wait for them, on every stream and in every thread: then a wait always ends.
//
// Built with AP_DEBUG, a wait gives up after AP_TIMEOUT_S seconds with AP_TIMED_OUT, and a signal that does not raise its flag
// is refused with AP_BAD_ARGUMENT. Without it a wait waits forever and a signal is a single store.
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

// Of the system's scope: the flag may lie on another device or on the host.
__device__ inline uint64_t read_flag(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

// One thread calls it, after a barrier of those whose writes it announces.
__device__ inline int signal(uint64_t* flag, uint64_t epoch) {
#ifdef AP_DEBUG
  if (read_flag(flag) >= epoch) return AP_BAD_ARGUMENT;
#endif
  __threadfence_system();  // what the block's other threads wrote before the barrier
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(epoch) : "memory");
  return AP_OK;
}

__device__ inline uint64_t now_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

// One thread calls it; a barrier after it passes what it has seen on to the block.
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

// How many have arrived before; what the caller, and those it had a barrier with, wrote before is seen by whoever arrives later.
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
    std::this_thread::yield();  // ranks may be more than cores
  }
  return AP_OK;
}

inline uint64_t arrive(uint64_t* count) { return __atomic_fetch_add(count, 1, __ATOMIC_ACQ_REL); }

inline uint64_t now_ns() {
  return uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
}

#endif

}  // namespace ap
