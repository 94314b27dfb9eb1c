// Addresses of all ranks' memory and flags, passed to a kernel by value.
#pragma once

#include "common.h"

namespace ap {

constexpr int64_t kMaxRanks = 64;

struct Peers {
  char* at[kMaxRanks];
};
struct Signals {
  uint64_t* at[kMaxRanks];
};

inline Peers peers_at(int64_t size, void* const* addresses) {
  Peers peers{};
  for (int64_t rank = 0; rank < size; ++rank) peers.at[rank] = static_cast<char*>(addresses[rank]);
  return peers;
}

inline Signals signals_at(int64_t size, uint64_t* const* flags) {
  Signals signals{};
  for (int64_t rank = 0; rank < size; ++rank) signals.at[rank] = flags[rank];
  return signals;
}

}  // namespace ap
