// Asynchronous copies: boxes of tensor maps and consecutive bytes (TMA), values for other CTAs, and copies by a thread.
// Each takes effect in a few steps at moments that the scheduler draws.
#pragma once

#include "barriers.h"
#include "elements.h"
#include "tensor_map.h"

namespace tileops {
namespace emulator {

class Copies : public Barriers {
 public:
  using Barriers::Barriers;

  struct Bytes { int64_t read = 0, written = 0; };
  Bytes tma_global, tma_shared;

  void prefetch_tensor_map(const void* map, int site) override {
    at_site(site);
    tensor_map(map, site);
  }

  void load_box(int64_t offset, const Box& box, int64_t at, uint32_t ctas, bool multicast, int site) override {
    at_site(site);
    const char* word = multicast ? "tma_load_multicast" : "tma_load";
    const Mutation* m = mutated(word, site);
    if (m && m->kind == "suppress") return;
    const Pieces pieces = pieces_of(box, offset, m && m->kind == "flip", site);
    if (!multicast) ctas = 1u << rank;
    if (ctas == 0 || ctas >> c_.cluster)
      throw Fault{"cluster", site, "sends to CTAs 0x" + hex(ctas) + " of a cluster of " + text_of(c_.cluster)};
    for (int r = 0; r < c_.cluster; ++r)
      if (ctas >> r & 1) start_load(pieces, r, at, site, !(ctas & ((1u << r) - 1)));
    pass();
  }
  void bulk_load(int64_t offset, const void* origin, int64_t from, int bytes, int64_t at, int site) override {
    at_site(site);
    if (suppressed("bulk_load", site)) return;
    start_load(consecutive(offset, origin, from, bytes, false, site), rank, at, site);
    pass();
  }
  void store_async(int64_t offset, int to, uint32_t bits, int64_t at, int site) override {
    at_site(site);
    if (suppressed("store_async_of_rank", site)) return;
    Pieces pieces;
    pieces.list.push_back({offset, nullptr, 0, 0, 4});
    pieces.value = bits;
    pieces.by_value = true;
    start_load(pieces, to, at, site);
    pass();
  }

  void store_box(int64_t offset, const Box& box, Direction direction, int site) override {
    at_site(site);
    const Mutation* m = mutated(direction == Direction::add ? "tma_reduce_add" : "tma_store", site);
    if (m && m->kind == "suppress") return;
    for (int d = 0; d < box.rank; ++d) {
      if (box.coordinates[d] < 0)  // an illegal instruction, too
        throw Fault{"tensor_map", site, "stores a box that begins at " + text_of(box.coordinates[d]) + " along dimension "
                    + text_of(d) + "; begin inside the tensor (a box may overhang its end)"};
    }
    const TensorMap& t = tensor_map(box.map, site);
    if (const int64_t row = t.extents[0] * t.element_bytes; row % 16 && box.coordinates[0] + t.box[0] > t.extents[0])
      throw Fault{"tensor_map", site, "stores beyond the end of rows of " + text_of(row)
                  + " bytes: whole 16 bytes are written; let rows have a multiple of 16 bytes"};
    start_store(pieces_of(box, offset, m && m->kind == "flip", site), direction == Direction::add, site);
  }
  void bulk_store(int64_t offset, void* origin, int64_t to, int bytes, int site) override {
    at_site(site);
    if (!suppressed("bulk_store", site)) start_store(consecutive(offset, origin, to, bytes, true, site), false, site);
  }
  void store_commit(int site) override {
    at_site(site);
    if (!suppressed("store_commit", site)) commit(stores_[self().number]);
    pass();
  }
  void store_wait(int pending, bool read_only, int site) override {
    const char* word = read_only ? "store_wait_read" : "store_wait";
    const Mutation* m = mutated(word, site);
    if (m && m->kind == "suppress") return;
    wait_for_groups(stores_[self().number], Wait::stores, pending + (m ? m->amount : 0), read_only, site);
  }

