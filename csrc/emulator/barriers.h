// mbarriers: arrivals and transferred bytes that complete a phase; and the fences of the asynchronous proxy.
#pragma once

#include "collectives.h"

namespace tileops {
namespace emulator {

class Barriers : public Collectives {
 public:
  using Collectives::Collectives;

  void init_barrier(int64_t at, int arrivals, int site) override {
    Thread& t = self();
    at_site(site);
    if (const Mutation* m = mutated("init_barrier", site)) arrivals += m->amount;
    if (arrivals < 1 || arrivals >= 1 << 20)
      throw Fault{"barrier", site, "initialises an mbarrier for " + text_of(arrivals) + " arrivals; expected 1 to 1048575"};
    if (barriers_.count({rank, at}))
      throw Fault{"barrier", site, "initialises " + name(at) + " again; it was initialised at "
                  + site_text(barriers_[{rank, at}].site)};
    cta().shared.check(at, 8, 8, true, site);
    cta().shared.claim_barrier(at, t.clock.view(), {t.clock.self, t.clock.clock, site});
    Mbarrier& b = barriers_[{rank, at}];
    b.count = b.pending = arrivals;
    b.at = at;
    b.rank = rank;
    b.site = site;
    b.actor = actors_.add({Actor::loads, rank, at});
    b.initialiser = t.clock.self;
    b.initialised = t.clock.clock;
    b.completed = std::make_shared<Past>();
  }
  void fence_barrier_init(int site) override {
    at_site(site);
    if (suppressed("fence_barrier_init", site)) return;
    for (auto& [place, b] : barriers_)
      if (b.initialiser == self().clock.self) b.fenced = true;
  }

  void arrive(int64_t at, int of_rank, bool expects, int bytes, int site) override {
    const char* word = of_rank >= 0 ? "arrive_at_rank" : expects ? "arrive_expect_bytes" : "arrive";
    Thread& t = self();
    at_site(site);
    if (const Mutation* m = mutated(word, site)) {
      if (m->kind == "suppress") return;
      bytes += m->amount;
    }
    const int r = of_rank < 0 ? rank : of_rank;
    cta_of(r, {t.clock.self, t.clock.clock, site});
    Mbarrier& b = barrier(r, at, t.clock.view(), r != rank, site);
    if (bytes < 0) throw Fault{"barrier", site, "expects " + text_of(bytes) + " bytes"};
    b.bytes += bytes;
    if (b.bytes >= 1 << 20)
      throw Fault{"barrier", site, "expects " + text_of(b.bytes) + " bytes; an mbarrier counts to 1048575"};
    t.clock.release(b.gathered);
    count_arrival(b, site);
    pass();
  }
  bool wait(int64_t at, uint32_t parity, bool cluster_wide, bool blocks, int site) override {
    Thread& t = self();
    at_site(site);
    const char* word = !blocks ? "test_wait" : cluster_wide ? "wait_cluster" : "wait";
    if (const Mutation* m = mutated(word, site)) {
      if (m->kind == "suppress") return true;
      if (m->kind == "flip") parity ^= 1;
    }
    if (parity > 1) throw Fault{"barrier", site, "waits for parity " + text_of(parity) + "; phases have 0 and 1"};
    Mbarrier& b = barrier(rank, at, t.clock.view(), false, site);
    if (!blocks && !passes(b, parity)) {
      if (++idle_tests_ > kIdleTests) throw Fault{"deadlock", site, "tests " + name(at) + " without end"};
      runnable_again();
      return false;
    }
    idle_tests_ = 0;
    do {
      check_not_lapped(t, b, parity, site);
    } while (!goes_on(Wait::mbarrier, site, at, parity, b.waiters));
    t.clock.acquire(b.completed);
    return true;
  }

  void fence_async(bool shared, int site) override {
    Thread& t = self();
    at_site(site);
    if (suppressed(shared ? "fence_async_shared" : "fence_async_global", site)) return;
    if (!shared) return;
    t.clock.fenced = t.clock.clock++;
  }

 protected:
  struct Mbarrier {
    int count = 0, pending = 0;  // arrivals of a phase; those still to come
    int64_t bytes = 0;           // expected and not yet here; below 0 while copies come before their expectation
    uint64_t phase = 0;
    int rank = 0, site = 0;
    int64_t at = 0;
    uint32_t actor = 0, initialiser = 0, initialised = 0;
    bool fenced = false;  // fence_barrier_init by its initialiser
    Gathered gathered;
    SharedPast completed;
    std::vector<int> waiters;
  };

  void reset_cluster() override {
    Collectives::reset_cluster();
    barriers_.clear();
    idle_tests_ = 0;
  }

