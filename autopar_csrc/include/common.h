// Definitions for all kernels: function attributes, dtypes, status codes, conversions, and loads of eight elements.
//
// The same file compiles as CUDA (nvcc, __CUDACC__ defined) and as plain C++17 (g++ -x c++). The CUDA library has the entry points that end
// in _cuda, and the host library has those that end in _host. Both share the code that computes. Products and sums are never contracted
// (-ffp-contract=off, --fmad=false), so that host, device and the torch reference are bitwise equal if the order of the sums is the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// AP_DEVICE: the device entry points are compiled, by nvcc or for the emulation in include/emulated.h.
// AP_ON_DEVICE: this pass compiles device code.
#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define AP_HD __host__ __device__
#define AP_DEVICE
#define AP_LAUNCH(kernel, blocks, threads, stream, ...) kernel<<<blocks, threads, 0, ap::stream_of(stream)>>>(__VA_ARGS__)
#elif defined(AP_EMULATED)
#include "emulated.h"
#define AP_HD
#define AP_DEVICE
#define AP_LAUNCH(kernel, blocks, threads, stream, ...) ((void)stream, ap_emulated::emulate(blocks, threads, [&] { kernel(__VA_ARGS__); }))
#else
#define AP_HD
#endif
#if defined(__CUDA_ARCH__) || defined(AP_EMULATED)
#define AP_ON_DEVICE
#endif
// Before a loop whose loads are independent: the number of loads in flight at once.
#if defined(__CUDA_ARCH__)
#define AP_UNROLL_16 _Pragma("unroll 16")
#else
#define AP_UNROLL_16
#endif
// Before a template that is called with host functions and with device functions: nvcc checks each call separately.
#if defined(__CUDACC__)
#define AP_EITHER _Pragma("nv_exec_check_disable")
#else
#define AP_EITHER
#endif
#define AP_API extern "C" __attribute__((visibility("default")))

enum ap_dtype { AP_F32 = 0, AP_F64 = 1, AP_BF16 = 2, AP_F16 = 3, AP_I32 = 4, AP_I64 = 5, AP_U8 = 6 };

// Return values of all entry points.
enum ap_status { AP_OK = 0, AP_BAD_ARGUMENT = 1, AP_TIMED_OUT = 2, AP_LAUNCH_FAILED = 3 };

namespace ap {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

AP_HD inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

AP_HD inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// The device's native conversions round in the same way. They use one bit pattern for all NaNs, so conversions of a NaN to a narrow type
// choose that pattern here. From f16 to float, the mantissa of a NaN may differ from the host's.
// --- to float: exact -------------------------------------------------------------------------------------------------------------
AP_HD inline float to_float(bf16 x) { return float_of(uint32_t(x.bits) << 16); }

AP_HD inline float to_float(f16 x) {
#if defined(__CUDA_ARCH__)
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#else
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 0x1fu, digits = x.bits & 0x3ffu;
  if (exponent == 0) return float_of(sign | bits_of(float(digits) * 5.9604644775390625e-8f));  // a multiple of 2^-24
  if (exponent == 31) return float_of(sign | 0x7f800000u | (digits << 13));
  return float_of(sign | ((exponent + 112) << 23) | (digits << 13));
#endif
}

// --- from float: to nearest, ties to even ----------------------------------------------------------------------------------------
AP_HD inline bf16 to_bf16(float x) {
#if defined(__CUDA_ARCH__)
  uint16_t narrow;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow) : "f"(x));
  return bf16{x == x ? narrow : uint16_t(0x7fc0)};
#else
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{0x7fc0};  // an addition to a NaN's mantissa could make it infinite
  return bf16{uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}

AP_HD inline f16 to_f16(float x) {
#if defined(__CUDA_ARCH__)
  uint16_t narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(x));
  return f16{x == x ? narrow : uint16_t((bits_of(x) >> 16 & 0x8000u) | 0x7e00u)};
#else
  const uint32_t bits = bits_of(x), size = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
  if (size > 0x7f800000u) return f16{uint16_t(sign | 0x7e00u)};
  if (size >= 0x477ff000u) return f16{uint16_t(sign | 0x7c00u)};  // 65520 and more: at least halfway from 65504 to the next value
  // Below 2^-14 the spacing of f16 is 2^-24, which is the spacing of float at 0.5: the addition rounds.
  if (size < 0x38800000u) return f16{uint16_t(sign | (bits_of(float_of(size) + 0.5f) - 0x3f000000u))};
  return f16{uint16_t(sign | ((size + 0xfffu + ((size >> 13) & 1u) - 0x38000000u) >> 13))};
