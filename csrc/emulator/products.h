// wgmma: products of a warp group, which run in order, each at a moment between its issue by the last of the 128 threads and
// the wait that covers it. Shared memory is read at that moment; registers of A must not change and accumulators not be used
// until the wait.
#pragma once

#include <limits>

#include "copies.h"

namespace tileops {
namespace emulator {

constexpr int kSwizzleBytes[] = {0, 128, 64, 32};  // as matrix descriptors count

// Place in shared memory of the 16-byte piece `piece` of line `line`. K-major: lines of M or N, 2 pieces of K. MN-major: lines
// of K, pieces of 8 elements of M or N. As PTX ISA has it ("Matrix descriptor", "Strides"): start address, the strides of the
// descriptor, then the swizzle over the bits of the address.
inline int64_t piece_address(const Matrix& m, int line, int piece) {
  const int span = kSwizzleBytes[m.swizzle];
  int64_t at = m.address;
  if (span == 0) {
    // 8 lines of 16 bytes lie together; K-major: leading along K, stride along M or N; MN-major the other way.
    const int64_t lines = m.major ? m.leading : m.stride, pieces = m.major ? m.stride : m.leading;
    return at + line / 8 * lines + line % 8 * 16 + piece * pieces;
  }
  at += line / 8 * static_cast<int64_t>(m.stride) + line % 8 * span;
  at += piece / (span / 16) * static_cast<int64_t>(m.leading) + piece % (span / 16) * 16;
  return swizzled(at, span);
}

class Products : public Copies {
 public:
  using Copies::Copies;

  void wgmma(const Product& given, int site) override {
    Thread& t = self();
    at_site(site);
    Product p = given;
    if (const Mutation* m = mutated("wgmma", site)) {
      if (m->kind == "suppress") return;
      int& swizzle = m->kind == "flip_a" ? p.a.swizzle : p.b.swizzle;
      swizzle = swizzle == 1 ? 2 : 1;
    }
    if (c_.threads < (t.index / 128 + 1) * 128)
      throw Fault{"wgmma", site, "multiplies in a warp group of fewer than 128 threads"};
    Engine& engine = engines_[engine_of(t)];
    const uint32_t number = ++t.issued;
    check(p, site);
    if (number > engine.last) create(engine, p, number, site);
    Work& work = *engine.open[number - engine.done - 1];
    if (!work.same(p, site))
      throw Fault{"diverged", site, "issues a wgmma other than that of " + site_text(work.site)
                  + ", which other threads of the warp group issue; all must issue the same, with the same operands"};
    issue_accumulators(t, work, p, number, site);
    if (p.a_registers) issue_operand(t, work, p, number, site);
    t.clock.release(work.past[t.index % 128 / 32]);
    if (++work.issued == 128 && number == engine.done + 1) start(engine.open[0]);
    pass();
  }
  void wgmma_fence(int site) override {
    at_site(site);
    if (suppressed("wgmma_fence", site)) return;
    wgmma_fences = ++self().fences;
  }
  void wgmma_commit(int site) override {
    at_site(site);
    if (suppressed("wgmma_commit", site)) return;
    self().commits.push_back(self().issued);
    pass();
  }
  void wgmma_wait(int pending, int site) override {
    Thread& t = self();
    at_site(site);
    if (const Mutation* m = mutated("wgmma_wait", site)) {
      if (m->kind == "suppress") return;
      pending += m->amount;
    }
    const int groups = static_cast<int>(t.commits.size());
    if (groups <= pending) return;
    const uint32_t last = t.commits[groups - 1 - pending];
    if (last <= t.waited) return;
    Engine& engine = engines_[engine_of(t)];
    block_until_ready(Wait::products, site, last, 0, engine.waiters);
    t.waited = last;
    t.clock.observe(engine.actor, last);
    deliver(t, last);
  }

