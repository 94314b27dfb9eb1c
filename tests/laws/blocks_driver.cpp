// The copy lanes that are kernels of few blocks (include/blocks.h), each of their threads one of the host's, as ThreadSanitizer shall see
// them: `driver EPOCHS`. What the device has is defined here; the kernels' source is included as it is.
//
// Every rank runs its epochs at its own pace, held back by the signals alone. Exit status as of overlap_driver.cpp.

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#define AP_DEVICE
#define __global__ static
#define __device__
#define __launch_bounds__(...)
#define __grid_constant__
#define AP_LAUNCH(...) ((void)0)

struct Index {
  unsigned x = 0;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;
// Two that take turns: a thread that leaves one late would else seem to come after what others have signalled by arriving at the next.
static thread_local pthread_barrier_t* barriers = nullptr;
static thread_local unsigned turns = 0;
static void __syncthreads() { pthread_barrier_wait(&barriers[turns++ % 2]); }

namespace ap {
constexpr int64_t kMaxPitch = 64;
inline void stop() { std::_Exit(2); }  // what should have come is not there: nothing may read it
inline int copy_run(char*, const char*, int64_t, void*) { return 3; }
inline int copy_runs(char*, int64_t, const char*, int64_t, int64_t, int64_t, void*) { return 3; }
inline int launched() { return 3; }
}  // namespace ap

#include "all_gather_matmul.cu"
#include "matmul_reduce_scatter.cu"

extern "C" {
int ap_all_gather_matmul_publish_host(const void*, void*, void*, uint64_t*, ap::Shards, uint64_t);
int ap_all_gather_matmul_wait_host(const uint64_t*, ap::Shards, int64_t, int64_t, uint64_t);
int ap_matmul_reduce_scatter_produced_host(uint64_t*, ap::Shards, int64_t, int64_t, uint64_t);
int ap_matmul_reduce_scatter_arrive_host(const uint64_t*, ap::Shards, uint64_t);
}

namespace {

constexpr unsigned kBlocks = 3, kThreads = 32;
constexpr int64_t kRows = 11, kColumns = 1056;  // of four bytes: a chunk of one row is a turn of one warp and a bit
std::atomic<int> failed{0};

void check(int status, const char* what) {
  if (status == AP_OK) return;
  fprintf(stderr, "%s: status %d\n", what, status);
  std::_Exit(2);
}

void expect(int64_t found, int64_t wanted, const char* what) {
  if (found == wanted) return;
  fprintf(stderr, "%s: %ld, not %ld\n", what, long(found), long(wanted));
  failed = 1;
}

int32_t element(int64_t rank, int64_t epoch, int64_t row, int64_t column) { return int32_t(100000 * epoch + 10000 * rank + 500 * row + column); }

struct Memory {
  std::vector<std::vector<char>> data;
  std::vector<std::vector<uint64_t>> flags;
  ap::Peers peers{};
  ap::Signals signals{};

