// The made-up CUDA's products: a launch computes the product in C++ from what it was given.
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>

#include <algorithm>

#include "fake_cuda.h"
#include "gemm_portable_params.h"
#include "gemm_sm_90a_params.h"
#include "variant.h"

namespace tileops {

#define PRODUCT(target, x, y, a, b, vector, bm, bn, cluster, ...)                                        \
  {"gemm",                                                                                               \
   "gemm_" #target "_" #x "_" #y "_" #bm "x" #bn "_" #a #b "_v" #vector,                                 \
   Target::target,                                                                                       \
   DType::x,                                                                                             \
   DType::y,                                                                                             \
   #a[0] == 't',                                                                                         \
   #b[0] == 't',                                                                                         \
   vector,                                                                                               \
   bm,                                                                                                   \
   bn,                                                                                                   \
   32,                                                                                                   \
   cluster,                                                                                              \
   384,                                                                                                  \
   1000 + __COUNTER__,                                                                                   \
   {__VA_ARGS__},                                                                                        \
   &places[__COUNTER__]}
#define MAPS {32, 64, 64}, {32, 128, 64}, {64, 64, 128}, {64, 64, 128}
#define WIDE {32, 64, 64}, {32, 128, 64}, {32, 64, 128}, {32, 64, 128}

static const char places[64] = {};  // their addresses are the kernels

extern const ProductVariant product_variants[] = {
    PRODUCT(sm_90a, bf16, bf16, n, t, 8, 128, 256, 2, MAPS), PRODUCT(sm_90a, bf16, bf16, n, t, 8, 64, 32, 1, MAPS),
    PRODUCT(sm_90a, bf16, bf16, n, n, 8, 64, 32, 1, MAPS),   PRODUCT(sm_90a, bf16, bf16, t, n, 8, 64, 32, 1, MAPS),
    PRODUCT(sm_90a, bf16, bf16, t, t, 8, 64, 32, 1, MAPS),   PRODUCT(sm_90a, bf16, f32, n, t, 8, 64, 32, 1, WIDE),
    PRODUCT(portable, bf16, bf16, n, t, 8, 64, 32, 1),       PRODUCT(portable, bf16, bf16, n, n, 1, 64, 32, 1),
    PRODUCT(portable, bf16, bf16, n, t, 1, 64, 32, 1),       PRODUCT(portable, bf16, bf16, t, n, 1, 64, 32, 1),
    PRODUCT(portable, bf16, bf16, t, t, 1, 64, 32, 1),       {}};
extern const int product_variant_count = sizeof(product_variants) / sizeof(product_variants[0]) - 1;

#define FAKE_GPU "Fake \"GPU\""
extern const ProductMeasurement product_measurements[] = {
    {0, FAKE_GPU, 64, 64, 64, false, 10.0, 12.0}, {1, FAKE_GPU, 64, 64, 64, false, 11.0, 12.0},
    {0, FAKE_GPU, 64, 64, 64, true, 11.0, 12.0},  {1, FAKE_GPU, 64, 64, 64, true, 10.0, 12.0},
    {0, FAKE_GPU, 256, 64, 64, false, 12.0, 10.0}, {1, FAKE_GPU, 256, 64, 64, false, 10.1, 10.0},
    {0, FAKE_GPU, 512, 64, 64, false, 13.0, 10.0}, {5, FAKE_GPU, 64, 64, 64, false, 10.0, 12.0},
    {6, FAKE_GPU, 64, 64, 64, false, 20.0, 12.0},  {2, "Another GPU", 64, 64, 64, false, 1.0, 12.0},
    {}};
extern const int product_measurement_count = sizeof(product_measurements) / sizeof(product_measurements[0]) - 1;

}  // namespace tileops

namespace {

using tileops::ProductVariant;

// A stack of matrices, however the kernel got it.
struct Matrices {
  const void* data;
  int64_t batch, row, column;  // strides in elements
  int type;

