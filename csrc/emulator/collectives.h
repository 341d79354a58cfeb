// What threads do together: named barriers, the words of a warp, register budgets, the barrier of the cluster.
#pragma once

#include "scheduler.h"

namespace tileops {
namespace emulator {

class Collectives : public Scheduler {
 public:
  using Scheduler::Scheduler;

  void* access_shared(int64_t at, int bytes, bool write, int of_rank, int site) override {
    at_site(site);
    Thread& t = self();
    const Event event{t.clock.self, t.clock.clock, site};
    at = swizzled_by(write ? "store_shared" : "load_shared", at, site);
    return cta_of(of_rank < 0 ? rank : of_rank, event).shared.access(at, bytes, write, t.clock.view(), event);
  }

  void sync_threads(int site) override {
    if (!suppressed("sync_threads", site)) enter_barrier(0, c_.threads, true, site);
  }
  void named_barrier(int id, int threads, bool waits, int site) override {
    if (suppressed(waits ? "named_barrier_sync" : "named_barrier_arrive", site)) return;
    if (const Mutation* m = mutated(waits ? "named_barrier_sync" : "named_barrier_arrive", site)) threads += m->amount;
    if (id < 1 || id > 15) throw Fault{"barrier", site, "uses named barrier " + text_of(id) + "; there are 1 to 15"};
    if (threads % 32 || threads < 32 || threads > c_.threads)
      throw Fault{"barrier", site, "uses named barrier " + text_of(id) + " for " + text_of(threads)
                  + " threads; expected whole warps, at most the " + text_of(c_.threads) + " threads of the CTA"};
    enter_barrier(id, threads, waits, site);
  }

  uint32_t warp(WarpWord word, uint32_t value, int argument, int site) override {
    static constexpr const char* kVerb[] = {"shuffles", "shuffles", "votes", "votes", "votes", "elects", "syncs"};
    if (word == WarpWord::sync && suppressed("sync_warp", site)) return 0;
    const std::string verb = kVerb[static_cast<int>(word)];
    if ((word == WarpWord::shuffle_xor || word == WarpWord::shuffle) && (argument < 0 || argument > 31))
      throw Fault{"shuffle", site, verb + " with lane " + (word == WarpWord::shuffle_xor ? "mask " : "") + text_of(argument)
                  + "; a warp has lanes 0 to 31"};
    enter_warp(word, value, argument, verb, site);
    return self().value;
  }
  void matrices(int64_t row, uint16_t* values, int count, bool transposed, bool write, int site) override {
    self().matrix_values = values;
    self().matrix_row = swizzled_by(write ? "store_matrix" : "load_matrix", row, site);
    enter_warp(kMatrices, 0, count * 4 + transposed * 2 + write, "moves matrices", site);
  }

  void mma(float* d, const float* a, const float* b, int site) override {
    self().product = {d, a, b};
    enter_warp(kMma, 0, 0, "multiplies", site);
  }

  // By whole warps: the first lane gives or takes for all.
  void register_budget(int registers, bool increase, int site) override {
    Thread& t = self();
    if (suppressed(increase ? "register_budget_increase" : "register_budget_decrease", site)) return;
    enter_warp(WarpWord::sync, 0, registers, "changes its registers", site, false);
    if (increase ? registers < t.registers : registers > t.registers)
      throw Fault{"registers", site, (increase ? "increases" : "decreases") + std::string(" its registers from ")
                  + text_of(t.registers) + " to " + text_of(registers) + "; use the other word"};
    const bool first = t.index % 32 == 0;
    block_until_ready(Wait::registers, site, registers - t.registers, first, register_waiters_[rank]);
    if (first) {
      free_registers_[rank] -= 32 * (registers - t.registers);
      warp_registers_[warp_of(t)] = registers;
      poll(register_waiters_[rank]);
    }
    t.registers = registers;
  }

