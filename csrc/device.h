// What each GPU can run, found at its first use and kept; the current stream and device.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include <atomic>
#include <memory>
#include <string>

#include "torch_shim.h"
#include "variant.h"

namespace tileops {

struct Device {
  std::string name;  // NVIDIA H200
  int capability = 0;  // 90 for 9.0
  int multiprocessors = 0;
  Target targets[2];  // what it runs, the preferred first
  int target_count = 0;  // 0: nothing in this build
  std::string reason;  // why it runs nothing, or why not the target that is preferred on it
  std::atomic<bool> warned{false};
  std::unique_ptr<std::atomic<bool>[]> loaded;  // per row of row_variants
  // Per row of the tables of persistent kernels, see resident_ctas; 0: not loaded.
  std::unique_ptr<std::atomic<int>[]> resident_products, resident_attentions, resident_decodes, resident_mlas;

  bool runs(Target target) const;
};

const char* target_name(Target target);

// The device is current (DeviceScope) when these are called. Both are safe under stream capture, also as the first call of all.
Device& device_at(int32_t index);
void load_kernel(Device& device, const RowVariant& variant);  // before its first launch on the device
// The same for a persistent kernel; returns how many of its CTAs the device runs at a time, in whole clusters.
int resident_ctas(Device& device, const ProductVariant& variant);
int resident_ctas(Device& device, const AttentionVariant& variant);
int resident_ctas(Device& device, const DecodeVariant& variant);
int resident_ctas(Device& device, const MlaVariant& variant);

// Starts a kernel of the operator `op`. Without a cluster (0) its CTAs start as fast as they fit.
struct Launch {
  const char *op, *name;
  const void* kernel;
  dim3 grid;
  int threads, shared_bytes, cluster;
  bool dependent = false;  // starts while the kernel before it on the stream still runs, and waits for it (grid_dependency_wait)
};
void launch_kernel(const Launch& launch, void* params, cudaStream_t stream);

cudaStream_t current_stream(int32_t device_index);
std::string cuda_text(cudaError_t code);

// Makes a device current. Through torch's guard where it is not: a bare cudaSetDevice back would create a context on a device
// that the process never used.
class DeviceScope {
 public:
  explicit DeviceScope(int32_t index);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;

 private:
  DeviceGuardHandle guard_ = nullptr;
};

std::string status_json();

}  // namespace tileops