  // What copy_async wrote, whoever knows that it has landed may hand to the asynchronous proxy.
  void fence_async(bool shared, int site) override {
    Barriers::fence_async(shared, site);
    if (!shared || !any_copies_ || suppressed("fence_async_shared", site)) return;
    auto later = std::make_shared<Past>(*self().clock.past);
    for (uint32_t actor = 0; actor < later->seen.size(); ++actor)
      if (actors_.kind(actor) == Actor::copies) raise(later->fenced, actor, later->seen[actor]);
    self().clock.past = later;
  }
  void copy_async(int64_t offset, const void* origin, int64_t from, int bytes, int read, int site) override {
    at_site(site);
    offset = swizzled_by("copy_async", offset, site);
    cta().shared.check(offset, bytes, bytes, true, site);
    const Pieces pieces{{{offset, origin, from, read, bytes}}};
    if (read) memory.access(origin, from, read, 1, false, launch_thread(self()), site, bytes, false);
    any_copies_ = true;
    Groups& groups = groups_of(copies_, Actor::copies);
    auto copy = std::make_shared<Copy>(*this, pieces, issue(site));
    copy->event = {groups.actor, groups.committed + 1, site};
    copy->view.asynchronous = false;
    add(groups, copy);
  }
  void copy_commit(int site) override {
    at_site(site);
    if (!suppressed("copy_commit", site)) commit(copies_[self().number]);
  }
  void copy_wait(int pending, int site) override {
    if (!suppressed("copy_wait", site)) wait_for_groups(copies_[self().number], Wait::copies, pending, false, site);
  }
  void arrive_after_copies(int64_t at, int site) override {
    at_site(site);
    if (suppressed("arrive_after_copies", site)) return;
    Thread& t = self();
    Mbarrier& b = barrier(rank, at, t.clock.view(), false, site);
    auto arrival = std::make_shared<Arrival>(*this, b, issue(site));
    t.clock.release(arrival->gathered);
    Groups& groups = copies_[t.number];
    for (const auto& o : groups.operations) arrival->copies.push_back(o);
    if (groups.actor != kNobody) raise(arrival->gathered.past.seen, groups.actor, groups.committed + 1);
    start(arrival);
  }

 protected:
  struct Pieces {
    std::vector<Piece> list;
    uint32_t value = 0;
    bool by_value = false;
    const TensorMap* map = nullptr;
  };
  // What an operation knows of the thread that issued it.
  struct Issued { SharedPast past; View view; int site, thread, rank; uint32_t launch_thread; };
  Issued issue(int site) {
    Thread& t = self();
    Issued i{t.clock.past, t.clock.view(), site, t.index, t.rank, launch_thread(t)};
    i.view.asynchronous = true;
    ++t.clock.clock;  // what the thread does from now on is not ordered before it
    return i;
  }

  struct Transfer : Operation {
    Transfer(Copies& machine, Pieces p, Issued i) : m(machine), pieces(std::move(p)), issued(i), view(i.view) {
      site = i.site;
      thread = i.thread;
      rank = i.rank;
    }
    // How many pieces the next step moves: some run all at once.
    size_t part() const { return m.random_() % 2 ? pieces.list.size() - next : m.random_() % (pieces.list.size() - next) + 1; }
    Copies& m;
    Pieces pieces;
    Issued issued;
    View view;
    Event event;
    size_t next = 0;
  };

  // Into the shared memory of one CTA, counted on an mbarrier there.
  struct Load : Transfer {
    using Transfer::Transfer;
    bool step() override {
      Mbarrier& b = m.barriers_.at({to, barrier});
      if (m.ctas_[to].returned == m.c_.threads)
        throw Fault{"in_flight_at_exit", site, "copies into the CTA of rank " + text_of(to) + ", which has returned"};
      if (b.phase != phase)
        throw Fault{"barrier", site, "brings bytes for phase " + text_of(phase) + " of " + name(barrier)
                    + ", which completed without them; expect the bytes of all copies of the phase"};
      int64_t bytes = 0;
      for (size_t end = next + part(); next < end; ++next) {
        const Piece& p = pieces.list[next];
        char* target = m.ctas_[to].shared.access(p.shared, p.bytes, true, view, event);
        m.fetch(pieces, p, target, issued, first);
        bytes += p.bytes;
        m.tma_global.read += first ? p.inside : 0;
      }
      m.tma_shared.written += bytes;
      const bool over = next == pieces.list.size();
      m.count_bytes(b, bytes, site);
      return over;
    }
    int to = 0;
    bool first = true;  // of a multicast, which reads global memory once
    int64_t barrier = 0;
    uint64_t phase = 0;
  };

  // From shared to global memory: all is read before anything is written.
  struct Store : Transfer {
    using Transfer::Transfer;
    bool step() override {
      const auto& list = pieces.list;
      if (!read) {
        for (size_t end = next + part(); next < end; ++next) {
          const Piece& p = list[next];
          if (!p.inside) continue;
          memcpy(&data[next * 16], m.ctas_[rank].shared.access(p.shared, p.bytes, false, view, event), p.bytes);
          m.tma_shared.read += p.bytes;
          m.tma_global.written += p.inside;
        }
        read = next == list.size();
      } else {
        for (size_t i = 0; i < list.size(); ++i) m.put(pieces, list[i], &data[i * 16], add, issued);
        written = true;
      }
      m.poll(m.stores_[rank * m.c_.threads + thread].waiters);
      return written;
    }
    std::vector<char> data;
    bool add = false, read = false, written = false;
  };

