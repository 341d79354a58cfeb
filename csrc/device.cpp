#include "device.h"

#include <dlfcn.h>

#include <mutex>
#include <stdexcept>

#include "schemas.h"
#include "stable.h"

namespace tileops {

namespace {

constexpr int kMaxDevices = 64;

std::atomic<Device*> devices[kMaxDevices];  // never freed

// Loading a module and asking for attributes are calls that a capture in progress forbids unless its thread is relaxed about
// them.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() {
    cudaThreadExchangeStreamCaptureMode(&mode_);
    cudaGetLastError();  // a failed question must not surface in somebody's later check
  }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// From libcuda itself, which answers without being initialised (a process that only asked for the status can still fork). 0: no
// driver.
int driver_version() {
  static const int version = [] {
    int v = 0;
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    void* symbol = driver ? dlsym(driver, "cuDriverGetVersion") : nullptr;
    if (symbol) reinterpret_cast<int (*)(int*)>(symbol)(&v);
    return v;
  }();
  return version;
}

std::string cuda_version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string driver_message() {
  const int version = driver_version();
  if (version == 0) return "no NVIDIA driver (libcuda.so.1) was found";
  if (version / 1000 >= CUDART_VERSION / 1000) return "";
  return "the NVIDIA driver supports CUDA " + cuda_version_text(version) + " and this build needs " +
         std::to_string(CUDART_VERSION / 1000) + ".0 or newer; update the driver";
}

// These say that the build has no code for the device; anything else is a failure of the moment: it is raised, and asked again.
bool means_no_image(cudaError_t code) {
  return code == cudaErrorInvalidDeviceFunction || code == cudaErrorNoKernelImageForDevice ||
         code == cudaErrorUnsupportedPtxVersion || code == cudaErrorInvalidPtx || code == cudaErrorJitCompilerNotFound ||
         code == cudaErrorJitCompilationDisabled;
}

template <typename Variant>
const void* first_kernel(const Variant* variants, int count, Target target) {
  for (int i = 0; i < count; ++i) {
    if (variants[i].target == target) return variants[i].kernel;
  }
  return nullptr;
}

const void* any_kernel(Target target) {
  if (const void* kernel = first_kernel(row_variants, row_variant_count, target)) return kernel;
  if (const void* kernel = first_kernel(product_variants, product_variant_count, target)) return kernel;
  if (const void* kernel = first_kernel(attention_variants, attention_variant_count, target)) return kernel;
  if (const void* kernel = first_kernel(decode_variants, decode_variant_count, target)) return kernel;
  return first_kernel(mla_variants, mla_variant_count, target);
}

bool has_image(Target target) {
  const void* kernel = any_kernel(target);
  if (!kernel) return false;
  cudaFuncAttributes attributes;
  const cudaError_t code = cudaFuncGetAttributes(&attributes, kernel);
  if (code != cudaSuccess && !means_no_image(code))
    throw std::runtime_error("tileops: cannot load a kernel: " + cuda_text(code));
  return code == cudaSuccess;
}

template <typename Variant>
[[noreturn]] void throw_unloadable(const Device& device, const Variant& variant, const std::string& why) {
  throw std::runtime_error(std::string(variant.op) + ": kernel " + variant.name + " does not load on " + device.name + ": " +
                           why);
}

void find_targets(Device& device, int32_t index) {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess) {
    const std::string message = driver_message();
    device.reason =
        code == cudaErrorInsufficientDriver && !message.empty() ? message : "CUDA does not start: " + cuda_text(code);
    return;
  }
  cudaDeviceProp properties;
  const cudaError_t asked = cudaGetDeviceProperties(&properties, index);
  if (asked != cudaSuccess) throw std::runtime_error("tileops: cannot read the properties of the GPU: " + cuda_text(asked));
  device.name = properties.name;
  device.capability = properties.major * 10 + properties.minor;
  device.multiprocessors = properties.multiProcessorCount;
  if (device.capability == 90 && has_image(Target::sm_90a)) device.targets[device.target_count++] = Target::sm_90a;
  if (has_image(Target::portable)) device.targets[device.target_count++] = Target::portable;
  if (device.target_count == 0) {
    device.reason = "this build (" + std::string(build_targets) + ") has no code for " + device.name +
                    " of compute capability " + std::to_string(properties.major) + "." + std::to_string(properties.minor);
  }
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

std::string targets_json() {
  std::string text = "[", word;
  for (const char* c = build_targets;; ++c) {
    if (*c != ',' && *c != '\0') {
      word += *c;
      continue;
    }
    if (!word.empty()) text += (text.size() > 1 ? ", " : "") + quoted(word);
    word.clear();
    if (*c == '\0') return text + "]";
  }
}

template <typename Variant>
int known_or_asked(std::atomic<int>& resident, const Device& device, const Variant& variant, int cluster) {
  const int known = resident.load(std::memory_order_acquire);
  if (__builtin_expect(known != 0, 1)) return known;
  const RelaxedCapture relaxed;
  int fit = 0;  // on a multiprocessor
  cudaError_t code = cudaFuncSetAttribute(variant.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, variant.shared_bytes);
  if (code == cudaSuccess)
    code = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, variant.kernel, variant.threads, variant.shared_bytes);
  if (code != cudaSuccess) throw_unloadable(device, variant, cuda_text(code));
  const int ctas = fit * device.multiprocessors / cluster * cluster;
  if (ctas == 0) throw_unloadable(device, variant, "a multiprocessor has no room for its registers and shared memory");
  resident.store(ctas, std::memory_order_release);
  return ctas;
}

}  // namespace