  Mbarrier& barrier(int r, int64_t at, const View& view, bool from_afar, int site) {
    const auto found = barriers_.find({r, at});
    if (found == barriers_.end()) {
      ctas_[r].shared.check(at, 8, 8, false, site);
      throw Fault{"barrier", site, "uses shared bytes " + text_of(at) + ".." + text_of(at + 7)
                  + " as an mbarrier, which nobody has initialised; call init_barrier first, with a barrier between"};
    }
    Mbarrier& b = found->second;
    if (!view.ordered(b.initialiser, b.initialised))
      throw Fault{"race", site, "uses " + name(at) + ", which " + actors_.name(b.initialiser, rank) + " initialised at "
                  + site_text(b.site) + " with no barrier between; put one (of the cluster, if a peer arrives) after it"};
    if ((from_afar || view.asynchronous) && !b.fenced)
      throw Fault{"missing_fence", site, "uses " + name(at) + (from_afar ? " from another CTA" : " for an asynchronous copy")
                  + "; its initialiser must call fence_barrier_init after " + site_text(b.site)};
    return b;
  }

  void count_arrival(Mbarrier& b, int site) {
    if (b.pending == 0)
      throw Fault{"barrier", site, "arrives at " + name(b.at) + ", which has all its " + text_of(b.count)
                  + " arrivals of phase " + text_of(b.phase) + " and waits for " + text_of(b.bytes)
                  + " bytes; count the arrivals of a phase in init_barrier"};
    --b.pending;
    complete(b, site);
  }
  void count_bytes(Mbarrier& b, int64_t bytes, int site) {
    b.bytes -= bytes;
    complete(b, site);
  }
  void complete(Mbarrier& b, int site) {
    if (b.pending == 0 && b.bytes < 0)
      throw Fault{"barrier", site, "brings " + text_of(-b.bytes) + " bytes more than phase " + text_of(b.phase) + " of "
                  + name(b.at) + " expects; expect the bytes of all copies of the phase"};
    if (b.pending > 0 || b.bytes != 0) return;
    ++b.phase;
    b.pending = b.count;
    raise(b.gathered.past.seen, b.actor, static_cast<uint32_t>(b.phase));
    b.completed = std::make_shared<Past>(b.gathered.past);
    idle_tests_ = 0;
    poll(b.waiters);
  }

  // A phase that has some of its arrivals at the end was counted wrongly: one arrival too many ends here, or one too few.
  void check_return(Thread& t) override {
    Collectives::check_return(t);
    if (ctas_[t.rank].returned < c_.threads - 1) return;
    for (const auto& [place, b] : barriers_)
      if (place.first == t.rank && b.pending != b.count)
        throw Fault{"barrier", b.site, "ends with " + text_of(b.count - b.pending) + " of the " + text_of(b.count)
                    + " arrivals of phase " + text_of(b.phase) + " of " + name(b.at) + "; count the arrivals in init_barrier",
                    Fault::kOfBlock};
  }

  bool ready(const Thread& t) override {
    if (t.wait == Wait::mbarrier) return passes(barriers_.at({t.rank, t.a}), static_cast<uint32_t>(t.b));
    return Collectives::ready(t);
  }
  std::string describe_wait(const Thread& t) override {
    if (t.wait != Wait::mbarrier) return Collectives::describe_wait(t);
    const Mbarrier& b = barriers_.at({t.rank, t.a});
    return "wait for parity " + text_of(t.b) + " of " + name(t.a) + " at " + site_text(t.site) + " (phase " + text_of(b.phase)
           + " has " + text_of(b.count - b.pending) + " of " + text_of(b.count) + " arrivals"
           + (b.bytes ? " and lacks " + text_of(b.bytes) + " bytes" : "") + ")";
  }

  // A parity tells a phase from the next one only. A waiter that knows of no phase after the one it waits for, when the next
  // one is over as well, would wait for the one after that.
  void check_not_lapped(const Thread& t, const Mbarrier& b, uint32_t parity, int site) const {
    const uint32_t known = tick(t.clock.past->seen, b.actor);
    if (b.phase < known + 2 || parity != (known & 1)) return;
    throw Fault{"barrier", site, "waits for phase " + text_of(known) + " of " + name(b.at) + " when phase "
                + text_of(b.phase - 1) + " is over too, which its parity cannot tell; who completes a phase must "
                "have heard from all who wait for the one before"};
  }

  static std::string name(int64_t at) { return "the mbarrier at byte " + text_of(at); }
  static bool passes(const Mbarrier& b, uint32_t parity) { return (b.phase & 1) != parity; }

  std::map<std::pair<int, int64_t>, Mbarrier> barriers_;  // by rank and byte offset

 private:
  static constexpr int kIdleTests = 1000000;
  int idle_tests_ = 0;
};

}  // namespace emulator
}  // namespace tileops
