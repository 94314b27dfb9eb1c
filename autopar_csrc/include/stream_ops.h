// Signals and waits as memory operations of a stream, without a kernel.
//
// A kernel of one thread needs a free multiprocessor, and a product that fills the device leaves none until it ends, so the concurrent
// copies would not make progress. The driver's stream memory operations need no multiprocessor. A write follows all earlier work of its
// stream and a fence of system scope (CUDA driver API, cuStreamWriteValue64). A wait ends once the word, as a signed number, is at least
// the epoch (cuStreamWaitValue64, GEQ). Debug builds use kernels, whose waits have a timeout.
#pragma once

#include <atomic>

#include "epoch.h"

namespace ap {

// The number of signals and waits, of all lanes so far, that used a kernel because the driver refused them.
inline std::atomic<uint64_t>& refused_stream_ops() {
  static std::atomic<uint64_t> count{0};
  return count;
}

}  // namespace ap

#if defined(__CUDACC__) && !defined(AP_DEBUG)
#include <cuda.h>

namespace ap {

struct StreamOps {
  using Wait = CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned);
  using Write = CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned);
  Wait wait = nullptr;
  Write write = nullptr;
};

// Looked up in the installed driver, so that the library loads without a driver. Null if the driver does not have the function.
template <class F> inline F driver_function(const char* name) {
  void* found = nullptr;
#if CUDART_VERSION >= 12050
  const auto error = cudaGetDriverEntryPointByVersion(name, &found, 11070, cudaEnableDefault, nullptr);
#else
  const auto error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, nullptr);
#endif
  return error == cudaSuccess ? reinterpret_cast<F>(found) : nullptr;
}

inline const StreamOps& stream_ops() {
  static const StreamOps ops{driver_function<StreamOps::Wait>("cuStreamWaitValue64"), driver_function<StreamOps::Write>("cuStreamWriteValue64")};
  return ops;
}

inline bool counted(bool taken) {
  if (!taken) ++refused_stream_ops();
  return taken;
}

// Return whether the operation was enqueued: a device may not support it, or not on this memory.
inline bool stream_wait(void* stream, const uint64_t* flag, uint64_t epoch) {
  const auto place = reinterpret_cast<CUdeviceptr>(flag);
  const auto wait = stream_ops().wait;
  return counted(wait != nullptr && wait(static_cast<CUstream>(stream), place, epoch, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS);
}
inline bool stream_write(void* stream, uint64_t* flag, uint64_t epoch) {
  const auto place = reinterpret_cast<CUdeviceptr>(flag);
  const auto write = stream_ops().write;
  return counted(write != nullptr && write(static_cast<CUstream>(stream), place, epoch, CU_STREAM_WRITE_VALUE_DEFAULT) == CUDA_SUCCESS);
}

}  // namespace ap

#else

namespace ap {

// Debug builds do not call the driver. The emulation acts like a driver that refuses all operations.
inline bool asked_for_a_kernel() {
#ifdef AP_EMULATED
  ++refused_stream_ops();
#endif
  return false;
}
inline bool stream_wait(void*, const uint64_t*, uint64_t) { return asked_for_a_kernel(); }
inline bool stream_write(void*, uint64_t*, uint64_t) { return asked_for_a_kernel(); }

}  // namespace ap

#endif