bool Device::runs(Target target) const {
  for (int i = 0; i < target_count; ++i) {
    if (targets[i] == target) return true;
  }
  return false;
}

const char* target_name(Target target) { return target == Target::sm_90a ? "sm_90a" : "portable"; }

std::string cuda_text(cudaError_t code) { return std::string(cudaGetErrorString(code)) + " (" + cudaGetErrorName(code) + ")"; }

Device& device_at(int32_t index) {
  if (index < 0 || index >= kMaxDevices)
    throw std::runtime_error("tileops: device index " + std::to_string(index) + " is out of range");
  Device* device = devices[index].load(std::memory_order_acquire);
  if (device) return *device;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  device = devices[index].load(std::memory_order_acquire);
  if (device) return *device;
  auto fresh = std::make_unique<Device>();
  const RelaxedCapture relaxed;
  find_targets(*fresh, index);
  fresh->loaded.reset(new std::atomic<bool>[row_variant_count]());
  fresh->resident_products.reset(new std::atomic<int>[product_variant_count]());
  fresh->resident_attentions.reset(new std::atomic<int>[attention_variant_count]());
  fresh->resident_decodes.reset(new std::atomic<int>[decode_variant_count]());
  fresh->resident_mlas.reset(new std::atomic<int>[mla_variant_count]());
  devices[index].store(fresh.get(), std::memory_order_release);
  return *fresh.release();
}

void load_kernel(Device& device, const RowVariant& variant) {
  std::atomic<bool>& loaded = device.loaded[&variant - row_variants];
  if (__builtin_expect(loaded.load(std::memory_order_acquire), 1)) return;
  const RelaxedCapture relaxed;
  cudaFuncAttributes attributes;
  const cudaError_t code = cudaFuncGetAttributes(&attributes, variant.kernel);
  if (code != cudaSuccess) throw_unloadable(device, variant, cuda_text(code));
  loaded.store(true, std::memory_order_release);
}

int resident_ctas(Device& device, const ProductVariant& variant) {
  return known_or_asked(device.resident_products[&variant - product_variants], device, variant, variant.cluster);
}

int resident_ctas(Device& device, const AttentionVariant& variant) {
  return known_or_asked(device.resident_attentions[&variant - attention_variants], device, variant, 1);
}

int resident_ctas(Device& device, const DecodeVariant& variant) {
  return known_or_asked(device.resident_decodes[&variant - decode_variants], device, variant, 1);
}

int resident_ctas(Device& device, const MlaVariant& variant) {
  return known_or_asked(device.resident_mlas[&variant - mla_variants], device, variant, 1);
}

void launch_kernel(const Launch& launch, void* params, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (launch.cluster > 0) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(launch.cluster), 1, 1};
  }
  if (launch.dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = launch.grid;
  config.blockDim = dim3(launch.threads, 1, 1);
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  void* arguments[] = {params};
  const cudaError_t code = cudaLaunchKernelExC(&config, launch.kernel, arguments);
  if (__builtin_expect(code != cudaSuccess, 0)) {
    cudaGetLastError();
    throw std::runtime_error(std::string(launch.op) + ": launching " + launch.name + " failed: " + cuda_text(code));
  }
}

cudaStream_t current_stream(int32_t device_index) {
  if (!aoti_torch_get_current_cuda_stream)
    throw std::runtime_error("tileops: this torch has no CUDA, so there is no stream to launch on");
  void* stream = nullptr;
  torch_check(aoti_torch_get_current_cuda_stream(device_index, &stream), "reading the current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

DeviceScope::DeviceScope(int32_t index) {
  int current = index;
  if (cudaGetDevice(&current) != cudaSuccess) {
    cudaGetLastError();  // a driver that is too old: device_at gives the reason
  } else if (__builtin_expect(current != index, 0)) {
    torch_check(aoti_torch_create_device_guard(index, &guard_), "making the GPU of x current");
  }
}

DeviceScope::~DeviceScope() {
  if (guard_) aoti_torch_delete_device_guard(guard_);
}

std::string status_json() {
  const int variants = row_variant_count + product_variant_count + attention_variant_count + decode_variant_count +
                       mla_variant_count;
  std::string text = "{\"targets\": " + targets_json() + ", \"variants\": " + std::to_string(variants) +
                     ", \"driver\": " + std::to_string(driver_version()) + ", \"driver_message\": " + quoted(driver_message()) +
                     ", \"devices\": {";
  bool first = true;
  for (int i = 0; i < kMaxDevices; ++i) {
    const Device* device = devices[i].load(std::memory_order_acquire);
    if (!device) continue;
    const std::string capability = std::to_string(device->capability / 10) + "." + std::to_string(device->capability % 10);
    text += (first ? "\"" : ", \"") + std::to_string(i) + "\": {\"name\": " + quoted(device->name) +
            ", \"capability\": " + quoted(capability) +
            ", \"target\": " + (device->target_count ? quoted(target_name(device->targets[0])) : "null") +
            ", \"reason\": " + quoted(device->reason) + "}";
    first = false;
  }
  return text + "}}";
}

}  // namespace tileops
