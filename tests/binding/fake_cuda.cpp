// A CUDA that needs no GPU, linked in place of libcudart, so that the whole binding runs on CPU tensors under the real torch:
// it answers for two GPUs, registers the kernels for CPU tensors, and a launch computes the rows in C++ and records how it was
// launched.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <math.h>
#include <string.h>

#include <string>
#include <vector>

#include "fake_cuda.h"
#include "rms_norm_params.h"
#include "rms_norm_silu_params.h"
#include "row_choice.h"
#include "softmax_params.h"
#include "torch_shim.h"
#include "variant.h"

namespace fake {

double load(const void* base, int64_t i, int type) {
  if (type == 3) return static_cast<const float*>(base)[i];
  const uint16_t bits = static_cast<const uint16_t*>(base)[i];
  if (type == 2) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return static_cast<float>(half);
  }
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

void store(void* base, int64_t i, int type, float value) {
  if (type == 3) {
    static_cast<float*>(base)[i] = value;
  } else if (type == 2) {
    const _Float16 half = static_cast<_Float16>(value);
    memcpy(static_cast<uint16_t*>(base) + i, &half, 2);
  } else {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    static_cast<uint16_t*>(base)[i] = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

}  // namespace fake

namespace {

int capability = 90;
cudaError_t driver_error = cudaSuccess, launch_error = cudaSuccess, portable_error = cudaSuccess, sm_90a_error = cudaSuccess;
int current_device = 0, guards = 0, relaxed = 0, loads_outside_relaxed = 0;
int64_t launches = 0, copies = 0;
std::string last;

template <typename F>
F next(F, const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

using fake::load;
using fake::store;

struct Weight {
  const void* data = nullptr;
  int64_t stride = 0;
  int type = 0;
  float offset = 0, eps = 0;
};

std::vector<float> normed(const std::vector<float>& row, const Weight& w, bool silu) {
  double squares = 0;
  for (float v : row) squares += static_cast<double>(v) * v;
  const double scale = 1 / sqrt(squares / row.size() + w.eps);
  std::vector<float> out;
  for (size_t c = 0; c < row.size(); ++c) {
    double v = row[c] * scale;
    if (w.type) v *= load(w.data, c * w.stride, w.type) + w.offset;
    out.push_back(static_cast<float>(silu ? v / (1 + exp(-v)) : v));
  }
  return out;
}

std::vector<float> softmaxed(const std::vector<float>& row) {
  float top = -INFINITY;
  double sum = 0;
  for (float v : row) top = v > top ? v : top;
  for (float v : row) sum += exp(static_cast<double>(v) - top);
  std::vector<float> out;
  for (float v : row) out.push_back(static_cast<float>(exp(static_cast<double>(v) - top) / sum));
  return out;
}

template <typename Params, typename F>
void rows(const tileops::RowVariant& v, dim3 grid, const Params& p, F compute) {
  if (grid.x != (p.inner + v.rows_per_block - 1) / v.rows_per_block || grid.y != p.outer) abort();
  for (int64_t o = 0; o < p.outer; ++o) {
    for (int64_t i = 0; i < p.inner; ++i) {
      std::vector<float> row;
      for (int64_t c = 0; c < p.cols; ++c)
        row.push_back(load(p.x, o * p.x_stride[0] + i * p.x_stride[1] + c * p.x_stride[2], int(v.x)));
      const std::vector<float> out = compute(row);
      for (int64_t c = 0; c < p.cols; ++c)
        store(p.y, o * p.y_stride[0] + i * p.y_stride[1] + c * p.y_stride[2], int(v.y), out[c]);
    }
  }
}

}  // namespace

namespace fake {

bool launch_fails() { return launch_error != cudaSuccess; }
void count_question() { loads_outside_relaxed += relaxed != 1; }
void record_launch(const char* kernel) {
  ++launches;
  last = kernel;
}

}  // namespace fake

namespace tileops {

// Kernels for aligned rows of sm_90a are paced.
#define ROW(op, target, x, y, vector, kind, max_cols, per_block) \
  {#op,                                                          \
   #op "_" #target "_" #x "_" #y "_v" #vector #kind,             \
   Target::target,                                               \
   DType::x,                                                     \
   DType::y,                                                     \
   vector,                                                       \
   #kind[0] == 'r',                                              \
   #kind[0] == 's',                                              \
   max_cols,                                                     \
   per_block,                                                    \
   vector > 1 && Target::target == Target::sm_90a,               \
   128,                                                          \
   256,                                                          \
   &names[__COUNTER__]}

static const char names[64] = {};  // their addresses are the kernels

extern const RowVariant row_variants[] = {
    ROW(softmax, sm_90a, bf16, bf16, 8, , 64, 4),
    ROW(softmax, sm_90a, bf16, bf16, 1, rows, 0, 2),
    ROW(softmax, sm_90a, bf16, bf16, 8, shifted, 100, 1),
    ROW(softmax, sm_90a, bf16, bf16, 1, , 0, 1),
    ROW(softmax, sm_90a, f32, f32, 4, , 0, 1),
    ROW(softmax, portable, bf16, bf16, 8, , 0, 1),
    ROW(softmax, portable, bf16, bf16, 1, , 0, 1),
    ROW(softmax, portable, f32, f32, 1, , 0, 3),
    ROW(softmax, portable, bf16, f32, 8, , 0, 1),
    ROW(softmax, portable, bf16, f32, 1, , 0, 1),
    ROW(rms_norm, sm_90a, bf16, bf16, 8, , 0, 4),
    ROW(rms_norm, sm_90a, bf16, bf16, 1, , 0, 1),
    ROW(rms_norm, portable, f32, f32, 4, , 0, 1),
    ROW(rms_norm, portable, f32, f32, 1, , 0, 1),
    ROW(rms_norm_silu, portable, f16, f16, 1, , 0, 1),
    ROW(merge_attention, sm_90a, bf16, bf16, 8, , 64, 4),
    ROW(merge_attention, sm_90a, bf16, bf16, 1, , 0, 2),
    ROW(merge_attention, portable, bf16, bf16, 1, , 0, 1),
    ROW(mla_combine, portable, f32, bf16, 4, , 512, 1),
    ROW(mla_combine, sm_90a, f32, bf16, 4, , 512, 1),
    ROW(mla_combine, sm_90a, f32, f16, 4, , 512, 1),
    {nullptr, nullptr, Target::portable, DType::none, DType::none, 0, false, false, 0, 0, false, 0, 0, nullptr}};
extern const int row_variant_count = sizeof(row_variants) / sizeof(row_variants[0]) - 1;

}  // namespace tileops

using tileops::row_variant_count;
using tileops::row_variants;

extern "C" {
#pragma GCC visibility push(default)

void fake_set(const char* name, int value) {
  const std::string key = name;
  if (key == "capability") capability = value;
  if (key == "driver_error") driver_error = static_cast<cudaError_t>(value);
  if (key == "launch_error") launch_error = static_cast<cudaError_t>(value);
  if (key == "portable_error") portable_error = static_cast<cudaError_t>(value);
  if (key == "sm_90a_error") sm_90a_error = static_cast<cudaError_t>(value);
  if (key == "current_device") current_device = value;
}

int64_t fake_get(const char* name) {
  const std::string key = name;
  if (key == "copies") return copies;
  return key == "launches" ? launches : key == "guards" ? guards : key == "relaxed" ? relaxed : loads_outside_relaxed;
}

const char* fake_last_kernel() { return last.c_str(); }

// Why a kernel for any row length does not serve rows of so many columns.
const char* fake_refuses_columns(int64_t cols) {
  tileops::RowCall call = {};
  call.problem.cols = cols;
  return tileops::why_not(tileops::RowVariant{}, call);
}

#pragma GCC visibility pop

cudaError_t cudaGetDeviceCount(int* count) { return *count = 2, driver_error; }
cudaError_t cudaGetDevice(int* device) { return *device = current_device, driver_error; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "a made-up failure"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorMadeUp"; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  *p = {};
  strcpy(p->name, "Fake \"GPU\"");
  p->major = capability / 10;
  p->minor = capability % 10;
  p->multiProcessorCount = 10;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  relaxed += *mode == cudaStreamCaptureModeRelaxed ? 1 : -1;
  *mode = *mode == cudaStreamCaptureModeRelaxed ? cudaStreamCaptureModeGlobal : cudaStreamCaptureModeRelaxed;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* kernel) {
  fake::count_question();
  for (int i = 0; i < row_variant_count; ++i) {
    if (row_variants[i].kernel == kernel)
      return row_variants[i].target == tileops::Target::sm_90a ? sm_90a_error : portable_error;
  }
  return cudaErrorInvalidDeviceFunction;
}

}

namespace fake {

bool is_dependent(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id != cudaLaunchAttributeProgrammaticStreamSerialization) continue;
    if (!config.attrs[i].val.programmaticStreamSerializationAllowed) abort();
    return true;
  }
  return false;
}

cudaError_t launch_row(const cudaLaunchConfig_t& config, const void* kernel, void** arguments) {
  for (int n = 0; n < row_variant_count; ++n) {
    const tileops::RowVariant& v = row_variants[n];
    if (v.kernel != kernel) continue;
    const dim3 grid = config.gridDim;
    const std::string op = v.op;
    const bool right = int(config.blockDim.x) == v.threads && int(config.dynamicSmemBytes) == v.shared_bytes &&
                       config.stream == reinterpret_cast<cudaStream_t>(0x5) &&
                       config.numAttrs == v.paced + unsigned(fake::is_dependent(config)) &&
                       (!fake::is_dependent(config) || op == "mla_combine") &&
                       (!v.paced || (config.attrs[0].id == cudaLaunchAttributeClusterDimension &&
                                     config.attrs[0].val.clusterDim.x * config.attrs[0].val.clusterDim.y == 1));
    if (!right) abort();
    fake::record_launch(v.name);
    if (op == "merge_attention") fake::merge_attention(v, grid, arguments[0]);
    if (op == "mla_combine") fake::combine(v, config, arguments[0]);
    if (op == "softmax") rows(v, grid, *static_cast<tileops::softmax_params*>(arguments[0]), softmaxed);
    if (op == "rms_norm") {
      const auto& p = *static_cast<tileops::rms_norm_params*>(arguments[0]);
      const Weight w = {p.weight, p.weight_stride[0], p.weight_dtype, p.weight_offset, p.eps};
      rows(v, grid, p, [&](const std::vector<float>& row) { return normed(row, w, false); });
    }
    if (op == "rms_norm_silu") {
      const auto& p = *static_cast<tileops::rms_norm_silu_params*>(arguments[0]);
      const Weight w = {p.weight, p.weight_stride[0], p.weight_dtype, 0, p.eps};
      rows(v, grid, p, [&](const std::vector<float>& row) { return normed(row, w, true); });
    }
    return cudaSuccess;
  }
  return cudaErrorInvalidDeviceFunction;
}

}  // namespace fake

extern "C" {

// torch's shim: copies are counted, and a CPU tensor must pass for one of GPU 0.
AOTITorchError aoti_torch_copy_(AtenTensorHandle self, AtenTensorHandle src, int32_t non_blocking) {
  return ++copies, next(&aoti_torch_copy_, "aoti_torch_copy_")(self, src, non_blocking);
}
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) { return *stream = reinterpret_cast<void*>(0x5), 0; }
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle, int32_t* index) { return *index = 0, 0; }
AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  return ++guards, *guard = reinterpret_cast<DeviceGuardHandle>(8), 0;
}
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return --guards, ++current_device, 0; }
AOTITorchError aoti_torch_library_init_impl(const char* ns, const char*, const char* file, uint32_t line,
                                            TorchLibraryHandle* library) {
  return next(&aoti_torch_library_init_impl, "aoti_torch_library_init_impl")(ns, "CPU", file, line, library);
}
}
