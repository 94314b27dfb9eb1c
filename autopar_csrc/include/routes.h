// Index maps of dispatch and combine: the destination of each token's row, and the place to which it returns.
//
// A rank's *pairs* are its (token, choice) in order: pair p is choice p % choices of token p / choices. `table` [size, num_experts] is the
// number of pairs that each rank sends to each expert. The *home* of expert e is rank e / (num_experts / size). The table determines two
// orders of rows:
//   sorted, on the sender      by expert, then by pair: stable
//   received, on the receiver  by expert, then by sender, then by pair: the rows of an expert are contiguous
#pragma once

#include "index.h"
#include "peers.h"

namespace ap {

struct Routes {
  int64_t tokens, choices, row_bytes, num_experts, size, rank, most;  // most: the maximum number of pairs of any rank
};

inline bool is_valid(const Routes& r) {
  return r.tokens >= 0 && r.choices > 0 && r.row_bytes >= 0 && r.size > 0 && r.rank >= 0 && r.rank < r.size && r.num_experts > 0 &&
         r.num_experts % r.size == 0 && r.tokens * r.choices <= r.most;
}

AP_HD inline int64_t num_pairs(const Routes& r) { return r.tokens * r.choices; }
AP_HD inline int64_t experts_per_rank(const Routes& r) { return r.num_experts / r.size; }
AP_HD inline int64_t home_of(const Routes& r, int64_t expert) { return expert / experts_per_rank(r); }
AP_HD inline int64_t count_of(const Routes& r, const int64_t* table, int64_t sender, int64_t expert) {
  return table[sender * r.num_experts + expert];
}

// The sorted place of the sender's first row for this expert.
AP_HD inline int64_t sorted_begin(const Routes& r, const int64_t* table, int64_t sender, int64_t expert) {
  int64_t begin = 0;
  for (int64_t e = 0; e < expert; ++e) begin += count_of(r, table, sender, e);
  return begin;
}

// The place at the expert's home at which the sender's first row for this expert is received. With expert == the home's last expert + 1
// and sender == 0: the number of rows that the home receives (`home` is its rank).
AP_HD inline int64_t received_begin(const Routes& r, const int64_t* table, int64_t home, int64_t sender, int64_t expert) {
  int64_t begin = 0;
  for (int64_t e = home * experts_per_rank(r); e < expert; ++e)
    for (int64_t s = 0; s < r.size; ++s) begin += count_of(r, table, s, e);
  for (int64_t s = 0; s < sender; ++s) begin += count_of(r, table, s, expert);
  return begin;
}
AP_HD inline int64_t num_received(const Routes& r, const int64_t* table, int64_t home) {
  return received_begin(r, table, home, 0, (home + 1) * experts_per_rank(r));
}

// --- memory that peers access --------------------------------------------------------------------------------------------------------
AP_HD inline int64_t in_lines(int64_t num_bytes) { return ceil_div(num_bytes, 128) * 128; }
// dispatch: the table, then the rows
AP_HD inline int64_t rows_offset(const Routes& r) { return in_lines(r.size * r.num_experts * 8); }
AP_HD inline int64_t dispatch_bytes(const Routes& r) { return rows_offset(r) + in_lines(r.size * r.most * r.row_bytes); }
// combine: two slots for the rank's own rows, sorted
AP_HD inline int64_t returned_offset(const Routes& r, uint64_t epoch) { return int64_t(epoch % 2) * in_lines(r.most * r.row_bytes); }
AP_HD inline int64_t combine_bytes(const Routes& r) { return 2 * in_lines(r.most * r.row_bytes); }

// expert_rows: one region for counts, and for each transfer one region for received rows and one for returned rows, sorted
AP_HD inline int64_t counts_bytes(const Routes& r) { return in_lines(r.size * r.num_experts * 8); }
AP_HD inline int64_t received_bytes(const Routes& r) { return in_lines(r.size * r.most * r.row_bytes); }
AP_HD inline int64_t sorted_bytes(const Routes& r) { return in_lines(r.most * r.row_bytes); }
// the only flags of expert_rows, each in a separate cache line: "the peer's writes have arrived"
AP_HD inline int64_t come_flag(int64_t peer) { return peer * 16; }
AP_HD inline int64_t num_come_flags(const Routes& r) { return r.size * 16; }

// Flags, each in a separate cache line: "the peer's counts have arrived", "the peer's rows have arrived".
AP_HD inline int64_t counts_flag(int64_t peer) { return peer * 16; }
AP_HD inline int64_t rows_flag(const Routes& r, int64_t peer) { return (r.size + peer) * 16; }
AP_HD inline int64_t num_route_flags(const Routes& r) { return 2 * r.size * 16; }

// --- the work of one thread on one row, pair, block or group ---------------------------------------------------------------------------
inline bool can_run(const Routes& r, uint64_t epoch) { return is_valid(r) && r.size <= kMaxRanks && epoch > 0; }

// Copies a row with `lanes` threads, of which this is thread `lane`; with 16-byte accesses if possible.
AP_HD inline void copy_row(char* to, const char* from, int64_t num_bytes, int64_t lane, int64_t lanes) {
#ifdef AP_ON_DEVICE
  if (is_aligned(to) && is_aligned(from) && num_bytes % 16 == 0) {
    for (int64_t i = lane; i < num_bytes / 16; i += lanes) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    return;
  }
  for (int64_t i = lane; i < num_bytes; i += lanes) to[i] = from[i];
#else
  if (lane == 0) memcpy(to, from, size_t(num_bytes));
  (void)lanes;
#endif
}

// Writes the row of pair p to its place at its home. offsets [2 · num_experts + 1]: see fill_offsets.
AP_HD inline void push_pair(const Routes& r, const char* x, const int64_t* experts, const int64_t* within, const int64_t* offsets,
                            const Peers& homes, int64_t* position, int64_t p, int64_t lane, int64_t lanes) {
  const int64_t expert = experts[p];
  if (lane == 0) position[p] = offsets[r.num_experts + expert] + within[p];
  char* const to = homes.at[home_of(r, expert)] + rows_offset(r) + (offsets[expert] + within[p]) * r.row_bytes;
  copy_row(to, x + p / r.choices * r.row_bytes, r.row_bytes, lane, lanes);
}

// For each expert: the place at which this rank's first row is received, and its sorted place. The last entry is the number of rows that
// this rank receives.
AP_HD inline void fill_offsets(const Routes& r, const int64_t* table, int64_t* offsets, int64_t expert) {
  offsets[expert] = received_begin(r, table, home_of(r, expert), r.rank, expert);
  offsets[r.num_experts + expert] = sorted_begin(r, table, r.rank, expert);
  if (expert == 0) offsets[2 * r.num_experts] = num_received(r, table, r.rank);
}

AP_HD inline void collect_row(const Routes& r, const char* inbox, char* rows, int64_t received, int64_t row, int64_t lane, int64_t lanes) {
  char* const to = rows + row * r.row_bytes;
  if (row < received) return copy_row(to, inbox + rows_offset(r) + row * r.row_bytes, r.row_bytes, lane, lanes);
  for (int64_t i = lane; i < r.row_bytes; i += lanes) to[i] = 0;
}

// Writes this rank's rows for one expert to their places at its home; the row of the pair at sorted place i is x[index[i]].
AP_HD inline void push_block(const Routes& r, const char* x, const int64_t* index, const int64_t* table, const Peers& homes, int64_t expert,
                             int64_t first, int64_t step, int64_t lane, int64_t lanes) {
  const int64_t count = count_of(r, table, r.rank, expert), home = home_of(r, expert);
  if (first >= count) return;
  const int64_t* const from = index + sorted_begin(r, table, r.rank, expert);
  char* const to = homes.at[home] + received_begin(r, table, home, r.rank, expert) * r.row_bytes;
  for (int64_t i = first; i < count; i += step) copy_row(to + i * r.row_bytes, x + from[i] * r.row_bytes, r.row_bytes, lane, lanes);
}

// Writes back the rows from one sender for one of this rank's experts. `block` is sender + size · (the expert's index on this rank), and
// `offset` is the offset of the sorted rows in the senders' memory.
AP_HD inline void return_block(const Routes& r, const char* rows, const int64_t* table, const Peers& senders, int64_t offset, int64_t block,
                               int64_t first, int64_t step, int64_t lane, int64_t lanes) {
  const int64_t sender = block % r.size, expert = r.rank * experts_per_rank(r) + block / r.size;
  const int64_t count = count_of(r, table, sender, expert);
  if (first >= count) return;
  const char* const from = rows + received_begin(r, table, r.rank, sender, expert) * r.row_bytes;
  char* const to = senders.at[sender] + offset + sorted_begin(r, table, sender, expert) * r.row_bytes;
  for (int64_t i = first; i < count; i += step) copy_row(to + i * r.row_bytes, from + i * r.row_bytes, r.row_bytes, lane, lanes);
}

template <class T> using WideOf = typename Wide<T>::type;

template <class T>
AP_HD inline void sum_group(const T* returned, const int64_t* position, const WideOf<T>* weights, T* y, int64_t choices,
                            int64_t width, int64_t token, int64_t begin) {
  using W = WideOf<T>;
  W total[kGroup], part[kGroup];
  const int64_t count = width - begin;
  const auto load = [&](int64_t pair, W out[kGroup]) {
    load_group<W, T>(returned + position[pair] * width + begin, count, out);
    for (int i = 0; i < kGroup; ++i) out[i] *= weights[pair];
  };
  load(token * choices, total);
  for (int64_t c = 1; c < choices; ++c) {
    load(token * choices + c, part);
    for (int i = 0; i < kGroup; ++i) total[i] += part[i];
  }
  store_group<W, T>(y + token * width + begin, count, total);
}

}  // namespace ap
