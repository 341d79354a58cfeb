// The threads of a cluster as fibers, and the asynchronous operations that are under way: which of them goes on next is drawn
// from the seed.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <random>
#include <set>

#include "global_memory.h"
#include "include/tileops/emulator.h"
#include "shared_memory.h"
#include "signals.h"
#include "tensor_map.h"

namespace tileops {
namespace emulator {

// A change of the text that is made while it runs, by site: what tests of the emulator use.
struct Mutation {
  std::string word;  // empty: each word that orders
  int site;
  std::string kind;  // suppress, flip (a parity, a swizzle; flip_a: that of operand A), add (to a number)
  int amount;
};

struct Configuration {
  void (*kernel)(const void*);
  const void* params;
  int64_t params_bytes;
  int64_t grid_x, grid_y, grid_z;
  int threads, shared_bytes, cluster;
  int registers;  // of a thread at the start
  uint64_t seed;
  std::vector<Mutation> mutations;
};

// Something that goes on by itself. Owned by the scheduler from start() until step() says that it is over.
struct Operation {
  virtual ~Operation() = default;
  virtual bool step() = 0;
  int site = 0, thread = 0, rank = 0;  // who issued it
};

class Scheduler : public Machine {
 public:
  Scheduler(Configuration c, std::vector<Buffer> buffers) : memory(std::move(buffers)), c_(std::move(c)), random_(c_.seed) {
    cluster = c_.cluster;
    grid_x = c_.grid_x;
    threads_.resize(c_.threads * c_.cluster);
    while (fibers().size() < threads_.size()) fibers().emplace_back();
    for (int r = 0; r < c_.cluster; ++r) ctas_.emplace_back(c_.shared_bytes, r, actors_);
  }

  GlobalMemory memory;
  int64_t barriers = 0, shuffles = 0, operations = 0;
  std::optional<Fault> fault;  // block_x, block_y and block_z are then its block's

  // False: `fault` says why.
  bool run() {
    std::vector<int64_t> clusters(c_.grid_x / c_.cluster * c_.grid_y * c_.grid_z);
    for (size_t i = 0; i < clusters.size(); ++i) clusters[i] = i;
    for (size_t i = clusters.size(); i > 1; --i) std::swap(clusters[i - 1], clusters[random_() % i]);
    current() = this;
    const auto signals = std::make_unique<Signals>();
    for (int64_t number : clusters) {
      run_cluster(number);
      if (fault) return false;
    }
    return true;
  }

 protected:
  enum class Wait { running, named_barrier, warp, registers, mbarrier, cluster, products, stores, copies, returned };
  struct InFlight { Cell* cells; int count; uint32_t product; std::shared_ptr<std::vector<float>> accumulator; };
  struct Thread {
    int number = 0, rank = 0, index = 0;  // in the cluster, of its CTA, in the CTA
    Wait wait = Wait::running;
    int site = 0;
    int64_t a = 0, b = 0;  // what it waits for; the meaning depends on `wait`
    Clock clock;
    WarpWord word = WarpWord::sync;
    uint32_t value = 0;
    uint16_t* matrix_values = nullptr;
    int64_t matrix_row = 0;
    struct { float* d; const float *a, *b; } product = {};  // of mma
    bool cluster_arrived = false;
    uint64_t cluster_phase = 0;
    int registers = 0;
    // wgmma: how many products it has issued and waited for; the last product of each commit; registers of the open ones.
    uint32_t fences = 0, issued = 0, waited = 0;
    std::vector<uint32_t> commits;
    std::vector<InFlight> in_flight;
  };
  struct Cta {
    Cta(int bytes, int rank, const Actors& actors) : shared(bytes, rank, actors) {}
    SharedMemory shared;
    int64_t block_x = 0, block_y = 0, block_z = 0;
    int returned = 0;
    Gathered ended;                     // what its threads knew when they returned
    std::map<uint32_t, Event> reached;  // the last access to it by each thread of another CTA, and by each asynchronous copy
  };

  virtual void reset_cluster() {}          // each layer: before the threads of a cluster start
  virtual void arrive_at_collective(Thread&) {}  // a thread has just stopped
  virtual bool ready(const Thread&) { return false; }  // whether it can go on
  // A CTA must not end while others may still reach its shared memory: one of its threads returns after each such access.
  virtual void check_return(Thread& t) {
    Cta& cta = ctas_[t.rank];
    t.clock.release(cta.ended);
    if (cta.returned < c_.threads - 1) return;
    for (const auto& [actor, e] : cta.reached)
      if (tick(cta.ended.past.seen, actor) < e.clock)
        throw Fault{"in_flight_at_exit", e.site, "may reach the shared memory of a CTA that has returned ("
                    + actors_.name(actor, t.rank) + "); let the CTA wait for it before its end, for other CTAs by cluster_sync",
                    Fault::kOfBlock};
  }
  virtual std::string describe_wait(const Thread&) = 0;

