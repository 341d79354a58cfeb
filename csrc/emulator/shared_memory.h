// What the emulator knows of each byte of a CTA's shared memory: who wrote it last, and who has read it since.
#pragma once

#include <string.h>

#include "clock.h"

namespace tileops {
namespace emulator {

struct Event { uint32_t actor = kNobody, clock = 0; int site = 0; };

// Two accesses of one byte, one of them a write, are a race unless the first is ordered before the second; and the
// asynchronous proxy (TMA, wgmma) sees what a thread wrote only after that thread's fence.
class SharedMemory {
 public:
  SharedMemory(int bytes, int rank, const Actors& actors)
      : bytes_(bytes), rank_(rank), actors_(actors), storage_(new char[bytes + kAlignment]), shadow_(bytes) {
    const uintptr_t p = reinterpret_cast<uintptr_t>(storage_.get());
    arena_ = storage_.get() + (kAlignment - p % kAlignment);
  }

  int64_t peak = 0;  // bytes up to the last one that was ever accessed

  void reset() {
    memset(arena_, 0xff, bytes_);  // NaN in each of the element types
    shadow_.assign(bytes_, Shadow());
    more_.clear();
  }

  // Checks that `bytes` bytes lie inside and are aligned to `alignment`.
  void check(int64_t at, int64_t bytes, int64_t alignment, bool write, int site) const {
    const auto what = [&] { return (write ? "writes " : "reads ") + where(at, bytes); };
    if (at < 0 || at > bytes_ - bytes)
      throw Fault{"out_of_bounds", site, what() + " of the " + text_of(bytes_)
                  + " that this launch has; raise the launch's shared bytes or bound the offset"};
    if (at % alignment)
      throw Fault{"misaligned", site, what() + ", but the offset is no multiple of " + text_of(alignment)
                  + "; align the buffer in the shared-memory plan"};
  }

  // Records the access and returns where to copy from or to. `self`: the event as which it is remembered.
  char* access(int64_t at, int bytes, bool write, const View& view, const Event& self, bool unwritten_is_a_fault = true) {
    check(at, bytes, bytes, write, self.site);
    peak = std::max(peak, at + bytes);
    for (int64_t i = at; i < at + bytes; ++i) {
      Shadow& s = shadow_[i];
      if (s.barrier)
        throw Fault{"barrier_as_data", self.site, (write ? "writes " : "reads ") + where(at, bytes)
                    + ", where an mbarrier lies; buffers and barriers must not overlap in the shared-memory plan"};
      if (s.write.actor == kNobody) {
        if (!write && unwritten_is_a_fault) throw unwritten(at, bytes, self.site);
      } else if (!same(s.write, self)) {
        if (!view.ordered(s.write.actor, s.write.clock)) throw race(at, bytes, write, s.write, true, self.site);
        if (view.asynchronous && actors_.generic(s.write.actor) && !view.visible(s.write.actor, s.write.clock))
          throw unfenced(at, bytes, write, s.write, self.site);
        if (actors_.generic(s.write.actor) && actors_.rank(s.write.actor) != actors_.rank(self.actor)
            && !view.afar(s.write.actor, s.write.clock))
          throw unreleased(at, bytes, write, s.write, self.site);
      } else if (view.asynchronous && write) {
        throw race(at, bytes, write, s.write, true, self.site);  // two copies in one phase
      }
      if (write) {
        check_readers(s, view, at, bytes, self);
        s.write = self;
        s.read = Event();
        s.more = -1;
      } else {
        record_read(s, view, self);
      }
    }
    return arena_ + at;
  }

  // The eight bytes of an mbarrier, from its initialisation on.
  void claim_barrier(int64_t at, const View& view, const Event& self) {
    access(at, 8, true, view, self);
    for (int i = 0; i < 8; ++i) shadow_[at + i].barrier = true;
  }

 private:
  struct Shadow {
    Event write, read;  // read: the last reader, or one of them
    int more = -1;      // index of the list of further readers
    bool barrier = false;
  };

  static bool same(const Event& a, const Event& b) { return a.actor == b.actor && a.clock == b.clock; }
  static std::string where(int64_t at, int64_t bytes) {
    return "shared bytes " + text_of(at) + ".." + text_of(at + bytes - 1);
  }

  void check_readers(const Shadow& s, const View& view, int64_t at, int bytes, const Event& self) const {
    const auto check_one = [&](const Event& r) {
      if (r.actor != kNobody && !view.ordered(r.actor, r.clock)) throw race(at, bytes, true, r, false, self.site);
    };
    check_one(s.read);
    if (s.more >= 0)
      for (const Event& r : more_[s.more]) check_one(r);
  }
  // A read that is ordered before a later one need not be kept: who comes after the later one comes after both.
  void record_read(Shadow& s, const View& view, const Event& self) {
    const auto superseded = [&](const Event& r) {
      return r.actor == kNobody || r.actor == self.actor || view.ordered(r.actor, r.clock);
    };
    if (s.more < 0 && superseded(s.read)) { s.read = self; return; }
    if (s.more < 0) {
      s.more = static_cast<int>(more_.size());
      more_.emplace_back();
    }
    std::vector<Event>& list = more_[s.more];
    list.erase(std::remove_if(list.begin(), list.end(), superseded), list.end());
    list.push_back(self);
  }

  Fault race(int64_t at, int64_t bytes, bool write, const Event& other, bool other_writes, int site) const {
    return Fault{"race", site, (write ? "writes " : "reads ") + where(at, bytes) + ", which "
                 + actors_.name(other.actor, rank_) + (other_writes ? " wrote at " : " reads at ") + site_text(other.site) + " "
                 + actors_.advice(other.actor)};
  }
  Fault unfenced(int64_t at, int64_t bytes, bool write, const Event& other, int site) const {
    return Fault{"missing_fence", site, (write ? "writes " : "reads ") + where(at, bytes) + " asynchronously, which "
                 + actors_.name(other.actor, rank_) + " wrote at " + site_text(other.site)
                 + " without fence_async_shared after it; let each writing thread fence, then a barrier"};
  }
  Fault unreleased(int64_t at, int64_t bytes, bool write, const Event& other, int site) const {
    return Fault{"missing_release", site, (write ? "writes " : "reads ") + where(at, bytes) + ", which "
                 + actors_.name(other.actor, rank_) + " wrote at " + site_text(other.site)
                 + " without cluster_arrive after it; an arrival at an mbarrier shows no writes to other CTAs"};
  }
  static Fault unwritten(int64_t at, int64_t bytes, int site) {
    return Fault{"unwritten_shared", site, "reads " + where(at, bytes)
                 + ", which no thread of the block has written yet; store them first, with a barrier between"};
  }

  static constexpr int kAlignment = 1024;
  int bytes_, rank_;
  const Actors& actors_;
  std::unique_ptr<char[]> storage_;
  char* arena_;
  std::vector<Shadow> shadow_;
  std::vector<std::vector<Event>> more_;
};

}  // namespace emulator
}  // namespace tileops