  void cluster_arrive(int site) override {
    at_site(site);
    if (suppressed("cluster_arrive", site)) return;
    Thread& t = self();
    if (t.cluster_arrived)
      throw Fault{"barrier", site, "arrives twice at the barrier of the cluster; call cluster_wait between"};
    t.cluster_arrived = true;
    t.cluster_phase = cluster_phase_;
    t.clock.released = t.clock.clock;
    t.clock.release(cluster_gathered_);
    if (++cluster_arrivals_ == static_cast<int>(threads_.size())) {
      cluster_arrivals_ = 0;
      ++cluster_phase_;
      ++barriers;
      cluster_past_ = std::make_shared<Past>(cluster_gathered_.past);
      poll(cluster_waiters_);
    }
  }
  void cluster_wait(int site) override {
    if (suppressed("cluster_wait", site)) { self().cluster_arrived = false; return; }
    Thread& t = self();
    if (!t.cluster_arrived) throw Fault{"barrier", site, "waits for the barrier of the cluster without having arrived"};
    block_until_ready(Wait::cluster, site, static_cast<int64_t>(t.cluster_phase), 0, cluster_waiters_);
    t.cluster_arrived = false;
    t.clock.acquire(cluster_past_);
  }

 protected:
  static constexpr WarpWord kMatrices = static_cast<WarpWord>(100), kMma = static_cast<WarpWord>(101);
  struct NamedBarrier {
    int threads = 0, count = 0, site = 0;
    std::vector<int> inside;  // the threads of this round
    Gathered gathered;
  };

  void reset_cluster() override {
    Scheduler::reset_cluster();
    named_.assign(c_.cluster * 16, NamedBarrier());
    in_warp_.assign((threads_.size() + 31) / 32 + c_.cluster, 0);
    free_registers_.assign(c_.cluster, 0);
    warp_registers_.assign(in_warp_.size(), c_.registers);
    register_waiters_.assign(c_.cluster, {});
    cluster_gathered_ = Gathered();
    cluster_arrivals_ = 0;
    cluster_phase_ = 0;
    cluster_waiters_.clear();
    elected_ = random_() % 32;
  }

  // The CTA that an access reaches.
  Cta& cta_of(int r, const Event& event) {
    const int site = event.site;
    if (r < 0 || r >= c_.cluster)
      throw Fault{"cluster", site, "names the CTA of rank " + text_of(r) + " of a cluster of " + text_of(c_.cluster)};
    if (r != rank && ctas_[r].returned == c_.threads)
      throw Fault{"cluster", site, "reaches the shared memory of the CTA of rank " + text_of(r)
                  + ", which has returned; let all wait for each other at the end (cluster_sync)"};
    if (r != rank || actors_.kind(event.actor) == Actor::loads) ctas_[r].reached[event.actor] = event;
    return ctas_[r];
  }

  bool ready(const Thread& t) override {
    if (t.wait == Wait::registers)
      return t.b ? free_registers_[t.rank] >= 32 * t.a : warp_registers_[warp_of(t)] == t.registers + t.a;
    if (t.wait == Wait::cluster) return cluster_phase_ > static_cast<uint64_t>(t.a);
    return Scheduler::ready(t);
  }

  void check_return(Thread& t) override {
    Scheduler::check_return(t);
    if (ctas_[t.rank].returned < c_.threads - 1) return;
    for (int id = 1; id < 16; ++id)
      if (const NamedBarrier& b = named_[t.rank * 16 + id]; b.count > 0)
        throw Fault{"barrier", b.site, "ends with " + text_of(b.count) + " of " + text_of(b.threads)
                    + " threads at named barrier " + text_of(id) + "; each arrival needs its sync", Fault::kOfBlock};
  }

  void arrive_at_collective(Thread& t) override {
    if (t.wait == Wait::warp && ++in_warp_[warp_of(t)] == 32) run_warp(t);
  }

