// One launch: CTAs one after the other, the threads of each as fibers; both in an order drawn from the seed.
#pragma once

#include <algorithm>
#include <deque>
#include <optional>
#include <random>
#include <set>

#include "fiber.h"
#include "include/tileops/emulator.h"
#include "memory.h"

namespace tileops {
namespace emulator {

struct Configuration {
  void (*kernel)(const void*);
  const void* params;
  int64_t grid_x, grid_y;
  int threads, shared_bytes;
  uint64_t seed;
  std::set<int> suppressed;  // sites of barriers that do nothing: mutants, to test that the emulator notices
};

class Launch final : public Machine {
 public:
  Launch(Configuration c, std::vector<Buffer> buffers)
      : memory(std::move(buffers)), c_(std::move(c)), shared_(c_.shared_bytes), random_(c_.seed), threads_(c_.threads) {
    while (fibers().size() < threads_.size()) fibers().emplace_back();
  }

  GlobalMemory memory;
  int64_t barriers = 0, shuffles = 0;

  // False: `fault` says why; block_x and block_y are those of the fault.
  std::optional<Fault> fault;
  bool run() {
    std::vector<int64_t> blocks(c_.grid_x * c_.grid_y);
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = i;
    for (size_t i = blocks.size(); i > 1; --i) std::swap(blocks[i - 1], blocks[random_() % i]);
    current() = this;
    grid_x = c_.grid_x;
    for (int64_t block : blocks) {
      block_x = block % c_.grid_x;
      block_y = block / c_.grid_x;
      run_block();
      if (fault) return false;
    }
    return true;
  }

  void* access_global(const void* origin, int64_t byte_offset, int element, int count, bool write, int site) override {
    threads_[thread].site = site;
    const uint32_t number = static_cast<uint32_t>((block_y * c_.grid_x + block_x) * c_.threads + thread);
    return memory.access(origin, byte_offset, element, count, write, number, site);
  }
  void* access_shared(int64_t byte_offset, int bytes, bool write, int site) override {
    threads_[thread].site = site;
    return shared_.access(byte_offset, bytes, write, thread, epoch_, site);
  }
  void sync_threads(int site) override {
    if (!c_.suppressed.count(site)) wait(Wait::barrier, site);
  }
  float shuffle_xor(float v, int lane_mask, int site) override {
    if (lane_mask < 0 || lane_mask > 31)
      throw Fault{"shuffle", site, "shuffles with lane mask " + std::to_string(lane_mask) + "; a warp has lanes 0 to 31"};
    if (c_.threads - thread / 32 * 32 < 32)
      throw Fault{"shuffle", site, "shuffles in the last warp, which has " + std::to_string(c_.threads % 32)
                  + " lanes; launch a multiple of 32 threads"};
    threads_[thread].value = v;
    threads_[thread].lane_mask = lane_mask;
    wait(Wait::shuffle, site);
    return threads_[thread].value;
  }

  void register_index(int index, int count, int site) override {
    throw Fault{"register_index", near(site), "uses register " + std::to_string(index) + " of a fragment of "
                + std::to_string(count) + "; bound the index by the fragment's size"};
  }
  void register_unwritten(int index, int site) override {
    throw Fault{"unwritten_register", near(site), "reads " + (index < 0 ? "a register" : "register " + std::to_string(index))
                + " of a fragment before anything was written to it; fill the fragment or load it first"};
  }
  void register_misaligned(int index, int access_bytes, int site) override {
    throw Fault{"misaligned", site, "moves " + std::to_string(access_bytes) + " bytes at once from or to register "
                + std::to_string(index) + " of a fragment, which is not aligned to that; start at a multiple"};
  }

 private:
  enum class Wait { running, barrier, shuffle, returned };
  struct Thread {
    Wait wait = Wait::running;
    int site = 0;
    float value = 0;
    int lane_mask = 0;
  };

  // Fibers outlive a launch (their stacks are costly to map); start() makes each of them new.
  static std::deque<Fiber>& fibers() { static std::deque<Fiber> all; return all; }
  static Launch*& current() { static Launch* launch = nullptr; return launch; }

