// The made-up kernels of merge_attention: each row in double, from the parameters that a launch passes.
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>

#include "fake_cuda.h"
#include "merge_attention_params.h"
#include "variant.h"

namespace fake {

void merge_attention(const tileops::RowVariant& v, dim3 grid, const void* params) {
  const auto& p = *static_cast<const tileops::merge_attention_params*>(params);
  if (grid.x != (p.inner + v.rows_per_block - 1) / v.rows_per_block || grid.y != p.outer || grid.z != p.batch) abort();
  for (int64_t row = 0; row < p.batch * p.outer * p.inner; ++row) {
    const int64_t b = row / (p.outer * p.inner), o = row / p.inner % p.outer, i = row % p.inner;
    const auto at = [&](const int64_t* stride) { return b * stride[0] + o * stride[1] + i * stride[2]; };
    const double a = load(p.lse_a, at(p.lse_a_stride), 3), c = load(p.lse_b, at(p.lse_b_stride), 3);
    const double lse = log(exp(a) + exp(c));
    store(p.lse, at(p.lse_stride), 3, lse);
    for (int64_t col = 0; col < p.cols; ++col) {
      const auto side = [&](const void* out, const int64_t* stride, double share) {
        return share == 0 ? 0 : share * load(out, at(stride) + col * stride[3], int(v.x));
      };
      const double sum = side(p.out_a, p.out_a_stride, exp(a - lse)) + side(p.out_b, p.out_b_stride, exp(c - lse));
      store(p.out, at(p.out_stride) + col * p.out_stride[3], int(v.y), sum);
    }
  }
}

}  // namespace fake
