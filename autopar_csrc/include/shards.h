// Index maps of the overlapped products: the order of the shards, the addresses of their chunks, and the flags.
//
// A tensor has the shape [outer, rows, row]: `rows` is the dim that is sharded over `size` ranks, `outer` is the product of the dims
// before it, and `row_bytes` is the size of one row. The shard of rank i begins at row part_begin(rows, size, i). Each shard is split
// into `num_chunks` chunks by the same rule. Later shards and chunks may be shorter, or empty.
#pragma once

#include "index.h"

namespace ap {

struct Shards {
  int64_t outer, rows, row_bytes, size, rank, num_chunks;
};

struct Range {
  int64_t begin, length;
};

AP_HD inline bool is_valid(const Shards& s) {
  return s.outer >= 0 && s.rows >= 0 && s.row_bytes >= 0 && s.size > 0 && s.rank >= 0 && s.rank < s.size && s.num_chunks > 0;
}

// --- order -----------------------------------------------------------------------------------------------------------------------
// Gathering begins with the own shard, which is already local. The shards of the next ranks follow, so that no two ranks read the same peer
// at the same position.
AP_HD inline int64_t gathered_owner(const Shards& s, int64_t position) { return (s.rank + position) % s.size; }
// Scattering ends with the own shard, which needs no transfer: meanwhile the other shards are sent.
AP_HD inline int64_t scattered_owner(const Shards& s, int64_t position) { return (s.rank + 1 + position) % s.size; }

// --- rows ------------------------------------------------------------------------------------------------------------------------
AP_HD inline Range shard_of(const Shards& s, int64_t owner) {
  return Range{part_begin(s.rows, s.size, owner), part_length(s.rows, s.size, owner)};
}

// Rows of the chunk, relative to the beginning of its shard.
AP_HD inline Range chunk_of(const Shards& s, int64_t owner, int64_t chunk) {
  const int64_t length = shard_of(s, owner).length;
  return Range{part_begin(length, s.num_chunks, chunk), part_length(length, s.num_chunks, chunk)};
}

// --- blocks: `height` runs of `width` bytes, one per index of the outer dims -----------------------------------------------------
struct Block {
  int64_t in_shard, in_whole;        // offset of the first run, in bytes
  int64_t shard_pitch, whole_pitch;  // bytes from one run to the next
  int64_t width, height;
};

AP_HD inline Block block_of(const Shards& s, int64_t owner, int64_t chunk) {
  const Range shard = shard_of(s, owner), rows = chunk_of(s, owner, chunk);
  return Block{rows.begin * s.row_bytes, (shard.begin + rows.begin) * s.row_bytes, shard.length * s.row_bytes,
               s.rows * s.row_bytes,     rows.length * s.row_bytes,                s.outer};
}

// --- memory that peers access: two slots per use, which epochs use in turn; the slots of all ranks have the size of the largest shard --
constexpr int64_t kSlotAlignment = 128;

AP_HD inline int64_t slot_bytes(const Shards& s) {
  return ceil_div(s.outer * ceil_div(s.rows, s.size) * s.row_bytes, kSlotAlignment) * kSlotAlignment;
}
// Shared memory of all_gather_matmul: the own shard.
AP_HD inline int64_t source_offset(const Shards& s, uint64_t epoch) { return int64_t(epoch % 2) * slot_bytes(s); }
// Shared memory of matmul_reduce_scatter: one slot for each rank's part of the own rows, in order of the ranks.
AP_HD inline int64_t inbox_offset(const Shards& s, uint64_t epoch, int64_t from) {
  return (int64_t(epoch % 2) * s.size + from) * slot_bytes(s);
}

// --- flags: one word per 128 bytes, so that no two ranks write to the same cache line ----------------------------------------------------
constexpr int64_t kFlagWords = 16;

AP_HD inline int64_t own_flag() { return 0; }                            // from the rank to all its peers
AP_HD inline int64_t peer_flag(int64_t peer) { return (1 + peer) * kFlagWords; }  // from a peer to this rank
AP_HD inline int64_t chunk_flag(const Shards& s, int64_t position, int64_t chunk) {
  return (1 + s.size + position * s.num_chunks + chunk) * kFlagWords;  // between the two lanes of a rank
}
AP_HD inline int64_t num_flag_words(const Shards& s) { return (1 + s.size + s.size * s.num_chunks) * kFlagWords; }

}  // namespace ap