  std::string describe_wait(const Thread& t) override {
    switch (t.wait) {
      case Wait::returned: return "have returned";
      case Wait::named_barrier: {
        if (t.a == 0) return "wait at the barrier of " + site_text(t.site);
        const NamedBarrier& b = named_[t.rank * 16 + t.a];
        return "wait at named barrier " + text_of(t.a) + " of " + site_text(t.site) + " (" + text_of(b.count) + " of "
               + text_of(b.threads) + " threads have come)";
      }
      case Wait::warp:
        if (t.word == WarpWord::shuffle_xor)
          return "wait in the shuffle of " + site_text(t.site) + " (lane mask " + text_of(t.b) + ")";
        return "wait in the warp's word of " + site_text(t.site);
      case Wait::registers:
        return "wait for " + text_of(t.a) + " more registers each at " + site_text(t.site) + " (the CTA's pool has "
               + text_of(free_registers_[t.rank]) + ")";
      case Wait::cluster: return "wait at the cluster's barrier of " + site_text(t.site);
      default: return "run";
    }
  }

 private:
  int warp_of(const Thread& t) const { return t.rank * ((c_.threads + 31) / 32) + t.index / 32; }

  void enter_barrier(int id, int threads, bool waits, int site) {
    Thread& t = self();
    at_site(site);
    NamedBarrier& b = named_[rank * 16 + id];
    if (b.count == 0) {
      b.threads = threads;
    } else if (b.threads != threads) {
      throw Fault{"barrier", site, "comes to named barrier " + text_of(id) + " for " + text_of(threads)
                  + " threads; others of this round came for " + text_of(b.threads)};
    }
    if (std::find(b.inside.begin(), b.inside.end(), t.number) != b.inside.end())
      throw Fault{"barrier", site, "comes twice to one round of named barrier " + text_of(id)
                  + "; it must see the round complete (sync with something) before it arrives again"};
    b.inside.push_back(t.number);
    b.site = site;
    t.clock.release(b.gathered);
    t.a = id;
    t.value = waits;
    if (++b.count < b.threads) {
      if (waits) block(Wait::named_barrier, site);
      else pass();
      return;
    }
    ++barriers;
    const SharedPast past = std::make_shared<Past>(b.gathered.past);
    const std::vector<int> inside = std::move(b.inside);
    b.inside.clear();
    b.count = 0;
    if (id == 0) check_sites(inside, site);
    for (int number : inside) {
      Thread& other = threads_[number];
      if (number == t.number ? !waits : other.wait != Wait::named_barrier || other.a != id) continue;
      other.clock.acquire(past);
      if (number != t.number) wake(other);
    }
    pass();
  }
  void check_sites(const std::vector<int>& inside, int site) {
    for (int number : inside)
      if (threads_[number].site != site)
        throw Fault{"diverged", threads_[rank * c_.threads].site, "threads meet in different barriers: "
                    + describe_at_barrier() + "; put the one they share outside the branch", Fault::kOfBlock};
  }
  std::string describe_at_barrier() {
    self().wait = Wait::named_barrier;  // the last to come
    const std::string text = describe(rank, 0, c_.threads);
    self().wait = Wait::running;
    return text;
  }

  void enter_warp(WarpWord word, uint32_t value, int argument, const std::string& verb, int site, bool orders = true) {
    Thread& t = self();
    if (c_.threads - t.index / 32 * 32 < 32)
      throw Fault{"shuffle", site, verb + " in the last warp, which has " + text_of(c_.threads % 32)
                  + " lanes; launch a multiple of 32 threads"};
    t.word = word;
    t.value = value;
    t.b = argument;
    t.a = orders;
    block(Wait::warp, site);
  }