#endif
}

// --- between a stored type and the compute type: double if a stored type is double, else float -----------------------------------
template <class W, class T> struct Convert {
  AP_HD static W wide(T x) { return W(x); }
  AP_HD static T narrow(W x) { return T(x); }
};
template <class W> struct Convert<W, bf16> {
  AP_HD static W wide(bf16 x) { return W(to_float(x)); }
  AP_HD static bf16 narrow(W x) { return to_bf16(float(x)); }
};
template <class W> struct Convert<W, f16> {
  AP_HD static W wide(f16 x) { return W(to_float(x)); }
  AP_HD static f16 narrow(W x) { return to_f16(float(x)); }
};

template <class T> struct Wide { using type = float; };
template <> struct Wide<double> { using type = double; };
template <class A, class B> struct Wider { using type = float; };
template <class B> struct Wider<double, B> { using type = double; };
template <class A> struct Wider<A, double> { using type = double; };
template <> struct Wider<double, double> { using type = double; };

// --- eight elements at a time -----------------------------------------------------------------------------------------------------
constexpr int kGroup = 8;  // 16 bytes of bf16 and f16, 32 of float, 64 of double

AP_HD inline bool is_aligned(const void* p) { return (reinterpret_cast<uintptr_t>(p) & 15u) == 0; }

// Eight elements as stored in memory. If several groups are needed, all are fetched before the first is used: a load whose result is
// converted immediately delays the next load.
template <class T> struct Raw {
  alignas(16) T items[kGroup];
};

// Fetches `count` <= 8 elements; the rest is zero. Uses 16-byte accesses if count >= 8 and the address is aligned.
template <class T> AP_HD inline Raw<T> fetch_group(const T* p, int64_t count) {
  Raw<T> raw;
  if (count >= kGroup && is_aligned(p)) {
#ifdef AP_ON_DEVICE
    for (int i = 0; i < int(sizeof raw / 16); ++i) reinterpret_cast<uint4*>(raw.items)[i] = reinterpret_cast<const uint4*>(p)[i];
#else
    memcpy(raw.items, p, sizeof raw.items);
#endif
    return raw;
  }
  for (int i = 0; i < kGroup; ++i) {
    if (i < count) {
      raw.items[i] = p[i];
    } else {
      raw.items[i] = T{};
    }
  }
  return raw;
}

template <class W, class T> AP_HD inline void widen(const Raw<T>& raw, W out[kGroup]) {
  for (int i = 0; i < kGroup; ++i) out[i] = Convert<W, T>::wide(raw.items[i]);
}

template <class W, class T> AP_HD inline void load_group(const T* p, int64_t count, W out[kGroup]) { widen(fetch_group(p, count), out); }

// Stores the first `count` <= 8 elements.
template <class W, class T> AP_HD inline void store_group(T* p, int64_t count, const W in[kGroup]) {
  if (count >= kGroup && is_aligned(p)) {
    alignas(16) T raw[kGroup];
    for (int i = 0; i < kGroup; ++i) raw[i] = Convert<W, T>::narrow(in[i]);
#ifdef AP_ON_DEVICE
    for (int i = 0; i < int(sizeof raw / 16); ++i) reinterpret_cast<uint4*>(p)[i] = reinterpret_cast<const uint4*>(raw)[i];
#else
    memcpy(p, raw, sizeof raw);
#endif
    return;
  }
  for (int i = 0; i < kGroup && i < count; ++i) p[i] = Convert<W, T>::narrow(in[i]);
}

#if defined(AP_EMULATED)
inline int launched() { return ap_emulated::has_failed() ? AP_LAUNCH_FAILED : AP_OK; }
#elif defined(__CUDACC__)
// The status of the previous launch. Later faults of the kernel appear when the caller synchronizes.
inline int launched() { return cudaGetLastError() == cudaSuccess ? AP_OK : AP_LAUNCH_FAILED; }
inline cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }
#endif

}  // namespace ap

// Runs the statement with T as the stored type of the floating-point `dtype`. Returns AP_BAD_ARGUMENT for any other dtype.
#define AP_FOR_FLOAT(dtype, T, ...)                            \
  switch (dtype) {                                             \
    case AP_F32: { using T = float; __VA_ARGS__; } break;      \
    case AP_F64: { using T = double; __VA_ARGS__; } break;     \
    case AP_BF16: { using T = ap::bf16; __VA_ARGS__; } break;  \
    case AP_F16: { using T = ap::f16; __VA_ARGS__; } break;    \
    default: return AP_BAD_ARGUMENT;                           \
  }
