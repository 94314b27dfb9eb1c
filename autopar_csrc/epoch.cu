// epoch: a single signal and a single wait, for copies made by a copy engine and for tests (see include/epoch.h).
//
// ap_epoch_signal:  sets flag (the address of one uint64) to `epoch`, after all earlier work of its stream or thread.
// ap_epoch_wait:    delays all later work of its stream or thread until the flag has reached `epoch`.
// On the device, the status of the wait is written to *status (an int on the device, or null). The call returns the status of the launch.
// ap_epoch_refused: the number of signals and waits of lanes that used a kernel because the driver refused them (include/stream_ops.h).
#include "include/epoch.h"
#include "include/stream_ops.h"

#ifdef AP_DEVICE

__global__ void ap_epoch_signal_kernel(uint64_t* flag, uint64_t epoch) { ap::signal(flag, epoch); }

__global__ void ap_epoch_wait_kernel(const uint64_t* flag, uint64_t epoch, int* status) {
  const int found = ap::wait(flag, epoch);
  if (status != nullptr) *status = found;
}

AP_API int ap_epoch_signal_cuda(uint64_t* flag, uint64_t epoch, void* stream) {
  if (flag == nullptr || epoch == 0) return AP_BAD_ARGUMENT;
  AP_LAUNCH(ap_epoch_signal_kernel, 1, 1, stream, flag, epoch);
  return ap::launched();
}

AP_API int ap_epoch_wait_cuda(const uint64_t* flag, uint64_t epoch, int* status, void* stream) {
  if (flag == nullptr) return AP_BAD_ARGUMENT;
  AP_LAUNCH(ap_epoch_wait_kernel, 1, 1, stream, flag, epoch, status);
  return ap::launched();
}

AP_API int ap_epoch_refused_cuda(uint64_t* count) {
  if (count == nullptr) return AP_BAD_ARGUMENT;
  *count = ap::refused_stream_ops();
  return AP_OK;
}

#else

AP_API int ap_epoch_signal_host(uint64_t* flag, uint64_t epoch) {
  if (flag == nullptr || epoch == 0) return AP_BAD_ARGUMENT;
  return ap::signal(flag, epoch);
}

AP_API int ap_epoch_wait_host(const uint64_t* flag, uint64_t epoch) {
  if (flag == nullptr) return AP_BAD_ARGUMENT;
  return ap::wait(flag, epoch);
}

#endif
