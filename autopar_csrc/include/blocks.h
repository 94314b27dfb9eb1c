// A lane that is one kernel of few blocks. The blocks wait, copy and signal together, and run until the last copy is done.
//
// This lane is for copies that no copy engine makes. Within one device, the driver copies with a kernel of its own, which cannot start
// while a product fills the device. Blocks that start before the product keep their multiprocessors, and the product uses the others. One
// launch performs all waits, copies and signals of a protocol; on a stream, each is a separate operation.
//
// The block that arrives last signals the flag. The word after the flag, in the same cache line, counts arrivals and is never reset.
// Therefore all uses of the flag's region must have the same number of blocks.
#pragma once

#include "index.h"
#include "lanes.h"
#include "peers.h"

#ifdef AP_DEVICE

namespace ap {

constexpr int kLaneThreads = 512;  // a multiple of the warp size
constexpr int kAtOnce = 8;  // loads in flight per thread: enough to saturate a multiprocessor's memory path

struct BlockLane {
  double ns_per_byte;  // minimum for all blocks together; 0: no limit

  __device__ int wait(const uint64_t* flag, uint64_t epoch) const {
    if (threadIdx.x == 0 && ap::wait(flag, epoch) != AP_OK) stop();
    __syncthreads();
    return AP_OK;
  }

  __device__ int signal(uint64_t* flag, uint64_t epoch) const {
    __syncthreads();
    const bool is_last = threadIdx.x == 0 && arrive(flag + 1) % gridDim.x == gridDim.x - 1;
    if (is_last && ap::signal(flag, epoch) != AP_OK) stop();
    return AP_OK;
  }

  // Copies this block's share of the runs.
  __device__ int copy(char* to, int64_t to_pitch, const char* from, int64_t from_pitch, int64_t width, int64_t height) const {
    if (width == 0 || height == 0) return AP_OK;
    if (width == to_pitch && width == from_pitch) width *= height, height = 1;
    const uint64_t places = uint64_t(to) | uint64_t(from) | uint64_t(width) | (height == 1 ? 0 : uint64_t(to_pitch) | uint64_t(from_pitch));
    if (places % sizeof(uint4) == 0) {
      copy_in<uint4>(to, to_pitch, from, from_pitch, width, height);
    } else if (places % sizeof(uint32_t) == 0) {
      copy_in<uint32_t>(to, to_pitch, from, from_pitch, width, height);
    } else {
      copy_in<char>(to, to_pitch, from, from_pitch, width, height);
    }
    return AP_OK;
  }

  // Each warp copies a tile of one run at a time. Tiles are assigned to the warps of all blocks in turn.
  template <class Unit>
  __device__ void copy_in(char* to, int64_t to_pitch, const char* from, int64_t from_pitch, int64_t width, int64_t height) const {
    constexpr int64_t kTile = 32 * kAtOnce;
    const int64_t per_block = blockDim.x / 32, warps = gridDim.x * per_block, warp = blockIdx.x * per_block + threadIdx.x / 32;
    const int64_t units = width / int64_t(sizeof(Unit)), tiles = ceil_div(units, kTile);
    const double ns_per_turn = ns_per_byte * double(warps * kTile * int64_t(sizeof(Unit)));
    const uint64_t start = ns_per_byte > 0 ? now_ns() : 0;
    int64_t turn = 0;
    for (int64_t tile = warp; tile < tiles * height; tile += warps) {
      const int64_t run = height == 1 ? 0 : tile / tiles, first = (tile - run * tiles) * kTile + threadIdx.x % 32;
      const Unit* const source = reinterpret_cast<const Unit*>(from + run * from_pitch);
      Unit* const target = reinterpret_cast<Unit*>(to + run * to_pitch);
      Unit held[kAtOnce];
      for (int i = 0; i < kAtOnce; ++i)
        if (first + 32 * i < units) held[i] = source[first + 32 * i];
      for (int i = 0; i < kAtOnce; ++i)
        if (first + 32 * i < units) target[first + 32 * i] = held[i];
      if (ns_per_byte > 0)
        for (const uint64_t due = start + uint64_t(double(++turn) * ns_per_turn); now_ns() < due;) {}
    }
  }
};

inline bool can_run(const Shards& s, uint64_t epoch, int64_t num_blocks, double bytes_per_s) {
  return is_valid(s) && s.size <= kMaxRanks && epoch > 0 && num_blocks > 0 && num_blocks < 65536 && bytes_per_s >= 0;
}

inline BlockLane lane_of(double bytes_per_s) { return BlockLane{bytes_per_s > 0 ? 1e9 / bytes_per_s : 0}; }

}  // namespace ap

#endif