  void register_in_flight(uint32_t mark, bool write, int site) override {
    static constexpr const char* kKinds[] = {"", "", "accumulator_in_flight", "operand_in_flight", "missing_operand_fence"};
    mark &= 7;
    const std::string verb = write ? "writes a register" : "reads a register";
    const std::string why = mark == kAccumulating ? " that a wgmma in flight will write; wait for it (wgmma_wait) first"
                            : mark == kOperand ? " that a wgmma in flight reads as operand A; wait for it (wgmma_wait) first"
                                               : " that a wgmma wrote; call fence_operand after the wait, before the use";
    throw Fault{kKinds[mark], site ? site : self().site, verb + why};
  }
  void fragment_ends_in_flight() override {
    drop(Fault{"accumulator_in_flight", self().site, "leaves the scope of a fragment that a wgmma in flight uses; wait first"});
  }

 protected:
  struct Work : Operation {
    Work(Products& machine, const Product& product, uint32_t n) : m(machine), p(product), number(n), a(64 * k()) {}
    int k() const { return p.type_a == Type::bf16 || p.type_a == Type::f16 ? 16 : 32; }
    bool same(const Product& o, int at) const {
      const auto equal = [](const Matrix& x, const Matrix& y) {
        return x.address == y.address && x.swizzle == y.swizzle && x.major == y.major && x.stride == y.stride
               && x.leading == y.leading;
      };
      return at == site && p.n == o.n && p.type_a == o.type_a && p.type_b == o.type_b && p.accumulate == o.accumulate
             && equal(p.b, o.b) && !p.a_registers == !o.a_registers && (p.a_registers || equal(p.a, o.a));
    }
    bool step() override { m.multiply(*this); return true; }
    Products& m;
    Product p;
    uint32_t number;
    int issued = 0, engine = 0;
    std::vector<float> a;  // [64][k]
    std::shared_ptr<std::vector<float>> d;  // [64][n]
    bool continues = false;
    Gathered past[4];  // of the warps
  };
  struct Engine {
    uint32_t actor = 0, last = 0, done = 0;  // products: created, and over
    std::deque<std::shared_ptr<Work>> open;
    std::vector<int> waiters;
  };

  void reset_cluster() override {
    Copies::reset_cluster();
    const int groups = (c_.threads + 127) / 128;
    engines_.assign(c_.cluster * groups, Engine());
    for (size_t i = 0; i < engines_.size(); ++i)
      engines_[i].actor = actors_.add({Actor::products, static_cast<int>(i) / groups, static_cast<int>(i) % groups});
  }
  bool ready(const Thread& t) override {
    return t.wait == Wait::products ? engines_[engine_of(t)].done >= t.a : Copies::ready(t);
  }
  std::string describe_wait(const Thread& t) override {
    if (t.wait != Wait::products) return Copies::describe_wait(t);
    const Engine& e = engines_[engine_of(t)];
    return "wait for a wgmma at " + site_text(t.site) + (e.open.empty() ? "" : " (" + text_of(e.open[0]->issued)
           + " of 128 threads have issued that of " + site_text(e.open[0]->site) + ")");
  }
  void check_return(Thread& t) override {
    Copies::check_return(t);
    if (t.issued > t.waited)
      throw Fault{"in_flight_at_exit", t.site,
                  "returns with a wgmma in flight; commit it and wait (wgmma_wait<0>) before the end"};
  }

 private:
  size_t engine_of(const Thread& t) const { return t.rank * ((c_.threads + 127) / 128) + t.index / 128; }

  void check(const Product& p, int site) {
    for (const Matrix* m : {p.a_registers ? nullptr : &p.a, &p.b}) {
      if (!m) continue;
      if (m->address % 16 || m->stride % 16 || m->leading % 16)
        throw Fault{"misaligned", site, "gives wgmma an operand at byte " + text_of(m->address) + "; addresses and strides are "
                    "multiples of 16"};
      const int period = kSwizzleBytes[m->swizzle] * 8;
      // Within a row a later K may start; the rows must start where the pattern does: the descriptor's base offset is 0.
      if (period && m->address % period >= kSwizzleBytes[m->swizzle])
        throw Fault{"misaligned", site, "gives wgmma an operand at byte " + text_of(m->address) + ", within the "
                    + text_of(period) + " bytes of a swizzle pattern; tiles start at multiples of it"};
    }
  }