  // By one thread, as if it wrote itself, at some moment before its copy_wait.
  struct Copy : Transfer {
    using Transfer::Transfer;
    bool step() override {
      const Piece& p = pieces.list[0];
      m.fetch(pieces, p, m.ctas_[rank].shared.access(p.shared, p.bytes, true, view, event), issued);
      written = true;
      m.poll(m.copies_[rank * m.c_.threads + thread].waiters);
      return true;
    }
    bool written = false;
  };

  // Of a thread, when its copies so far have landed.
  struct Arrival : Operation {
    Arrival(Copies& machine, Mbarrier& b, Issued i) : m(machine), barrier(b) {
      site = i.site;
      thread = i.thread;
      rank = i.rank;
    }
    bool step() override {
      for (const auto& c : copies)
        if (!static_cast<Copy&>(*c).written) return false;
      join(barrier.gathered.past, gathered.past);
      m.count_arrival(barrier, site);
      return true;
    }
    Copies& m;
    Mbarrier& barrier;
    Gathered gathered;
    std::vector<std::shared_ptr<Operation>> copies;
  };

  // The operations of a thread that are waited for in commit groups.
  struct Groups {
    uint32_t actor = kNobody;
    uint32_t committed = 0, waited = 0, last_used = 0;  // groups; the last that has an operation
    std::vector<std::shared_ptr<Operation>> operations;
    std::vector<uint32_t> group;  // of each operation, from 1 on
    std::vector<int> waiters;
  };

  void reset_cluster() override {
    Barriers::reset_cluster();
    stores_.assign(threads_.size(), Groups());
    copies_.assign(threads_.size(), Groups());
    any_copies_ = false;
  }

  bool ready(const Thread& t) override {
    if (t.wait != Wait::stores && t.wait != Wait::copies) return Barriers::ready(t);
    const Groups& g = t.wait == Wait::stores ? stores_[t.number] : copies_[t.number];
    for (size_t i = 0; i < g.operations.size(); ++i) {
      if (static_cast<int64_t>(g.group[i]) > t.a) continue;
      if (t.wait == Wait::copies && !static_cast<Copy&>(*g.operations[i]).written) return false;
      if (t.wait == Wait::copies) continue;
      const Store& s = static_cast<Store&>(*g.operations[i]);
      if (!(t.b ? s.read : s.written)) return false;
    }
    return true;
  }
  std::string describe_wait(const Thread& t) override {
    if (t.wait == Wait::stores || t.wait == Wait::copies) return "wait for their copies at " + site_text(t.site);
    return Barriers::describe_wait(t);
  }
  void check_return(Thread& t) override {
    Barriers::check_return(t);
    if (stores_[t.number].last_used > stores_[t.number].waited)
      throw Fault{"in_flight_at_exit", stores_[t.number].operations.back()->site,
                  "returns while a store may still read shared memory; call store_wait_read<0> before the end"};
    if (copies_[t.number].last_used > copies_[t.number].waited)
      throw Fault{"in_flight_at_exit", copies_[t.number].operations.back()->site,
                  "returns while a copy_async may still write shared memory; wait for it before the end"};
  }

 private:
  const TensorMap& tensor_map(const void* map, int site) {
    const char* p = static_cast<const char*>(map);
    const char* params = static_cast<const char*>(c_.params);
    const auto* t = static_cast<const TensorMap*>(map);
    if (p < params || p + 128 > params + c_.params_bytes || t->magic != TensorMap::kMagic)
      throw Fault{"tensor_map", site, "uses what is no tensor map of the kernel's parameters"};
    return *t;
  }

