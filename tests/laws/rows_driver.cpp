// Steps of experts' rows with a thread per rank, as ThreadSanitizer shall see them: `driver EPOCHS [late]`.
//
// Every rank runs its steps at its own pace, held back by the signals alone; some are delayed. With `late` a rank looks at the rows
// that came once more after it has announced its next step, as it must not. Exit status as of overlap_driver.cpp.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "include/common.h"
#include "include/routes.h"

extern "C" {
int ap_expert_rows_announce_host(const int64_t*, void* const*, uint64_t* const*, ap::Routes, uint64_t);
int ap_expert_rows_table_host(int64_t*, void* const*, uint64_t* const*, ap::Routes, uint64_t);
int ap_expert_rows_push_host(const void*, const int64_t*, const int64_t*, void* const*, uint64_t* const*, ap::Routes, uint64_t);
int ap_expert_rows_return_host(const void*, const int64_t*, void* const*, uint64_t* const*, ap::Routes, uint64_t);
int ap_expert_rows_await_host(void* const*, uint64_t* const*, ap::Routes, uint64_t);
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
int64_t expert_of(const ap::Routes& r, int64_t rank, int64_t pair, int64_t epoch) {
  return (3 * rank + 5 * pair * pair + epoch * pair) % r.num_experts;
}
float element(int64_t rank, int64_t token, int64_t epoch, int64_t i) { return float(1 + 100 * rank + 10 * token + epoch % 9 + i); }

// What all ranks reach of one name.
struct Memory {
  std::vector<std::vector<char>> data;
  std::vector<std::vector<uint64_t>> flags;
  std::vector<void*> addresses;
  std::vector<uint64_t*> flag_addresses;

  Memory(const ap::Routes& r, int64_t num_bytes) {
    data.assign(size_t(r.size), std::vector<char>(size_t(num_bytes)));
    flags.assign(size_t(r.size), std::vector<uint64_t>(size_t(ap::num_come_flags(r))));
    for (auto& one : data) addresses.push_back(one.data());
    for (auto& one : flags) flag_addresses.push_back(one.data());
  }
  void* const* at() const { return addresses.data(); }
  uint64_t* const* signals() const { return flag_addresses.data(); }
  const float* of(int64_t rank) const { return reinterpret_cast<const float*>(data[size_t(rank)].data()); }
};

struct World {
  Memory counts, rows, back;
  explicit World(const ap::Routes& r) : counts(r, ap::counts_bytes(r)), rows(r, ap::received_bytes(r)), back(r, ap::sorted_bytes(r)) {}
};

// The rows that came, by expert, sender and pair, and what is made of them: read where they lie.
std::vector<float> made_of(const ap::Routes& r, const World& world, int64_t epoch) {
  std::vector<float> made;
  const float* at = world.rows.of(r.rank);
  for (int64_t e = r.rank * kExpertsPerRank; e < (r.rank + 1) * kExpertsPerRank; ++e)
    for (int64_t sender = 0; sender < r.size; ++sender)
      for (int64_t p = 0; p < tokens_of(sender) * kChoices; ++p)
        if (expert_of(r, sender, p, epoch) == e)
          for (int64_t i = 0; i < kWidth; ++i, ++at) {
            expect(*at, element(sender, p / kChoices, epoch, i), "row that came");
            made.push_back(*at + float(e));
          }
  return made;
}

// What came back, of the pairs sorted by expert: read where it lies.
void expect_back(const ap::Routes& r, const World& world, int64_t epoch) {
  const float* at = world.back.of(r.rank);
  for (int64_t e = 0; e < r.num_experts; ++e)
    for (int64_t p = 0; p < tokens_of(r.rank) * kChoices; ++p)
      if (expert_of(r, r.rank, p, epoch) == e)
        for (int64_t i = 0; i < kWidth; ++i) expect(*at++, element(r.rank, p / kChoices, epoch, i) + float(e), "row that came back");
}

void step(const ap::Routes& r, const World& world, int64_t epoch, bool late) {
  const uint64_t now = uint64_t(epoch);
  const int64_t pairs = tokens_of(r.rank) * kChoices;
  std::vector<int64_t> counts(size_t(r.num_experts)), table(size_t(r.size * r.num_experts)), index;
  std::vector<float> x(size_t(tokens_of(r.rank) * kWidth));
  for (int64_t i = 0; i < int64_t(x.size()); ++i) x[size_t(i)] = element(r.rank, i / kWidth, epoch, i % kWidth);
  for (int64_t e = 0; e < r.num_experts; ++e)
    for (int64_t p = 0; p < pairs; ++p)
      if (expert_of(r, r.rank, p, epoch) == e) ++counts[size_t(e)], index.push_back(p / kChoices);
  delay(r.rank, epoch);
  check(ap_expert_rows_announce_host(counts.data(), world.counts.at(), world.counts.signals(), r, now), "announce");
  if (late && epoch > 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    made_of(r, world, epoch - 1);
  }
  check(ap_expert_rows_table_host(table.data(), world.counts.at(), world.counts.signals(), r, now), "table");
  delay(r.rank, epoch + 1);
  check(ap_expert_rows_push_host(x.data(), index.data(), table.data(), world.rows.at(), world.rows.signals(), r, now), "push");
  check(ap_expert_rows_await_host(world.rows.at(), world.rows.signals(), r, now), "await rows");
  const std::vector<float> made = made_of(r, world, epoch);
  delay(r.rank, epoch + 2);
  check(ap_expert_rows_return_host(made.data(), table.data(), world.back.at(), world.back.signals(), r, now), "return");
  check(ap_expert_rows_await_host(world.back.at(), world.back.signals(), r, now), "await results");
  delay(r.rank, epoch + 3);
  expect_back(r, world, epoch);
}

void run_world(int64_t size, int64_t epochs, bool late) {
  const auto seen_by = [&](int64_t rank) { return ap::Routes{0, 1, kWidth * 4, kExpertsPerRank * size, size, rank, 4 * kChoices}; };
  World world(seen_by(0));
  std::vector<std::thread> ranks;
  for (int64_t rank = 0; rank < size; ++rank)
    ranks.emplace_back([&, rank] {
      for (int64_t epoch = 1; epoch <= epochs; ++epoch) step(seen_by(rank), world, epoch, late);
    });
  for (auto& rank : ranks) rank.join();
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t epochs = argc > 1 ? atoi(argv[1]) : 20;
  const bool late = argc > 2 && !strcmp(argv[2], "late");
  for (const int64_t size : {1, 2, 3, 5, 8}) run_world(size, epochs, late);
  return failed;
}
