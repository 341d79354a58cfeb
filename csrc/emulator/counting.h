// What a launch did: how often warps went through each word, what moved between which memories, wavefronts of shared memory.
#pragma once

#include <array>
#include <tuple>

#include "launch.h"
#include "wavefronts.h"

namespace tileops {
namespace emulator {

// The n-th time that each lane of a warp comes to a word's place in the text is taken for one instruction of the warp. One that
// loads what another at that place loaded, with no store and no barrier between, is none: the compiler keeps the values.
class Counting final : public Launch {
 public:
  using Launch::Launch;

  struct Count { int64_t instructions = 0, wavefronts = 0, least = 0; };
  std::map<std::pair<std::string, int>, Count> words;  // by word and site
  Bytes shared_by_threads, shared_by_copy_async, shared_by_wgmma, global_by_copy_async;

  // After the launch.
  void finish() {
    close_cluster();
    for_each_use([&](const Use& u) {
      Count& total = words[{u.word, u.site}];
      total.instructions += u.count.instructions;
      total.wavefronts += u.count.wavefronts;
      total.least += u.count.least;
    });
  }
  // Up to the last byte of a CTA that anything accessed.
  int64_t peak_shared_bytes() const {
    int64_t peak = 0;
    for (const Cta& c : ctas_) peak = std::max(peak, c.shared.peak);
    return peak;
  }

  void* access_global(const void* origin, int64_t byte_offset, int element, int count, bool write, int site) override {
    const char* word = write ? "store_global" : "load_global";
    for (int bytes = element * count; bytes > 0; bytes -= 16) use(word, site, write);
    return Launch::access_global(origin, byte_offset, element, count, write, site);
  }
  // Accesses of shared memory count once they were found to lie inside it: elsewhere are no banks.
  void* access_shared(int64_t at, int bytes, bool write, int of_rank, int site) override {
    void* place = Launch::access_shared(at, bytes, write, of_rank, site);
    if (of_rank >= 0) {
      use(write ? "store_shared_of_rank" : "load_shared_of_rank", site);
    } else {
      (write ? shared_by_threads.written : shared_by_threads.read) += bytes;
      use_shared(write ? "store_shared" : "load_shared", at, bytes, !write, site);
    }
    return place;
  }
  void matrices(int64_t row, uint16_t* values, int count, bool transposed, bool write, int site) override {
    Launch::matrices(row, values, count, transposed, write, site);
    const bool points = thread % 32 < count * 8;
    if (points) (write ? shared_by_threads.written : shared_by_threads.read) += 16;
    use_shared(write ? "store_matrix" : "load_matrix", points ? row : kNowhere, 16, false, site);
  }
  void copy_async(int64_t offset, const void* origin, int64_t from, int bytes, int read, int site) override {
    use("copy_async", site);
    shared_by_copy_async.written += bytes;
    global_by_copy_async.read += read;
    Launch::copy_async(offset, origin, from, bytes, read, site);
  }
  // An operand counts once, although each warp of the group reads all of B.
  void wgmma(const Product& p, int site) override {
    use("wgmma", site);
    if (thread % 128 == 0) shared_by_wgmma.read += (p.n + (p.a_registers ? 0 : 64)) * 32;
    Launch::wgmma(p, site);
  }

  void sync_threads(int site) override {
    use("sync_threads", site);
    Launch::sync_threads(site);
  }
  void named_barrier(int id, int threads, bool waits, int site) override {
    use(waits ? "named_barrier_sync" : "named_barrier_arrive", site);
    Launch::named_barrier(id, threads, waits, site);
  }
  uint32_t warp(WarpWord word, uint32_t value, int argument, int site) override {
    static constexpr const char* kWords[] = {"shuffle_xor", "shuffle", "all_of_warp", "any_of_warp", "ballot_of_warp",
                                             "elect_one", "sync_warp"};
    use(kWords[static_cast<int>(word)], site, word == WarpWord::sync);
    return Launch::warp(word, value, argument, site);
  }
  void register_budget(int registers, bool increase, int site) override {
    use(increase ? "register_budget_increase" : "register_budget_decrease", site);
    Launch::register_budget(registers, increase, site);
  }
  void mma(float* d, const float* a, const float* b, int site) override {
    use("mma", site, false);
    Launch::mma(d, a, b, site);
  }
  void init_barrier(int64_t offset, int arrivals, int site) override {
    use("init_barrier", site);
    Launch::init_barrier(offset, arrivals, site);
  }
  void fence_barrier_init(int site) override {
    use("fence_barrier_init", site);
    Launch::fence_barrier_init(site);
  }
  void arrive(int64_t offset, int of_rank, bool expects, int bytes, int site) override {
    use(expects ? "arrive_expect_bytes" : of_rank >= 0 ? "arrive_at_rank" : "arrive", site);
    Launch::arrive(offset, of_rank, expects, bytes, site);
  }
  bool wait(int64_t offset, uint32_t parity, bool cluster_wide, bool blocks, int site) override {
    use(!blocks ? "test_wait" : cluster_wide ? "wait_cluster" : "wait", site);
    return Launch::wait(offset, parity, cluster_wide, blocks, site);
  }
  void fence_async(bool shared, int site) override {
    use(shared ? "fence_async_shared" : "fence_async_global", site);
    Launch::fence_async(shared, site);
  }
  void cluster_arrive(int site) override {
    use("cluster_arrive", site);
    Launch::cluster_arrive(site);
  }
  void cluster_wait(int site) override {
    use("cluster_wait", site);
    Launch::cluster_wait(site);
  }
  void load_box(int64_t offset, const Box& box, int64_t barrier, uint32_t ctas, bool multicast, int site) override {
    use(multicast ? "tma_load_multicast" : "tma_load", site);
    Launch::load_box(offset, box, barrier, ctas, multicast, site);
  }
  void store_box(int64_t offset, const Box& box, Direction direction, int site) override {
    use(direction == Direction::add ? "tma_reduce_add" : "tma_store", site);
    Launch::store_box(offset, box, direction, site);
  }
  void bulk_load(int64_t offset, const void* origin, int64_t at, int bytes, int64_t barrier, int site) override {
    use("bulk_load", site);
    Launch::bulk_load(offset, origin, at, bytes, barrier, site);
  }
  void bulk_store(int64_t offset, void* origin, int64_t at, int bytes, int site) override {
    use("bulk_store", site);
    Launch::bulk_store(offset, origin, at, bytes, site);
  }
  void store_commit(int site) override {
    use("store_commit", site);
    Launch::store_commit(site);
  }
  void store_wait(int pending, bool read_only, int site) override {
    use(read_only ? "store_wait_read" : "store_wait", site);
    Launch::store_wait(pending, read_only, site);
  }
  void store_async(int64_t offset, int of_rank, uint32_t bits, int64_t barrier, int site) override {
    use("store_async_of_rank", site);
    Launch::store_async(offset, of_rank, bits, barrier, site);
  }
  void copy_commit(int site) override {
    use("copy_commit", site);
    Launch::copy_commit(site);
  }
  void copy_wait(int pending, int site) override {
    use("copy_wait", site);
    Launch::copy_wait(pending, site);
  }
  void wgmma_fence(int site) override {
    use("wgmma_fence", site);
    Launch::wgmma_fence(site);
  }
  void wgmma_commit(int site) override {
    use("wgmma_commit", site);
    Launch::wgmma_commit(site);
  }
  void wgmma_wait(int pending, int site) override {
    use("wgmma_wait", site);
    Launch::wgmma_wait(pending, site);
  }

