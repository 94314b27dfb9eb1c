// Dispatch and combine with a thread per rank, as ThreadSanitizer shall see them: `driver EPOCHS`.
//
// Every rank runs its epochs at its own pace, held back by the signals alone; some are delayed. First only dispatches, then only combines:
// taking turns, each would keep the ranks together for the other. Exit status as of overlap_driver.cpp.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "include/common.h"
#include "include/routes.h"

extern "C" {
int ap_moe_dispatch_announce_host(const int64_t*, int64_t*, int64_t*, void* const*, uint64_t* const*, ap::Routes, uint64_t);
int ap_moe_dispatch_push_host(const void*, const int64_t*, const int64_t*, int64_t*, int64_t*, int64_t*, void* const*, uint64_t* const*,
                              ap::Routes, uint64_t);
int ap_moe_dispatch_collect_host(const int64_t*, void*, void* const*, uint64_t* const*, ap::Routes, uint64_t);
int ap_moe_combine_push_host(const void*, const int64_t*, void* const*, uint64_t* const*, ap::Routes, uint64_t);
int ap_moe_combine_sum_host(const int64_t*, const void*, void*, void*, int32_t, void* const*, uint64_t* const*, ap::Routes, uint64_t);
}

namespace {

constexpr int64_t kChoices = 2, kWidth = 3, kExpertsPerRank = 2;
std::atomic<int> failed{0};

void check(int status, const char* what) {
  if (status == AP_OK) return;
  fprintf(stderr, "%s: status %d\n", what, status);
  std::_Exit(2);  // what should have come is not there: nothing may read it
}

void expect(float found, float wanted, const char* what) {
  if (found == wanted) return;
  fprintf(stderr, "%s: %g, not %g\n", what, double(found), double(wanted));
  failed = 1;
}

void delay(int64_t rank, int64_t epoch) {
  if ((5 * rank + 3 * epoch) % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
}

int64_t tokens_of(int64_t rank) { return 1 + rank % 4; }
int64_t expert_of(const ap::Routes& r, int64_t rank, int64_t pair, int64_t epoch) { return (3 * rank + 5 * pair * pair + epoch * pair) % r.num_experts; }
float element(int64_t rank, int64_t token, int64_t epoch, int64_t i) { return float(1 + 100 * rank + 10 * token + epoch % 9 + i); }

ap::Routes seen_by(int64_t rank, int64_t size) {
  return ap::Routes{tokens_of(rank), kChoices, kWidth * 4, kExpertsPerRank * size, size, rank, 4 * kChoices};
}

// What all ranks reach.
struct Memory {
  std::vector<std::vector<char>> data;
  std::vector<std::vector<uint64_t>> flags;
  std::vector<void*> addresses;
  std::vector<uint64_t*> flag_addresses;

  Memory(const ap::Routes& r, int64_t num_bytes) {
    data.assign(size_t(r.size), std::vector<char>(size_t(num_bytes)));
    flags.assign(size_t(r.size), std::vector<uint64_t>(size_t(ap::num_route_flags(r))));
    for (auto& one : data) addresses.push_back(one.data());
    for (auto& one : flags) flag_addresses.push_back(one.data());
  }
};

// A rank's own buffers.
struct Rank {
  std::vector<int64_t> experts, counts, within, table, offsets, position;
  std::vector<float> x, rows, weights, returned, y;

  explicit Rank(const ap::Routes& r)
      : experts(size_t(ap::num_pairs(r))), counts(size_t(r.num_experts)), within(experts.size()), table(size_t(r.size * r.num_experts)),
        offsets(size_t(2 * r.num_experts + 1)), position(experts.size()), x(size_t(r.tokens * kWidth)), rows(size_t(r.size * r.most * kWidth)),
        weights(experts.size()), returned(experts.size() * kWidth), y(x.size()) {}
};

void dispatch_epoch(const ap::Routes& r, Rank& own, Memory& memory, int64_t epoch) {
  for (int64_t p = 0; p < ap::num_pairs(r); ++p) own.experts[size_t(p)] = expert_of(r, r.rank, p, epoch);
  for (int64_t i = 0; i < r.tokens * kWidth; ++i) own.x[size_t(i)] = element(r.rank, i / kWidth, epoch, i % kWidth);
  void* const* data = memory.addresses.data();
  uint64_t* const* flags = memory.flag_addresses.data();
  delay(r.rank, epoch);
  check(ap_moe_dispatch_announce_host(own.experts.data(), own.counts.data(), own.within.data(), data, flags, r, uint64_t(epoch)), "announce");
  delay(r.rank, epoch + 1);
  check(ap_moe_dispatch_push_host(own.x.data(), own.experts.data(), own.within.data(), own.table.data(), own.offsets.data(),
                                  own.position.data(), data, flags, r, uint64_t(epoch)), "push");
  check(ap_moe_dispatch_collect_host(own.offsets.data(), own.rows.data(), data, flags, r, uint64_t(epoch)), "collect");
  size_t place = 0;
  for (int64_t e = r.rank * kExpertsPerRank; e < (r.rank + 1) * kExpertsPerRank; ++e)
    for (int64_t sender = 0; sender < r.size; ++sender)
      for (int64_t p = 0; p < tokens_of(sender) * kChoices; ++p)
        if (expert_of(r, sender, p, epoch) == e)
          for (int64_t i = 0; i < kWidth; ++i) expect(own.rows[place++], element(sender, p / kChoices, epoch, i), "dispatched row");
  while (place < own.rows.size()) expect(own.rows[place++], 0, "row behind those received");
}

// The experts give what they got in the last dispatch, plus the epoch.
void combine_epoch(const ap::Routes& r, Rank& own, Memory& memory, int64_t epoch, int64_t last) {
  std::vector<float> rows = own.rows;
  for (auto& value : rows) value += float(epoch);
  for (size_t p = 0; p < own.weights.size(); ++p) own.weights[p] = float(1 + p % 3);
  void* const* data = memory.addresses.data();
  uint64_t* const* flags = memory.flag_addresses.data();
  delay(r.rank, epoch);
  check(ap_moe_combine_push_host(rows.data(), own.table.data(), data, flags, r, uint64_t(epoch)), "combine's push");
  delay(r.rank, epoch + 1);
  check(ap_moe_combine_sum_host(own.position.data(), own.weights.data(), own.returned.data(), own.y.data(), AP_F32, data, flags, r,
                                uint64_t(epoch)), "sum");
  for (int64_t t = 0; t < r.tokens; ++t)
    for (int64_t i = 0; i < kWidth; ++i) {
      float wanted = 0;
      for (int64_t c = 0; c < kChoices; ++c) wanted += own.weights[size_t(t * kChoices + c)] * (element(r.rank, t, last, i) + float(epoch));
      expect(own.y[size_t(t * kWidth + i)], wanted, "combined row");
    }
}

void run_world(int64_t size, int64_t epochs) {
  const ap::Routes any = seen_by(0, size);
  Memory inboxes(any, ap::dispatch_bytes(any)), returns(any, ap::combine_bytes(any));
  std::vector<std::thread> ranks;
  for (int64_t rank = 0; rank < size; ++rank)
    ranks.emplace_back([&, rank] {
      const ap::Routes r = seen_by(rank, size);
      Rank own(r);
      for (int64_t epoch = 1; epoch <= epochs; ++epoch) dispatch_epoch(r, own, inboxes, epoch);
      for (int64_t epoch = 1; epoch <= epochs; ++epoch) combine_epoch(r, own, returns, epoch, epochs);
    });
  for (auto& rank : ranks) rank.join();
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t epochs = argc > 1 ? atoi(argv[1]) : 20;
  for (const int64_t size : {1, 2, 3, 5, 8}) run_world(size, epochs);
  return failed;
}
