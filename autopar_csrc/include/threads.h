// Threads of the host path. Each thread gets one contiguous range of items, so that its work never depends on timing.
#pragma once

#include <thread>
#include <vector>

#include "index.h"

namespace ap {

// Calls work(item) for every item. The thread of an item depends only on the arguments. The start of a thread costs as much as some ten
// thousand elements, so at most ceil(num_items / grain) threads are used.
template <class Work> inline void for_each_item(int64_t num_items, int num_threads, const Work& work, int64_t grain = 1) {
  const int64_t threads = min_of(num_threads < 1 ? 1 : num_threads, ceil_div(num_items, grain));
  const auto run = [&](int64_t thread) {
    const int64_t begin = part_begin(num_items, threads, thread), end = part_begin(num_items, threads, thread + 1);
    for (int64_t item = begin; item < end; ++item) work(item);
  };
  std::vector<std::thread> others;
  for (int64_t thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
  if (threads > 0) run(0);
  for (auto& other : others) other.join();
}

}  // namespace ap
