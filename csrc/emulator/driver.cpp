// Python module of the emulator (tileops_dsl/emulate.py builds and loads it): runs a kernel of a plain shared object.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>

#include "counting.h"

namespace py = pybind11;
using namespace tileops::emulator;

namespace {

void* open_library(const std::string& path) {
  static std::map<std::string, void*> opened;  // never closed: a path names its content
  void*& library = opened[path];
  if (!library) library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(dlerror());
  return library;
}

template <typename F>
F* find(void* library, const std::string& name) {
  void* symbol = dlsym(library, name.c_str());
  if (!symbol) throw std::runtime_error("the source defines no TILEOPS_KERNEL that exports " + name);
  return reinterpret_cast<F*>(symbol);
}

using BufferTuple = std::tuple<uintptr_t, int64_t, bool, std::string, py::bytes>;  // address, bytes, writable, name, mask

std::vector<Buffer> make_buffers(const std::vector<BufferTuple>& tuples) {
  std::vector<Buffer> buffers;
  for (const auto& [address, bytes, writable, name, mask] : tuples)
    buffers.push_back({reinterpret_cast<char*>(address), bytes, writable, name, std::string(mask), {}});
  return buffers;
}

using MutationTuple = std::tuple<std::string, int, std::string, int>;  // word, site, kind, amount

// What a launch on the device refuses too.
void check(const Configuration& c, const std::string& name, int64_t params_bytes, int64_t struct_bytes, int max_threads) {
  const auto refuse = [&](const std::string& what) { throw py::value_error(name + ": " + what); };
  const auto text = [](int64_t n) { return std::to_string(n); };
  if (params_bytes != struct_bytes)
    refuse("the launch passes " + text(params_bytes) + " bytes of parameters; the kernel's struct has " + text(struct_bytes));
  if (c.threads < 1 || c.threads > max_threads)
    refuse("launched with " + text(c.threads) + " threads; the kernel is compiled for 1 to " + text(max_threads));
  if (c.grid_x < 1 || c.grid_x > 0x7fffffff || std::min(c.grid_y, c.grid_z) < 1 || std::max(c.grid_y, c.grid_z) > 65535)
    refuse("grid (" + text(c.grid_x) + ", " + text(c.grid_y) + ", " + text(c.grid_z) +
           "); expected x from 1 to 2147483647, y and z from 1 to 65535");
  if (c.shared_bytes < 0 || c.shared_bytes > 232448)  // 227 KiB: the most a block of sm_90 may have
    refuse(text(c.shared_bytes) + " bytes of shared memory; expected 0 to 232448");
  if (c.cluster < 1 || c.cluster > 16 || c.grid_x % c.cluster)
    refuse("clusters of " + text(c.cluster) + " CTAs for a grid of " + text(c.grid_x) + "; expected 1 to 16 that divide it");
}

py::dict read_and_written(const Copies::Bytes& bytes) {
  py::dict d;
  d["read"] = bytes.read;
  d["written"] = bytes.written;
  return d;
}

// Instructions of warps by word; what accesses shared memory also by site; bytes by who moves them.
void add_counts(py::dict& report, Counting& launch) {
  launch.finish();
  std::map<std::string, int64_t> words;
  py::list accesses;
  for (const auto& [place, count] : launch.words) {
    words[place.first] += count.instructions;
    if (count.wavefronts == 0) continue;
    py::dict d;
    d["word"] = place.first;
    d["site"] = place.second;
    d["instructions"] = count.instructions;
    d["wavefronts"] = count.wavefronts;
    d["conflicts"] = count.wavefronts - count.least;
    accesses.append(d);
  }
  report["words"] = words;
  report["shared_accesses"] = accesses;

  Copies::Bytes by_threads = {-launch.tma_global.read - launch.global_by_copy_async.read, -launch.tma_global.written};
  for (const Buffer& b : launch.memory.buffers()) {
    by_threads.read += b.bytes_read;
    by_threads.written += b.bytes_written;
  }
  py::dict bytes, global, shared;
  global["threads"] = read_and_written(by_threads);
  global["copy_async"] = read_and_written(launch.global_by_copy_async);
  global["tma"] = read_and_written(launch.tma_global);
  shared["threads"] = read_and_written(launch.shared_by_threads);
  shared["copy_async"] = read_and_written(launch.shared_by_copy_async);
  shared["tma"] = read_and_written(launch.tma_shared);
  shared["wgmma"] = read_and_written(launch.shared_by_wgmma);
  bytes["global"] = global;
  bytes["shared"] = shared;
  report["bytes"] = bytes;
  report["peak_shared_bytes"] = launch.peak_shared_bytes();
}

py::dict run(const std::string& library_path, const std::string& name, const std::string& params,
             std::array<int64_t, 3> grid, int threads, int shared_bytes, int cluster,
             const std::vector<BufferTuple>& buffers, uint64_t seed, const std::vector<MutationTuple>& mutations) {
  void* library = open_library(library_path);
  struct alignas(64) Line { char bytes[64]; };  // tensor maps are aligned to 64 bytes
  std::vector<Line> aligned(params.size() / sizeof(Line) + 1);
  memcpy(aligned.data(), params.data(), params.size());
  Configuration c{find<void(const void*)>(library, name), aligned.data(), static_cast<int64_t>(params.size()), grid[0],
                  grid[1], grid[2], threads, shared_bytes, cluster, 0, seed, {}};
  for (const auto& [word, site, kind, amount] : mutations) c.mutations.push_back({word, site, kind, amount});
  const int max_threads = find<int()>(library, name + "_max_threads")(), blocks = find<int()>(library, name + "_min_blocks")();
  check(c, name, params.size(), find<int()>(library, name + "_params_bytes")(), max_threads);
  // What ptxas gives a kernel that changes its budgets: all that the launch bounds leave, in units of 8.
  c.registers = std::min(65536 / (max_threads * std::max(blocks, 1)) / 8 * 8, 256);

  Counting launch(std::move(c), make_buffers(buffers));
  find<void(Machine*)>(library, "tileops_emulator_attach")(&launch);
  const bool finished = launch.run();
  fflush(stdout);  // what kernels printed stands in front of what Python prints next

  py::dict report, by_name;
  for (const Buffer& b : launch.memory.buffers()) {
    py::dict d;
    d["bytes_read"] = b.bytes_read;
    d["bytes_written"] = b.bytes_written;
    d["unwritten"] = b.unwritten();
    d["rewritten"] = b.rewritten;
    by_name[py::str(b.name)] = d;
  }
  report["buffers"] = by_name;
  add_counts(report, launch);
  report["barriers"] = launch.barriers;
  report["shuffles"] = launch.shuffles;
  report["asynchronous"] = launch.operations;
  if (!finished)
    report["fault"] = py::make_tuple(launch.fault->kind, launch.fault->site, launch.fault->text, launch.fault->thread,
                                     py::make_tuple(launch.block_x, launch.block_y, launch.block_z));
  return report;
}

}  // namespace

PYBIND11_MODULE(tileops_emulator, m) { m.def("run", &run); }
