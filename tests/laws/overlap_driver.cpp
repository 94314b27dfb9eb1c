// Both protocols of the overlapped products with two threads per rank, as ThreadSanitizer shall see them: `driver EPOCHS`.
//
// Every rank runs its epochs at its own pace, held back by the signals alone; some are delayed. Integers throughout.
// Exit status: 0 all numbers are right, 1 some are wrong, 2 a step returned another status than AP_OK; ThreadSanitizer's own is 66.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "include/shards.h"

extern "C" {
int ap_all_gather_matmul_publish_host(const void*, void*, void*, uint64_t*, ap::Shards, uint64_t);
int ap_all_gather_matmul_pull_host(void*, const void* const*, uint64_t* const*, ap::Shards, uint64_t);
int ap_all_gather_matmul_wait_host(const uint64_t*, ap::Shards, int64_t, int64_t, uint64_t);
int ap_matmul_reduce_scatter_produced_host(uint64_t*, ap::Shards, int64_t, int64_t, uint64_t);
int ap_matmul_reduce_scatter_push_host(const void*, void* const*, uint64_t* const*, ap::Shards, uint64_t);
int ap_matmul_reduce_scatter_arrive_host(const uint64_t*, ap::Shards, uint64_t);
int ap_matmul_reduce_scatter_reduce_host(const void*, void*, int64_t, int32_t, ap::Shards, uint64_t);
}