  void create(Engine& engine, const Product& p, uint32_t number, int site) {
    engine.last = number;
    auto work = std::make_shared<Work>(*this, p, number);
    work->site = site;
    work->thread = thread;
    work->rank = rank;
    work->engine = static_cast<int>(&engine - engines_.data());
    for (const InFlight& f : self().in_flight)
      if (f.cells == p.d && f.accumulator) { work->d = f.accumulator; work->continues = true; }
    if (!work->d) work->d = std::make_shared<std::vector<float>>(64 * p.n);
    engine.open.push_back(work);
  }

  void issue_accumulators(Thread& t, Work& work, const Product& p, uint32_t number, int site) {
    const int count = p.n / 2;
    for (InFlight& f : t.in_flight) {
      const bool overlaps = f.cells < p.d + count && p.d < f.cells + f.count;
      if (!overlaps) continue;
      if (!f.accumulator) register_in_flight(kOperand, true, site);
      if (f.cells != p.d || f.count != count)
        throw Fault{"accumulator_in_flight", site,
                    "accumulates into registers of which a wgmma in flight uses a part; wait first"};
      if (f.accumulator != work.d) throw Fault{"diverged", site, "waits for a wgmma that other threads do not wait for"};
      f.product = number;
      return;
    }
    if (work.continues) throw Fault{"diverged", site, "waits for a wgmma that other threads do not wait for"};
    for (int i = 0; i < count; ++i) {
      Cell& c = p.d[i];
      if (p.accumulate) {
        if ((c.mark & 7) == kUnwritten) register_unwritten(i, site);
        memcpy(&(*work.d)[row(t, i) * p.n + column(t, i)], &c.bits, 4);
      }
      check_fenced(c, site);
      c.bits = 0x7fc00000u;
      c.mark = kAccumulating;
    }
    t.in_flight.push_back({p.d, count, number, work.d});
  }
  void issue_operand(Thread& t, Work& work, const Product& p, uint32_t number, int site) {
    const bool wide = work.k() == 16;
    const int count = wide ? 8 : 16, per_word = wide ? 2 : 4;
    for (int i = 0; i < count; ++i) {
      Cell& c = p.a_registers[i];
      if ((c.mark & 7) == kUnwritten) register_unwritten(i, site);
      if ((c.mark & 7) == kAccumulating || (c.mark & 7) == kDelivered) register_in_flight(c.mark, false, site);
      check_fenced(c, site);
      const int word = i / per_word, lane = t.index % 32;
      const int row = t.index % 128 / 32 * 16 + lane / 4 + 8 * (word % 2);
      const int k = (wide ? 8 : 16) * (word / 2) + per_word * (lane % 4) + i % per_word;
      work.a[row * work.k() + k] = as_float(p.type_a, &c.bits);
      c.mark = (c.mark & ~7u) | kOperand;
    }
    t.in_flight.push_back({p.a_registers, count, number, nullptr});
  }
  void check_fenced(const Cell& c, int site) {
    if ((c.mark & 7) != kUnwritten && (c.mark & 7) != kDelivered && c.mark >> 3 == self().fences)
      throw Fault{"missing_wgmma_fence", site, "gives wgmma a register that was written after the last wgmma_fence"};
    if (self().fences == 0) throw Fault{"missing_wgmma_fence", site, "issues the first wgmma without a wgmma_fence before it"};
  }

  static int row(const Thread& t, int i) { return t.index % 128 / 32 * 16 + t.index % 32 / 4 + 8 * (i / 2 % 2); }
  static int column(const Thread& t, int i) { return 8 * (i / 4) + 2 * (t.index % 4) + i % 2; }