  Thread& self() { return threads_[number_]; }
  Cta& cta() { return ctas_[rank]; }
  void at_site(int site) { self().site = site; }
  uint32_t launch_thread(const Thread& t) const {
    const Cta& c = ctas_[t.rank];
    return static_cast<uint32_t>(((c.block_z * c_.grid_y + c.block_y) * c_.grid_x + c.block_x) * c_.threads + t.index);
  }

  const Mutation* mutated(const char* word, int site) const {
    for (const Mutation& m : c_.mutations)
      if (m.site == site && (m.word.empty() || m.word == word)) return &m;
    return nullptr;
  }
  bool suppressed(const char* word, int site) const {
    const Mutation* m = mutated(word, site);
    return m && m->kind == "suppress";
  }

  // The address that a word accesses; of a mutant, with one swizzle more.
  int64_t swizzled_by(const char* word, int64_t at, int site) const {
    const Mutation* m = mutated(word, site);
    return m && m->kind == "flip" ? swizzled(at, 128) : at;
  }

  // A fault that must not be thrown where it is found; the thread stops at its next word.
  void drop(const Fault& f) { stop(f, self()); }

  // ---- for threads
  void block(Wait what, int site) {
    Thread& t = self();
    t.wait = what;
    t.site = site;
    fibers()[t.number].yield();
  }
  // Until ready() says so; who changes what it depends on calls poll().
  void block_until_ready(Wait what, int site, int64_t a, int64_t b, std::vector<int>& waiters) {
    while (!goes_on(what, site, a, b, waiters)) {}
  }
  // False: the thread was woken, but what it waited for may be gone again.
  bool goes_on(Wait what, int site, int64_t a, int64_t b, std::vector<int>& waiters) {
    Thread& t = self();
    t.wait = what;
    t.site = site;
    t.a = a;
    t.b = b;
    const bool go = ready(t);
    if (!go) {
      waiters.push_back(t.number);
      fibers()[t.number].yield();
    }
    t.wait = Wait::running;
    return go;
  }
  void poll(std::vector<int>& waiters) {
    for (size_t i = 0; i < waiters.size();) {
      Thread& t = threads_[waiters[i]];
      if (!ready(t)) { ++i; continue; }
      wake(t);
      waiters[i] = waiters.back();
      waiters.pop_back();
    }
  }
  void wake(Thread& t) {
    t.wait = Wait::running;
    runnable_.push_back(t.number);
  }
  void runnable_again() {
    runnable_.push_back(number_);
    fibers()[number_].yield();
  }
  // Another thread or operation may come first here.
  void pass() {
    if (random_() % 4 == 0) runnable_again();
  }
  void start(std::shared_ptr<Operation> o) {
    ++operations;
    under_way_.push_back(std::move(o));
  }

  Configuration c_;
  std::mt19937_64 random_;
  Actors actors_;
  std::deque<Cta> ctas_;
  std::vector<Thread> threads_;
  std::vector<std::shared_ptr<Operation>> under_way_;

 private:
  // Fibers outlive a launch (their stacks are costly to map); start() makes each of them new.
  static std::deque<Fiber>& fibers() { static std::deque<Fiber> all; return all; }
  static Scheduler*& current() { static Scheduler* s = nullptr; return s; }

  static void fiber_main() {
    for (;;) {
      Scheduler& s = *current();
      try {
        s.c_.kernel(s.c_.params);
        s.check_return(s.self());
      } catch (const Fault& f) {
        s.stop(f, s.self());
      }
      s.block(Wait::returned, s.self().site);
    }
  }
  void stop(const Fault& f, const Thread& t) {
    if (fault) return;
    fault = f;
    if (f.thread == Fault::kOfRunningThread) fault->thread = t.index;
    if (f.thread < 0) fault->rank = t.rank;
  }