  static void fiber_main() {
    for (;;) {
      Launch& launch = *current();
      try {
        launch.c_.kernel(launch.c_.params);
      } catch (const Fault& f) {
        launch.fault = f;
        launch.fault->thread = launch.thread;
      }
      launch.wait(Wait::returned, launch.threads_[launch.thread].site);
    }
  }

  void wait(Wait what, int site) {
    threads_[thread].wait = what;
    threads_[thread].site = site;
    fibers()[thread].yield();
  }

  void run_block() {
    shared_.reset();
    epoch_ = 0;
    at_barrier_ = returned_ = 0;
    in_shuffle_.assign((c_.threads + 31) / 32, 0);
    runnable_.clear();
    for (int t = 0; t < c_.threads; ++t) {
      threads_[t] = Thread();
      fibers()[t].start(fiber_main);
      runnable_.push_back(t);
    }
    while (!runnable_.empty() && !fault) {
      std::swap(runnable_[random_() % runnable_.size()], runnable_.back());
      thread = runnable_.back();
      runnable_.pop_back();
      fibers()[thread].resume();
      if (!fault) arrive();
    }
    if (!fault && returned_ < c_.threads)
      fault = Fault{"deadlock", first_waiting(), "deadlock: " + describe(0, c_.threads)
                    + "; all threads of the block must reach each barrier, all lanes of the warp each shuffle"};
  }

  // The thread that has just stopped may be the last one of a collective.
  void arrive() {
    const Wait what = threads_[thread].wait;
    if (what == Wait::returned) ++returned_;
    if (what == Wait::barrier && ++at_barrier_ == c_.threads) {
      at_barrier_ = 0;
      ++epoch_;
      ++barriers;
      release(0, c_.threads, "barriers");
    }
    if (what == Wait::shuffle && ++in_shuffle_[thread / 32] == 32) {
      const int first = thread / 32 * 32;
      in_shuffle_[thread / 32] = 0;
      ++shuffles;
      float values[32];
      for (int lane = 0; lane < 32; ++lane) values[lane] = threads_[first + lane].value;
      for (int lane = 0; lane < 32; ++lane) threads_[first + lane].value = values[lane ^ threads_[first + lane].lane_mask];
      release(first, first + 32, "shuffles");
    }
  }

  void release(int first, int last, const char* collective) {
    for (int t = first; t < last; ++t)
      if (threads_[t].site != threads_[first].site || threads_[t].lane_mask != threads_[first].lane_mask)
        fault = Fault{"diverged", threads_[first].site, std::string("threads meet in different ") + collective + ": "
                      + describe(first, last) + "; put the one they share outside the branch"};
    for (int t = first; t < last; ++t) {
      threads_[t].wait = Wait::running;
      threads_[t].lane_mask = 0;
      runnable_.push_back(t);
    }
  }

  int first_waiting() const {
    for (const Thread& t : threads_)
      if (t.wait != Wait::returned) return t.site;
    return 0;
  }

  std::string describe_one(const Thread& t) const {
    if (t.wait == Wait::barrier) return "wait at the barrier of " + site_text(t.site);
    if (t.wait == Wait::returned) return "have returned";
    return "wait in the shuffle of " + site_text(t.site) + " (lane mask " + std::to_string(t.lane_mask) + ")";
  }
  std::string describe(int first, int last) const {
    std::vector<std::pair<std::string, std::string>> groups;  // what they do, which they are
    for (int t = first, end; t < last; t = end) {
      const std::string doing = describe_one(threads_[t]);
      for (end = t + 1; end < last && describe_one(threads_[end]) == doing;) ++end;
      const std::string range = std::to_string(t) + (end > t + 1 ? "-" + std::to_string(end - 1) : "");
      auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == doing; });
      if (group == groups.end()) groups.emplace_back(doing, range);
      else group->second += ", " + range;
    }
    std::string text;
    for (const auto& g : groups) text += (text.empty() ? "threads " : "; threads ") + g.second + " " + g.first;
    return text;
  }

  int near(int site) const { return site ? site : threads_[thread].site; }

  Configuration c_;
  SharedMemory shared_;
  std::mt19937_64 random_;
  std::vector<Thread> threads_;
  std::vector<int> runnable_;
  std::vector<int> in_shuffle_;  // per warp
  int at_barrier_ = 0, returned_ = 0;
  int64_t epoch_ = 0;
};

}  // namespace emulator
}  // namespace tileops
