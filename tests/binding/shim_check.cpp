// torch's own headers first, then ours: a declaration of ours that differs is a compile error here. Then the encodings, side by
// side.
#define USE_CUDA 1  // declares the CUDA shims; nothing calls them
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "stable.h"

#include <type_traits>

namespace ts = torch::stable::detail;
using tileops::from_stable;
using tileops::to_stable;

static_assert(std::is_same_v<StableIValue, uint64_t>);
static_assert(std::is_same_v<AOTITorchError, int32_t>);
static_assert(sizeof(AtenTensorHandle) == sizeof(StableIValue));

template <typename T>
static bool same(T value) {
  return ts::from(value) == to_stable(value) && from_stable<T>(ts::from(value)) == value &&
         ts::to<T>(to_stable(value)) == value;
}

template <typename T>
static bool same_optional(T value) {  // theirs read by us and freed by us, ours by them
  const StableIValue theirs = ts::from(std::optional<T>(value));
  StableIValue* box = from_stable<StableIValue*>(theirs);
  const bool read = box && from_stable<T>(*box) == value;
  tileops::delete_box(box);
  return read && ts::to<std::optional<T>>(tileops::new_box(to_stable(value))) == value;
}

// 0, or the number of the first encoding that differs.
extern "C" __attribute__((visibility("default"))) int check_encodings() {
  using torch::headeronly::ScalarType;
  const struct {
    ScalarType type;
    int32_t code;
  } types[] = {{ScalarType::BFloat16, aoti_torch_dtype_bfloat16()},
               {ScalarType::Half, aoti_torch_dtype_float16()},
               {ScalarType::Float, aoti_torch_dtype_float32()}};
  if (!same<int64_t>(-1) || !same<int64_t>(INT64_MAX)) return 1;
  if (!same<double>(1e-6) || !same<double>(-0.5)) return 2;
  if (!same<bool>(true) || !same<bool>(false)) return 3;
  if (ts::from(std::nullopt) != 0) return 4;
  if (!same_optional<double>(1e-5) || !same_optional<int64_t>(-3)) return 5;
  for (const auto& row : types) {
    if (ts::from(row.type) != to_stable(row.code)) return 6;
    if (ts::to<std::optional<ScalarType>>(tileops::new_box(to_stable(row.code))) != row.type) return 7;
  }
  if (ts::to<std::string>(tileops::stable_string("path\tvariant\treason")) != "path\tvariant\treason") return 8;
  if (tileops::kBuildVersion != TORCH_VERSION_2_10_0) return 9;
  return 0;
}