  // All lanes of t's warp have come.
  void run_warp(Thread& t) {
    Thread* lanes = &threads_[t.number - t.index % 32];
    in_warp_[warp_of(t)] = 0;
    const bool one_argument = t.word != WarpWord::shuffle;
    for (int i = 0; i < 32; ++i)
      if (lanes[i].site != lanes[0].site || lanes[i].word != lanes[0].word || (one_argument && lanes[i].b != lanes[0].b)) {
        const int first = t.index / 32 * 32;
        throw Fault{"diverged", lanes[0].site, "threads meet in different shuffles: " + describe(t.rank, first, first + 32)
                    + "; put the one they share outside the branch", Fault::kOfBlock};
      }
    if (t.word == WarpWord::shuffle_xor || t.word == WarpWord::shuffle) ++shuffles;
    if (t.word == kMatrices) {
      move_matrices(lanes);
    } else if (t.word == kMma) {
      multiply(lanes);
    } else if (t.word == WarpWord::sync) {
      if (!t.a) return wake_all(lanes);
      Gathered all;
      for (int i = 0; i < 32; ++i) lanes[i].clock.release(all);
      const SharedPast past = std::make_shared<Past>(all.past);
      for (int i = 0; i < 32; ++i) lanes[i].clock.acquire(past);
    } else {
      exchange(lanes);
    }
    wake_all(lanes);
  }
  void wake_all(Thread* lanes) {
    for (int i = 0; i < 32; ++i) wake(lanes[i]);
  }
  void exchange(Thread* lanes) {
    uint32_t values[32], ballot = 0;
    for (int i = 0; i < 32; ++i) values[i] = lanes[i].value;
    for (int i = 0; i < 32; ++i) ballot |= (values[i] != 0) << i;
    for (int i = 0; i < 32; ++i) {
      switch (lanes[i].word) {
        case WarpWord::shuffle_xor: lanes[i].value = values[i ^ lanes[i].b]; break;
        case WarpWord::shuffle: lanes[i].value = values[lanes[i].b]; break;
        case WarpWord::all: lanes[i].value = ballot == 0xffffffffu; break;
        case WarpWord::any: lanes[i].value = ballot != 0; break;
        case WarpWord::ballot: lanes[i].value = ballot; break;
        case WarpWord::elect: lanes[i].value = i == elected_; break;
        case WarpWord::sync: break;
      }
    }
  }
  // Each row is accessed by the lane that points to it.
  void move_matrices(Thread* lanes) {
    const int count = static_cast<int>(lanes[0].b / 4), site = lanes[0].site;
    const bool transposed = lanes[0].b & 2, write = lanes[0].b & 1;
    SharedMemory& shared = ctas_[lanes[0].rank].shared;
    for (int m = 0; m < count; ++m)
      for (int row = 0; row < 8; ++row) {
        Thread& t = lanes[m * 8 + row];
        char* p;
        try {
          p = shared.access(t.matrix_row, 16, write, t.clock.view(), {t.clock.self, t.clock.clock, site});
        } catch (Fault& f) {
          f.thread = t.index;
          f.rank = t.rank;
          throw;
        }
        for (int column = 0; column < 8; ++column) {
          const int lane = transposed ? column * 4 + row / 2 : row * 4 + column / 2;
          uint16_t& value = lanes[lane].matrix_values[2 * m + (transposed ? row : column) % 2];
          if (write) memcpy(p + 2 * column, &value, 2);
          else memcpy(&value, p + 2 * column, 2);
        }
      }
  }

  // d (16 x 8) += a (16 x 16) b (16 x 8), in the layouts of csrc/include/tileops/mma.h.
  static void multiply(Thread* lanes) {
    float a[16][16], b[16][8];
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 8; ++i) a[l / 4 + 8 * (i / 2 % 2)][2 * (l % 4) + i % 2 + 8 * (i / 4)] = lanes[l].product.a[i];
      for (int i = 0; i < 4; ++i) b[2 * (l % 4) + i % 2 + 8 * (i / 2)][l / 4] = lanes[l].product.b[i];
    }
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) {
        const int row = l / 4 + 8 * (i / 2), column = 2 * (l % 4) + i % 2;
        for (int k = 0; k < 16; ++k) lanes[l].product.d[i] += a[row][k] * b[k][column];
      }
  }

  std::vector<NamedBarrier> named_;
  std::vector<int> in_warp_;
  // What the warp groups of a CTA have given back of the registers that it was launched with: more there is not to take.
  std::vector<int> free_registers_, warp_registers_;
  std::vector<std::vector<int>> register_waiters_;
  Gathered cluster_gathered_;
  SharedPast cluster_past_;
  int cluster_arrivals_ = 0;
  uint64_t cluster_phase_ = 0;
  std::vector<int> cluster_waiters_;
  int elected_ = 0;  // the lane
};

}  // namespace emulator
}  // namespace tileops