  // The pieces of a box, in order.
  Pieces pieces_of(const Box& box, int64_t offset, bool other_swizzle, int site) {
    const TensorMap& t = tensor_map(box.map, site);
    if (t.rank != box.rank)
      throw Fault{"tensor_map", site, "gives " + text_of(box.rank) + " coordinates to a tensor map of " + text_of(t.rank)};
    if (t.element_bytes != box.element_bytes)
      throw Fault{"tensor_map", site, "moves elements of " + text_of(box.element_bytes) + " bytes through a tensor map of "
                  + text_of(t.element_bytes)};
    // The pattern is one of addresses, so that a box which has less than one of it may lie anywhere in it.
    const int64_t bytes = box_bytes(t), period = swizzle_period(t.swizzle);
    cta().shared.check(offset, bytes, bytes < period ? 128 : period, true, site);
    // What the hardware calls an illegal instruction (see tma.h).
    if (const int first = box.coordinates[0] * t.element_bytes; first % 16)
      throw Fault{"tensor_map", site, "begins a box " + text_of(first) + " bytes into a row; begin at a multiple of 16"};
    const int span = other_swizzle ? (t.swizzle ? 0 : 128) : t.swizzle;
    return {pieces_of_box(t, box.coordinates, offset, span), 0, false, &t};
  }
  Pieces consecutive(int64_t offset, const void* origin, int64_t at, int bytes, bool write, int site) {
    if (bytes <= 0 || bytes % 16)
      throw Fault{"misaligned", site, "moves " + text_of(bytes) + " bytes at once; expected a multiple of 16"};
    cta().shared.check(offset, bytes, 16, !write, site);
    if ((reinterpret_cast<uintptr_t>(origin) + at) % 16)
      throw Fault{"misaligned", site, "moves bytes at once from or to a global address that is no multiple of 16"};
    Pieces pieces;
    for (int64_t b = 0; b < bytes; b += 16) pieces.list.push_back({offset + b, origin, at + b, 16, 16});
    return pieces;
  }

  void start_load(const Pieces& pieces, int to, int64_t at, int site, bool first = true) {
    auto load = std::make_shared<Load>(*this, pieces, issue(site));
    const Mbarrier& b = barrier(to, at, load->view, to != rank, site);
    load->to = to;
    load->first = first;
    load->barrier = at;
    load->phase = b.phase;
    load->event = {b.actor, static_cast<uint32_t>(b.phase + 1), site};
    cta_of(to, load->event);
    start(load);
  }
  void start_store(const Pieces& pieces, bool add_to, int site) {
    Groups& groups = groups_of(stores_, Actor::stores);
    auto store = std::make_shared<Store>(*this, pieces, issue(site));
    store->event = {groups.actor, groups.committed + 1, site};
    store->data.resize(pieces.list.size() * 16);
    store->add = add_to;
    add(groups, store);
    pass();
  }

  Groups& groups_of(std::vector<Groups>& all, Actor::Kind kind) {
    Groups& groups = all[self().number];
    if (groups.actor == kNobody) groups.actor = actors_.add({kind, rank, thread});
    return groups;
  }
  void add(Groups& groups, std::shared_ptr<Operation> o) {
    groups.operations.push_back(o);
    groups.group.push_back(groups.committed + 1);
    groups.last_used = groups.committed + 1;
    start(std::move(o));
  }
  void commit(Groups& groups) { ++groups.committed; }
  void wait_for_groups(Groups& groups, Wait what, int pending, bool read_only, int site) {
    const int64_t last = static_cast<int64_t>(groups.committed) - pending;
    at_site(site);
    block_until_ready(what, site, last, read_only, groups.waiters);
    if (last <= groups.waited) return;
    groups.waited = static_cast<uint32_t>(last);
    if (groups.actor != kNobody) self().clock.observe(groups.actor, groups.waited);
    size_t kept = 0;
    for (size_t i = 0; i < groups.operations.size(); ++i) {
      // A store that has been read but not written is still what store_wait waits for.
      if (groups.group[i] <= groups.waited && (!read_only || static_cast<Store&>(*groups.operations[i]).written)) continue;
      groups.operations[kept] = groups.operations[i];
      groups.group[kept++] = groups.group[i];
    }
    groups.operations.resize(kept);
    groups.group.resize(kept);
  }

  void fetch(const Pieces& pieces, const Piece& p, char* target, const Issued& by, bool counts = true) {
    if (pieces.by_value) { memcpy(target, &pieces.value, 4); return; }
    memset(target, 0, p.bytes);
    if (!p.inside) return;
    memcpy(target, memory.access(p.origin, p.global, 1, p.inside, false, by.launch_thread, by.site, 1, counts), p.inside);
  }
  void put(const Pieces& pieces, const Piece& p, const char* data, bool add_to, const Issued& by) {
    if (!p.inside) return;
    char* target = memory.access(p.origin, p.global, 1, p.inside, true, by.launch_thread, by.site, 1);
    if (add_to) add_elements(pieces.map->element, target, data, p.inside);
    else memcpy(target, data, p.inside);
  }

  static std::string hex(uint32_t v) {
    char text[16];
    snprintf(text, sizeof(text), "%x", v);
    return text;
  }

  std::vector<Groups> stores_, copies_;  // per thread of the cluster
  bool any_copies_ = false;
};

}  // namespace emulator
}  // namespace tileops