  int64_t at(int64_t b, int64_t r, int64_t c) const { return b * batch + r * row + c * column; }
  double operator()(int64_t b, int64_t r, int64_t c) const { return fake::load(data, at(b, r, c), type); }
};

Matrices of_map(const tileops::tensor_map& bytes, bool transposed, int64_t batch, int64_t rows, int64_t columns, int type,
                tileops::MapBox box) {
  if (transposed) std::swap(rows, columns);
  const fake::Map map = fake::map_of(bytes, 3, {columns, rows, batch}, type, box);
  const int64_t size = type == 3 ? 4 : 2, row = map.strides[0] / size;
  return {map.data, int64_t(map.strides[1]) / size, transposed ? 1 : row, transposed ? row : 1, type};
}

Matrices of_strides(const void* data, const int64_t (&strides)[3], bool transposed, int type) {
  return {data, strides[0], strides[transposed ? 2 : 1], strides[transposed ? 1 : 2], type};
}

double activated(double v, int activation) {
  if (activation == 1) return std::max(v, 0.0);
  if (activation == 2) return v * 0.5 * (1 + erf(v / sqrt(2)));
  if (activation == 3) return 0.5 * v * (1 + tanh(sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
  return activation == 4 ? v / (1 + exp(-v)) : v;
}

template <typename Params>
void compute(const Params& p, const Matrices& a, const Matrices& b, const Matrices& c, const Matrices& residual) {
  for (int64_t i = 0; i < int64_t(p.batch) * p.m * p.n; ++i) {
    const int64_t item = i / p.n / p.m, row = i / p.n % p.m, column = i % p.n;
    double sum = 0;
    for (int64_t k = 0; k < p.k; ++k) sum += a(item, row, k) * b(item, k, column);
    if (p.bias_dtype) sum += fake::load(p.bias, column, p.bias_dtype);
    sum = activated(sum, p.activation);
    if (p.has_residual) sum += residual(item, row, column);
    fake::store(const_cast<void*>(c.data), c.at(item, row, column), c.type, static_cast<float>(sum));
  }
}

void run_sm_90a(const ProductVariant& v, const tileops::gemm_sm_90a_params& p) {
  const int x = int(v.x), y = int(v.y);
  if (reinterpret_cast<uintptr_t>(&p) % 64 != 0) abort();
  const Matrices residual = p.has_residual ? of_map(p.residual, false, p.batch, p.m, p.n, y, v.maps[3]) : Matrices();
  compute(p, of_map(p.a, v.transpose_a, p.batch, p.m, p.k, x, v.maps[0]),
          of_map(p.b, v.transpose_b, p.batch, p.k, p.n, x, v.maps[1]), of_map(p.c, false, p.batch, p.m, p.n, y, v.maps[2]),
          residual);
}

void run_portable(const ProductVariant& v, const tileops::gemm_portable_params& p) {
  const int x = int(v.x), y = int(v.y);
  const bool unit = (p.m == 1 || p.k == 1 || p.a_stride[2] == 1) && (p.n == 1 || p.k == 1 || p.b_stride[2] == 1) &&
                    (p.n == 1 || p.c_stride[2] == 1) && p.bias_stride[0] == 1;
  if (!unit) abort();
  compute(p, of_strides(p.a, p.a_stride, v.transpose_a, x), of_strides(p.b, p.b_stride, v.transpose_b, x),
          of_strides(p.c, p.c_stride, false, y), of_strides(p.residual, p.residual_stride, false, y));
}

template <typename Params>
void note(const ProductVariant& v, const cudaLaunchConfig_t& config, const Params& p) {
  fake::record_launch(v.name, {config.gridDim.x, config.numAttrs ? config.attrs[0].val.clusterDim.x : 1, p.batch, p.m, p.n, p.k});
}

}  // namespace

namespace fake {

void launch_gemm(const ProductVariant& v, const cudaLaunchConfig_t& config, const void* params) {
  const unsigned cluster = config.numAttrs ? config.attrs[0].val.clusterDim.x : 1;
  const bool right = int(cluster) == v.cluster && config.gridDim.x % cluster == 0 &&
                     (!config.numAttrs || config.attrs[0].id == cudaLaunchAttributeClusterDimension);
  if (!right) abort();
  if (v.target == tileops::Target::sm_90a) {
    const auto& p = *static_cast<const tileops::gemm_sm_90a_params*>(params);
    note(v, config, p);
    run_sm_90a(v, p);
  } else {
    const auto& p = *static_cast<const tileops::gemm_portable_params*>(params);
    note(v, config, p);
    run_portable(v, p);
  }
}

}  // namespace fake