 protected:
  void reset_cluster() override {
    Launch::reset_cluster();
    close_cluster();
    epochs_.assign(threads_.size(), 0);
    warps_.resize((threads_.size() + 31) / 32 + c_.cluster);
  }

 private:
  static constexpr int64_t kNowhere = -1;  // of a lane that takes part without an address
  struct Open { SharedAccess access; uint32_t came, epoch; };  // epoch: the sum of its lanes'
  struct Use {
    const char* word;
    int site;
    std::array<uint32_t, 32> times = {};  // that each lane came
    std::vector<Open> open;               // accesses of shared memory behind `closed` earlier ones
    uint32_t closed = 0, complete = 0;    // complete: those of `open` that all lanes have come to
    bool loads = false;
    uint32_t epoch = 0;
    std::vector<uint64_t> loaded;  // in this epoch: hashes of accesses
    Count count = {};
  };

  Use& use(const char* word, int site, bool orders_memory = true) {
    epochs_[self().number] += orders_memory;
    auto& sites = warps_[rank * ((c_.threads + 31) / 32) + thread / 32];
    if (site >= static_cast<int>(sites.size())) sites.resize(site + 1);
    auto& uses = sites[site];
    auto found = std::find_if(uses.begin(), uses.end(), [&](const Use& u) { return u.word == word; });
    if (found == uses.end()) found = uses.insert(found, Use{word, site});
    ++found->times[thread % 32];
    return *found;
  }
  void use_shared(const char* word, int64_t at, int bytes, bool loads, int site) {
    Use& u = use(word, site, !loads);
    const int lane = thread % 32;
    const size_t i = u.times[lane] - 1 - u.closed;
    if (i >= u.open.size()) u.open.push_back({{{}, 0, bytes}, 0, 0});
    Open& o = u.open[i];
    u.loads = loads;
    o.epoch += epochs_[self().number];
    o.came |= 1u << lane;
    if (at != kNowhere) {
      o.access.at[lane] = static_cast<int32_t>(at);
      o.access.lanes |= 1u << lane;
    }
    if (o.came != 0xffffffffu) return;
    if (!repeated(u, o)) add(u, o);
    if (++u.complete < u.open.size()) return;
    u.closed += u.complete;
    u.complete = 0;
    u.open.clear();
  }
  static bool repeated(Use& u, const Open& o) {
    if (!u.loads) return false;
    uint64_t hash = o.access.lanes;
    for (int32_t at : o.access.at) hash = (hash ^ at) * 0x100000001b3;
    if (u.epoch != o.epoch) u.loaded.clear();
    u.epoch = o.epoch;
    const bool known = std::find(u.loaded.begin(), u.loaded.end(), hash) != u.loaded.end();
    if (known) --u.count.instructions;
    else u.loaded.push_back(hash);
    return known;
  }
  static void add(Use& u, const Open& o) {
    const Cost cost = cost_of(o.access, u.loads);
    u.count.wavefronts += cost.wavefronts;
    u.count.least += cost.least;
  }

  // Of accesses that some lanes never came to, the others make one.
  void close_cluster() {
    for_each_use([](Use& u) {
      for (const Open& o : u.open)
        if (o.came != 0xffffffffu) add(u, o);
      u.count.instructions += *std::max_element(u.times.begin(), u.times.end());
      u.times.fill(0);
      u.open.clear();
      u.loaded.clear();
      u.closed = u.complete = 0;
    });
  }
  template <typename F>
  void for_each_use(F f) {
    for (auto& sites : warps_)
      for (auto& uses : sites)
        for (Use& u : uses) f(u);
  }

  std::vector<std::vector<std::vector<Use>>> warps_;  // by warp of the cluster and site
  std::vector<uint32_t> epochs_;                      // of each thread: words that order memory
};

}  // namespace emulator
}  // namespace tileops
