// A lane that is one kernel of few blocks: they wait, copy and signal together, and stay until the last piece is done.
//
// For copies that no engine makes: within one device the driver copies by a kernel of its own, which finds no place beside a product that
// fills the device. Blocks that are there before the product keep their multiprocessors; the product takes the others. A launch stands for
// all of a protocol's waits, copies and signals, which on a stream are an operation each.
//
// A flag's signal is given by the block that arrives last. The word behind the flag, which is in the same line, counts arrivals and is
// never reset: so all uses of the flag's region have the same number of blocks.
#pragma once

#include "index.h"
#include "lanes.h"
#include "peers.h"

#ifdef AP_DEVICE

namespace ap {

constexpr int kLaneThreads = 512;  // a multiple of a warp's
constexpr int kAtOnce = 8;  // loads of a thread on their way: with all threads', more than a multiprocessor's path to memory takes

struct BlockLane {
  double ns_per_byte;  // of all blocks together, at least; 0: as fast as they can

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

  // This block's share of the runs.
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

  // Each warp takes a tile of one run at a time; the warps of all blocks take turns.
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