namespace {

constexpr int64_t kRows = 11, kInner = 3, kColumns = 2;
std::atomic<int> failed{0};

void check(int status, const char* what) {
  if (status == AP_OK) return;
  fprintf(stderr, "%s: status %d\n", what, status);
  std::_Exit(2);  // what should have come is not there: nothing may read it
}

void expect(int64_t found, int64_t wanted, const char* what) {
  if (found == wanted) return;
  fprintf(stderr, "%s: %ld, not %ld\n", what, long(found), long(wanted));
  failed = 1;
}

void delay(int64_t rank, int64_t epoch) {
  if ((5 * rank + 3 * epoch) % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
}

int32_t element(int64_t epoch, int64_t row, int64_t column) { return int32_t(7 * epoch + 3 * row + column); }
int32_t partial(int64_t rank, int64_t epoch, int64_t row, int64_t column) { return element(epoch, row, column) * int32_t(rank + 1); }

// What all ranks reach.
struct Memory {
  std::vector<std::vector<char>> data;
  std::vector<std::vector<uint64_t>> flags;
  std::vector<void*> addresses;
  std::vector<uint64_t*> flag_addresses;

  Memory(const ap::Shards& s, int64_t num_bytes) {
    data.assign(size_t(s.size), std::vector<char>(size_t(num_bytes)));
    flags.assign(size_t(s.size), std::vector<uint64_t>(size_t(ap::num_flag_words(s))));
    for (auto& one : data) addresses.push_back(one.data());
    for (auto& one : flags) flag_addresses.push_back(one.data());
  }
};

void gather_epoch(const ap::Shards& s, Memory& memory, uint64_t epoch, std::vector<int32_t>& gathered) {
  const ap::Range own = ap::shard_of(s, s.rank);
  std::vector<int32_t> x;
  for (int64_t row = own.begin; row < own.begin + own.length; ++row)
    for (int64_t k = 0; k < kInner; ++k) x.push_back(element(int64_t(epoch), row, k));
  uint64_t* const flags = memory.flag_addresses[size_t(s.rank)];
  std::thread copy([&] {
    check(ap_all_gather_matmul_pull_host(gathered.data(), memory.addresses.data(), memory.flag_addresses.data(), s, epoch), "pull");
  });
  delay(s.rank, int64_t(epoch));
  check(ap_all_gather_matmul_publish_host(x.data(), memory.addresses[size_t(s.rank)], gathered.data(), flags, s, epoch), "publish");
  for (int64_t position = 0; position < s.size; ++position)
    for (int64_t chunk = 0; chunk < s.num_chunks; ++chunk) {
      if (position > 0) check(ap_all_gather_matmul_wait_host(flags, s, position, chunk, epoch), "wait");
      const int64_t owner = ap::gathered_owner(s, position);
      const ap::Range rows = ap::chunk_of(s, owner, chunk);
      for (int64_t row = ap::shard_of(s, owner).begin + rows.begin, end = row + rows.length; row < end; ++row) {
        int64_t sum = 0, wanted = 0;
        for (int64_t k = 0; k < kInner; ++k) sum += (k + 1) * gathered[size_t(row * kInner + k)];
        for (int64_t k = 0; k < kInner; ++k) wanted += (k + 1) * element(int64_t(epoch), row, k);
        expect(sum, wanted, "gathered product");
      }
    }
  copy.join();
}

void scatter_epoch(const ap::Shards& s, Memory& memory, uint64_t epoch, std::vector<int32_t>& product) {
  uint64_t* const flags = memory.flag_addresses[size_t(s.rank)];
  char* const inbox = static_cast<char*>(memory.addresses[size_t(s.rank)]);
  const ap::Range own = ap::shard_of(s, s.rank);
  std::thread copy([&] {
    check(ap_matmul_reduce_scatter_push_host(product.data(), memory.addresses.data(), memory.flag_addresses.data(), s, epoch), "push");
  });
  for (int64_t position = 0; position < s.size; ++position)
    for (int64_t chunk = 0; chunk < s.num_chunks; ++chunk) {
      const int64_t owner = ap::scattered_owner(s, position);
      const bool is_mine = owner == s.rank;
      const ap::Range shard = ap::shard_of(s, owner), rows = ap::chunk_of(s, owner, chunk);
      int32_t* const to = is_mine ? reinterpret_cast<int32_t*>(inbox + ap::inbox_offset(s, epoch, s.rank)) : product.data();
      delay(s.rank, int64_t(epoch) + chunk);
      for (int64_t row = rows.begin; row < rows.begin + rows.length; ++row)
        for (int64_t m = 0; m < kColumns; ++m)
          to[(row + (is_mine ? 0 : shard.begin)) * kColumns + m] = partial(s.rank, int64_t(epoch), shard.begin + row, m);
      if (!is_mine) check(ap_matmul_reduce_scatter_produced_host(flags, s, position, chunk, epoch), "produced");
    }
  std::vector<int32_t> out(size_t(own.length * kColumns));
  check(ap_matmul_reduce_scatter_arrive_host(flags, s, epoch), "arrive");
  check(ap_matmul_reduce_scatter_reduce_host(inbox, out.data(), int64_t(out.size()), AP_I32, s, epoch), "reduce");
  for (int64_t row = 0; row < own.length; ++row)
    for (int64_t m = 0; m < kColumns; ++m) {
      int64_t wanted = 0;
      for (int64_t rank = 0; rank < s.size; ++rank) wanted += partial(rank, int64_t(epoch), own.begin + row, m);
      expect(out[size_t(row * kColumns + m)], wanted, "scattered sum");
    }
  copy.join();
}

void run_world(int64_t size, int64_t num_chunks, uint64_t epochs) {
  const auto seen_by = [&](int64_t rank, int64_t columns) { return ap::Shards{1, kRows, columns * 4, size, rank, num_chunks}; };
  const ap::Shards gathering = seen_by(0, kInner), scattering = seen_by(0, kColumns);
  Memory sources(gathering, 2 * ap::slot_bytes(gathering)), inboxes(scattering, 2 * size * ap::slot_bytes(scattering));
  std::vector<std::thread> ranks;
  for (int64_t rank = 0; rank < size; ++rank)
    ranks.emplace_back([&, rank] {
      std::vector<int32_t> gathered(size_t(kRows * kInner)), product(size_t(kRows * kColumns));
      // One protocol after the other: alternating, each would keep the ranks together for the other.
      for (uint64_t epoch = 1; epoch <= epochs; ++epoch) gather_epoch(seen_by(rank, kInner), sources, epoch, gathered);
      for (uint64_t epoch = 1; epoch <= epochs; ++epoch) scatter_epoch(seen_by(rank, kColumns), inboxes, epoch, product);
    });
  for (auto& rank : ranks) rank.join();
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t epochs = argc > 1 ? uint64_t(atoi(argv[1])) : 20;
  for (const int64_t size : {1, 2, 3, 5, 8})
    for (const int64_t num_chunks : {1, 3}) run_world(size, num_chunks, epochs);
  return failed;
}