  void deliver(Thread& t, uint32_t last) {
    std::vector<InFlight> still;
    for (const InFlight& f : t.in_flight) {
      if (f.product > last) { still.push_back(f); continue; }
      const int n = f.count * 2;
      for (int i = 0; i < f.count; ++i) {
        Cell& c = f.cells[i];
        if (f.accumulator) {
          memcpy(&c.bits, &(*f.accumulator)[row(t, i) * n + column(t, i)], 4);
          c.mark = kDelivered;
        } else {
          c.mark = (c.mark & ~7u) | kWritten;
        }
      }
    }
    for (const InFlight& f : still)  // a register may be the operand of several
      if (!f.accumulator)
        for (int i = 0; i < f.count; ++i) f.cells[i].mark = (f.cells[i].mark & ~7u) | kOperand;
    t.in_flight = std::move(still);
  }

  void multiply(Work& w) {
    const int n = w.p.n, k = w.k();
    SharedMemory& shared = ctas_[w.rank].shared;
    const Event event{engines_[w.engine].actor, w.number, w.site};
    const auto view_of = [](const Past& p) { return View{&p, kNobody, 0, 0, 0, true}; };
    if (!w.p.a_registers)  // each warp reads the rows of its own part of the result
      for (int warp = 0; warp < 4; ++warp)
        gather(shared, w.p.a, w.p.type_a, warp * 16, 16, k, view_of(w.past[warp].past), event, w.a.data(), true);
    // Each warp reads all of B: what one of them has not waited for is not there.
    Past known = w.past[0].past;
    for (int warp = 1; warp < 4; ++warp) meet(known, w.past[warp].past);
    std::vector<float> b(k * n);
    gather(shared, w.p.b, w.p.type_b, 0, n, k, view_of(known), event, b.data(), false);
    if (!w.p.accumulate) std::fill(w.d->begin(), w.d->end(), 0.0f);
    for (int i = 0; i < 64; ++i) {
      float* d = &(*w.d)[i * n];
      for (int l = 0; l < k; ++l) {
        const float x = w.a[i * k + l];
        const float* y = &b[l * n];
        for (int j = 0; j < n; ++j) d[j] += x * y[j];
      }
    }
    Engine& engine = engines_[w.engine];
    ++engine.done;
    engine.open.pop_front();
    if (!engine.open.empty() && engine.open[0]->issued == 128) start(engine.open[0]);
    poll(engine.waiters);
  }
  static void meet(Past& into, const Past& other) {
    for (auto part : kParts)
      for (size_t i = 0; i < (into.*part).size(); ++i)
        (into.*part)[i] = std::min((into.*part)[i], tick(other.*part, static_cast<uint32_t>(i)));
  }

  // Lines first..first+count-1 of M or N, all of K, to [M][K] (A) or [K][N] (B).
  void gather(SharedMemory& shared, const Matrix& m, Type type, int first, int count, int k, const View& view,
              const Event& event, float* to, bool is_a) {
    const int elements = k == 16 ? 8 : 16, bytes = 16 / elements;  // of a piece, of an element
    const int lines = m.major ? k : count, pieces = (m.major ? count : k) / elements;
    for (int l = 0; l < lines; ++l)
      for (int p = 0; p < pieces; ++p) {
        const int line = m.major ? l : l + first, piece = m.major ? p + first / elements : p;
        const char* data = shared.access(piece_address(m, line, piece), 16, false, view, event, false);
        for (int e = 0; e < elements; ++e) {
          const int outer = m.major ? piece * elements + e : line, inner = m.major ? line : piece * elements + e;
          to[is_a ? outer * k + inner : inner * count + outer] = as_float(type, data + e * bytes);
        }
      }
  }

  std::vector<Engine> engines_;
};

}  // namespace emulator
}  // namespace tileops