  void start_cluster(int64_t number) {
    const int64_t clusters_x = c_.grid_x / c_.cluster;
    actors_.reset();
    runnable_.clear();
    under_way_.clear();
    for (int r = 0; r < c_.cluster; ++r) {
      ctas_[r].shared.reset();
      ctas_[r].returned = 0;
      ctas_[r].ended = Gathered();
      ctas_[r].reached.clear();
      ctas_[r].block_x = number % clusters_x * c_.cluster + r;
      ctas_[r].block_y = number / clusters_x % c_.grid_y;
      ctas_[r].block_z = number / clusters_x / c_.grid_y;
    }
    const SharedPast nothing = std::make_shared<Past>();
    for (int i = 0; i < static_cast<int>(threads_.size()); ++i) {
      Thread& t = threads_[i] = Thread();
      t.number = i;
      t.rank = i / c_.threads;
      t.index = i % c_.threads;
      t.registers = c_.registers;
      t.clock.past = nothing;
      t.clock.self = actors_.add({Actor::thread, t.rank, t.index});
      fibers()[i].start(fiber_main);
      runnable_.push_back(i);
    }
    // Some runs let operations end at once, some only when no thread can go on; some prefer a few warps to the others.
    static constexpr int kOperationIn64[] = {1, 4, 24, 64};
    operation_in_64_ = kOperationIn64[random_() % 4];
    urgency_.resize(threads_.size() / 32 + 1);
    for (uint32_t& u : urgency_) u = random_();
    prefers_ = random_() % 2;
    reset_cluster();
  }

  void run_cluster(int64_t number) {
    start_cluster(number);
    while (!fault && (!runnable_.empty() || !under_way_.empty())) {
      if (!under_way_.empty() && (runnable_.empty() || static_cast<int>(random_() % 64) < operation_in_64_)) {
        run_operation();
      } else {
        run_thread();
      }
    }
    if (!fault && returned_threads() < static_cast<int>(threads_.size())) fault = deadlock();
    if (fault) {
      block_x = ctas_[fault->rank].block_x;
      block_y = ctas_[fault->rank].block_y;
      block_z = ctas_[fault->rank].block_z;
    }
  }

  void run_operation() {
    const size_t i = random_() % under_way_.size();
    const std::shared_ptr<Operation> o = under_way_[i];
    Thread& issuer = threads_[o->rank * c_.threads + o->thread];
    try {
      if (!o->step()) return;
    } catch (const Fault& f) {
      stop(f, issuer);
      return;
    }
    // step() may have started others: they are behind.
    under_way_.erase(under_way_.begin() + i);
  }

  void run_thread() {
    size_t i = random_() % runnable_.size();
    if (prefers_) {
      const size_t other = random_() % runnable_.size();
      if (urgency_[runnable_[other] / 32] > urgency_[runnable_[i] / 32]) i = other;
    }
    std::swap(runnable_[i], runnable_.back());
    number_ = runnable_.back();
    runnable_.pop_back();
    Thread& t = self();
    thread = t.index;
    rank = t.rank;
    block_x = cta().block_x;
    block_y = cta().block_y;
    block_z = cta().block_z;
    wgmma_fences = t.fences;
    if (const int signal = Signals::resume(fibers()[number_]))
      stop({"crash", t.site, signal == SIGFPE ? "divides an integer by zero, after this word"
                             : "accesses memory by no word, or leaves its stack, after this word"}, t);
    if (fault) return;
    if (t.wait == Wait::returned) ++cta().returned;
    try {
      arrive_at_collective(t);
    } catch (const Fault& f) {
      stop(f, t);
    }
  }

  int returned_threads() const {
    int n = 0;
    for (const Cta& c : ctas_) n += c.returned;
    return n;
  }

  Fault deadlock() {
    int site = 0, at = 0;
    for (const Thread& t : threads_)
      if (t.wait != Wait::returned) { site = t.site; at = t.rank; break; }
    std::string text;
    for (int r = 0; r < c_.cluster; ++r)
      text += (r ? "; " : "") + (c_.cluster > 1 ? "rank " + text_of(r) + ": " : "") + describe(r, 0, c_.threads);
    return Fault{"deadlock", site, "deadlock: " + text
                 + "; all threads of the block must reach each barrier, all lanes of the warp each shuffle",
                 Fault::kOfBlock, at};
  }

 protected:
  // Threads of a CTA by what they do.
  std::string describe(int of_rank, int first, int last) {
    std::vector<std::pair<std::string, std::string>> groups;  // what they do, which they are
    const auto doing = [&](int t) { return describe_wait(threads_[of_rank * c_.threads + t]); };
    for (int t = first, end; t < last; t = end) {
      const std::string what = doing(t);
      for (end = t + 1; end < last && doing(end) == what;) ++end;
      const std::string range = std::to_string(t) + (end > t + 1 ? "-" + std::to_string(end - 1) : "");
      auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == what; });
      if (group == groups.end()) groups.emplace_back(what, range);
      else group->second += ", " + range;
    }
    std::string text;
    for (const auto& g : groups) text += (text.empty() ? "threads " : "; threads ") + g.second + " " + g.first;
    return text;
  }

 private:
  int number_ = 0;  // of the running thread
  std::vector<int> runnable_;
  int operation_in_64_ = 0;
  bool prefers_ = false;
  std::vector<uint32_t> urgency_;
};

}  // namespace emulator
}  // namespace tileops
