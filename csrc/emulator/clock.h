// Vector clocks: which events are ordered before which. An actor is a thread, or an engine whose asynchronous operations are
// waited for in order: the products of a warp group (clock: number of the product), the copies onto an mbarrier (clock: phase),
// the stores of a thread (clock: commit group). An event is (actor, clock).
#pragma once

#include <stdint.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "fault.h"

namespace tileops {
namespace emulator {

using Ticks = std::vector<uint32_t>;  // per actor; what is not there is 0

inline uint32_t tick(const Ticks& t, uint32_t actor) { return actor < t.size() ? t[actor] : 0; }
inline void raise(Ticks& t, uint32_t actor, uint32_t clock) {
  if (t.size() <= actor) t.resize(actor + 1);
  t[actor] = std::max(t[actor], clock);
}
inline void join(Ticks& into, const Ticks& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}
inline bool covers(const Ticks& t, const Ticks& other) {
  if (t.size() < other.size()) return false;
  for (size_t i = 0; i < other.size(); ++i)
    if (t[i] < other[i]) return false;
  return true;
}

// seen: events ordered before now. Of generic writes among them, fenced: those that the asynchronous proxy sees, because their
// own thread has called fence_async_shared after them; released: those that other CTAs see, after a cluster_arrive.
struct Past { Ticks seen, fenced, released; };
constexpr Ticks Past::* kParts[] = {&Past::seen, &Past::fenced, &Past::released};
inline void join(Past& into, const Past& other) {
  for (auto part : kParts) join(into.*part, other.*part);
}
inline bool covers(const Past& p, const Past& other) {
  for (auto part : kParts)
    if (!covers(p.*part, other.*part)) return false;
  return true;
}
using SharedPast = std::shared_ptr<const Past>;

// Who accesses memory. `self` is the thread whose own events up to `clock` (`fenced`, `released`) are known as well.
struct View {
  const Past* past;
  uint32_t self, clock, fenced, released;
  bool asynchronous;
  bool ordered(uint32_t actor, uint32_t at) const { return actor == self ? at <= clock : tick(past->seen, actor) >= at; }
  bool visible(uint32_t actor, uint32_t at) const { return actor == self ? at <= fenced : tick(past->fenced, actor) >= at; }
  bool afar(uint32_t actor, uint32_t at) const { return actor == self ? at <= released : tick(past->released, actor) >= at; }
};
constexpr uint32_t kNobody = 0xffffffffu;

// What the threads that arrive at something know, together.
class Gathered {
 public:
  void add(const SharedPast& p) {
    if (p == last_) return;  // threads that met at a barrier share their past
    join(past, *p);
    last_ = p;
  }
  Past past;

 private:
  SharedPast last_;
};

// A thread's own clock, and the past that it got from others. Many threads share one past, so changes are remembered.
class Clock {
 public:
  SharedPast past = std::make_shared<Past>();
  uint32_t self = kNobody, clock = 1, fenced = 0, released = 0;

  View view() const { return {past.get(), self, clock, fenced, released, false}; }
  void release(Gathered& to) {
    to.add(past);
    raise(to.past.seen, self, clock);
    raise(to.past.fenced, self, fenced);
    raise(to.past.released, self, released);
    ++clock;
  }
  void acquire(const SharedPast& other) {
    if (other == past) return;
    static std::array<Memo, 32> memos;
    static unsigned next = 0;
    for (const Memo& m : memos)
      if (m.from == past && m.other == other) { past = m.result; return; }
    SharedPast result = other;
    if (!covers(*other, *past)) {
      auto joined = std::make_shared<Past>(*past);
      join(*joined, *other);
      result = joined;
    }
    memos[next++ % memos.size()] = {past, other, result};
    past = result;
  }
  // The operations of an engine up to `at` are over.
  void observe(uint32_t actor, uint32_t at) {
    if (tick(past->seen, actor) >= at) return;
    static std::array<Observed, 32> memos;
    static unsigned next = 0;
    for (const Observed& m : memos)
      if (m.from == past && m.actor == actor && m.at == at) { past = m.result; return; }
    auto later = std::make_shared<Past>(*past);
    raise(later->seen, actor, at);
    memos[next++ % memos.size()] = {past, actor, at, later};
    past = later;
  }

 private:
  struct Memo { SharedPast from, other, result; };
  struct Observed { SharedPast from; uint32_t actor = 0, at = 0; SharedPast result; };
};

// Names of actors for messages, and the advice that goes with them.
struct Actor {
  enum Kind { thread, products, loads, stores, copies } kind;
  int rank;
  int64_t number;  // of the thread, the warp group; the byte offset of the mbarrier
};

class Actors {
 public:
  void reset() { all_.clear(); }
  uint32_t add(Actor a) { all_.push_back(a); return static_cast<uint32_t>(all_.size() - 1); }
  int rank(uint32_t actor) const { return all_[actor].rank; }
  Actor::Kind kind(uint32_t actor) const { return all_[actor].kind; }
  bool generic(uint32_t actor) const { return all_[actor].kind == Actor::thread || all_[actor].kind == Actor::copies; }
  std::string name(uint32_t actor, int from_rank) const {
    const Actor& a = all_[actor];
    const std::string where = a.rank == from_rank ? "" : " of the CTA of rank " + text_of(a.rank);
    switch (a.kind) {
      case Actor::thread: return "thread " + text_of(a.number) + where;
      case Actor::products: return "a wgmma of warp group " + text_of(a.number) + where;
      case Actor::loads: return "a copy onto the mbarrier at byte " + text_of(a.number) + where;
      case Actor::stores: return "a store by thread " + text_of(a.number) + where;
      case Actor::copies: return "a copy_async by thread " + text_of(a.number) + where;
    }
    return "";
  }
  std::string advice(uint32_t actor) const {
    switch (all_[actor].kind) {
      case Actor::thread: return "with no barrier between; put a barrier after the earlier of the two";
      case Actor::products: return "with no wgmma_wait that covers it between; wait for it, and tell this thread";
      case Actor::loads: return "with no wait for that phase of the mbarrier between; wait for it first";
      case Actor::stores: return "with no store_wait_read that covers it between; wait for it, then a barrier";
      case Actor::copies: return "with no copy_wait that covers it between; wait for it, then a barrier";
    }
    return "";
  }

 private:
  std::vector<Actor> all_;
};

}  // namespace emulator
}  // namespace tileops