  Memory(const ap::Shards& s, int64_t num_bytes) {
    data.assign(size_t(s.size), std::vector<char>(size_t(num_bytes) + 16));
    flags.assign(size_t(s.size), std::vector<uint64_t>(size_t(ap::num_flag_words(s))));
    for (size_t rank = 0; rank < data.size(); ++rank) peers.at[rank] = data[rank].data(), signals.at[rank] = flags[rank].data();
  }
};

// The kernel's threads; `body` is what each of them runs.
template <class F> struct Kernel {
  F body;
  std::vector<pthread_barrier_t> pairs{2 * kBlocks};
  std::vector<std::thread> threads;

  explicit Kernel(F body_) : body(body_) {
    for (auto& one : pairs) pthread_barrier_init(&one, nullptr, kThreads);
    for (unsigned block = 0; block < kBlocks; ++block)
      for (unsigned thread = 0; thread < kThreads; ++thread)
        threads.emplace_back([this, block, thread] {
          threadIdx.x = thread, blockIdx.x = block, blockDim.x = kThreads, gridDim.x = kBlocks, barriers = &pairs[2 * block];
          body();
        });
  }
  ~Kernel() {
    for (auto& thread : threads) thread.join();
    for (auto& one : pairs) pthread_barrier_destroy(&one);
  }
};

void gather_epoch(const ap::Shards& s, Memory& memory, uint64_t epoch, std::vector<int32_t>& gathered) {
  const ap::Range own = ap::shard_of(s, s.rank);
  std::vector<int32_t> x;
  for (int64_t row = own.begin; row < own.begin + own.length; ++row)
    for (int64_t k = 0; k < kColumns; ++k) x.push_back(element(0, int64_t(epoch), row, k));
  char* const whole = reinterpret_cast<char*>(gathered.data());
  const Kernel kernel([&] { ap::ap_pull_kernel(ap::BlockLane{0}, s, whole, memory.peers, memory.signals, epoch); });
  check(ap_all_gather_matmul_publish_host(x.data(), memory.peers.at[s.rank], whole, memory.signals.at[s.rank], s, epoch), "publish");
  for (int64_t position = 0; position < s.size; ++position)
    for (int64_t chunk = 0; chunk < s.num_chunks; ++chunk) {
      if (position > 0) check(ap_all_gather_matmul_wait_host(memory.signals.at[s.rank], s, position, chunk, epoch), "wait");
      const int64_t owner = ap::gathered_owner(s, position);
      const ap::Range rows = ap::chunk_of(s, owner, chunk);
      for (int64_t row = ap::shard_of(s, owner).begin + rows.begin, end = row + rows.length; row < end; ++row)
        for (int64_t k = 0; k < kColumns; ++k) expect(gathered[size_t(row * kColumns + k)], element(0, int64_t(epoch), row, k), "gathered");
    }
}

void scatter_epoch(const ap::Shards& s, Memory& memory, uint64_t epoch, std::vector<int32_t>& product) {
  const char* const partial = reinterpret_cast<const char*>(product.data());
  const Kernel kernel([&] { ap::ap_push_kernel(ap::BlockLane{0}, s, partial, memory.peers, memory.signals, epoch); });
  uint64_t* const flags = memory.signals.at[s.rank];
  for (int64_t position = 0; position < s.size - 1; ++position)
    for (int64_t chunk = 0; chunk < s.num_chunks; ++chunk) {
      const int64_t owner = ap::scattered_owner(s, position);
      const ap::Range rows = ap::chunk_of(s, owner, chunk);
      for (int64_t row = ap::shard_of(s, owner).begin + rows.begin, end = row + rows.length; row < end; ++row)
        for (int64_t k = 0; k < kColumns; ++k) product[size_t(row * kColumns + k)] = element(s.rank, int64_t(epoch), row, k);
      check(ap_matmul_reduce_scatter_produced_host(flags, s, position, chunk, epoch), "produced");
    }
  check(ap_matmul_reduce_scatter_arrive_host(flags, s, epoch), "arrive");
  const ap::Range own = ap::shard_of(s, s.rank);
  for (int64_t peer = 0; peer < s.size; ++peer) {
    const int32_t* const slot = reinterpret_cast<const int32_t*>(memory.peers.at[s.rank] + ap::inbox_offset(s, epoch, peer));
    for (int64_t i = 0; peer != s.rank && i < own.length * kColumns; ++i)
      expect(slot[i], element(peer, int64_t(epoch), own.begin + i / kColumns, i % kColumns), "scattered");
  }
}

void run_world(int64_t size, int64_t num_chunks, uint64_t epochs) {
  const auto seen_by = [&](int64_t rank) { return ap::Shards{1, kRows, kColumns * 4, size, rank, num_chunks}; };
  Memory sources(seen_by(0), 2 * ap::slot_bytes(seen_by(0))), inboxes(seen_by(0), 2 * size * ap::slot_bytes(seen_by(0)));
  std::vector<std::thread> ranks;
  for (int64_t rank = 0; rank < size; ++rank)
    ranks.emplace_back([&, rank] {
      std::vector<int32_t> whole(size_t(kRows * kColumns));
      for (uint64_t epoch = 1; epoch <= epochs; ++epoch) gather_epoch(seen_by(rank), sources, epoch, whole);
      for (uint64_t epoch = 1; epoch <= epochs; ++epoch) scatter_epoch(seen_by(rank), inboxes, epoch, whole);
    });
  for (auto& rank : ranks) rank.join();
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t epochs = argc > 1 ? uint64_t(atoi(argv[1])) : 3;
  run_world(2, 3, epochs);
  run_world(3, 1, epochs);
  return failed;
}
