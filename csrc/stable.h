// Operator arguments and results as the stable shim passes them, and owners for what it hands out.
//
// A StableIValue is eight bytes: an int64, a double, a bool or a dtype code (int32) in the low bytes, or a pointer. A `T?` is
// NULL or a pointer to a heap StableIValue. A boxed kernel owns its inputs: it deletes each tensor handle, each string handle
// and each box of an optional; a result is a new handle that torch deletes. torch_call_dispatcher likewise takes what its stack
// holds, also when the operator then throws. (Read in shim_common.cpp: to_ivalue and from_ivalue, torch 2.10 and main.)
#pragma once

#include <string.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "torch_shim.h"

namespace tileops {

// "Built for": the conventions of torch 2.10. A later libtorch adapts what changed since.
constexpr uint64_t kBuildVersion = (2ull << 56) | (10ull << 48);

// torch's message of the last shim error of this thread, or "" (it is only told from 2.13 on; older ones print it on stderr).
inline const char* torch_error_text() {
  const char* what = torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : nullptr;
  return what ? what : "";
}

[[noreturn]] inline void throw_torch_error(const char* doing) {
  const std::string text = torch_error_text();
  throw std::runtime_error(std::string("tileops: torch failed while ") + doing +
                           (text.empty() ? "; it printed why on stderr" : ": " + text));
}

inline void torch_check(AOTITorchError code, const char* doing) {
  if (__builtin_expect(code != 0, 0)) throw_torch_error(doing);
}

template <typename T>
StableIValue to_stable(T value) {
  static_assert(sizeof(T) <= sizeof(StableIValue), "a StableIValue has eight bytes");
  StableIValue out = 0;
  memcpy(&out, &value, sizeof(T));
  return out;
}

template <typename T>
T from_stable(StableIValue value) {
  T out;
  memcpy(&out, &value, sizeof(T));
  return out;
}

// The box of an optional. torch owns its allocator from 2.13 on; before, both sides use operator new.
inline StableIValue new_box(StableIValue value) {
  StableIValue* box = nullptr;
  if (torch_new_stable_ivalue) {
    torch_check(torch_new_stable_ivalue(&box), "allocating an argument");
    *box = value;
  } else {
    box = new StableIValue(value);
  }
  return to_stable(box);
}

inline void delete_box(StableIValue* box) {
  if (torch_delete_stable_ivalue) {
    torch_delete_stable_ivalue(box);
  } else {
    delete box;
  }
}

inline StableIValue stable_string(const std::string& text) {
  StringHandle handle = nullptr;
  torch_check(torch_new_string_handle(text.data(), text.size(), &handle), "returning a string");
  return to_stable(handle);
}

// An owned tensor handle.
class Owned {
 public:
  explicit Owned(AtenTensorHandle handle = nullptr) : handle_(handle) {}
  Owned(Owned&& other) noexcept : handle_(other.release()) {}
  Owned& operator=(Owned&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  ~Owned() { reset(nullptr); }
  AtenTensorHandle get() const { return handle_; }
  explicit operator bool() const { return handle_ != nullptr; }
  AtenTensorHandle release() {
    AtenTensorHandle handle = handle_;
    handle_ = nullptr;
    return handle;
  }

 private:
  void reset(AtenTensorHandle handle) {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
    handle_ = handle;
  }
  AtenTensorHandle handle_;
};

inline Owned new_reference(AtenTensorHandle tensor) {
  AtenTensorHandle handle = nullptr;
  torch_check(aoti_torch_new_tensor_handle(tensor, &handle), "taking a reference to a tensor");
  return Owned(handle);
}

enum class Kind : char { tensor, optional_tensor, optional_value, value, string };

// The inputs of a boxed kernel, owned. They stay in their stack, so that the call of a twin with the same schema hands them on
// as they are.
class Args {
 public:
  static constexpr int kMaxArguments = 24;
  template <int N>
  Args(StableIValue* stack, const Kind (&kinds)[N]) : Args(stack, kinds, N) {}
  Args(StableIValue* stack, const Kind* kinds, int count) : stack_(stack), kinds_(kinds), count_(count) {}
  Args(const Args&) = delete;
  ~Args() {
    for (int i = 0; i < count_; ++i) destroy(i);
  }

  AtenTensorHandle tensor(int i) const { return from_stable<AtenTensorHandle>(stack_[i]); }
  AtenTensorHandle optional_tensor(int i) const {  // NULL: none
    const StableIValue* box = from_stable<StableIValue*>(stack_[i]);
    return box ? from_stable<AtenTensorHandle>(*box) : nullptr;
  }
  template <typename T>
  T value(int i) const {
    return from_stable<T>(stack_[i]);
  }
  template <typename T>
  T optional_value(int i, T when_none) const {
    const StableIValue* box = from_stable<StableIValue*>(stack_[i]);
    return box ? from_stable<T>(*box) : when_none;
  }

  std::string string(int i) const {
    const StringHandle handle = from_stable<StringHandle>(stack_[i]);
    const char* data;
    size_t length;
    torch_check(torch_string_c_str(handle, &data) | torch_string_length(handle, &length), "reading a string argument");
    return std::string(data, length);
  }

  // Releases what is in slot i and puts a plain value there: what the eager twin takes in its place.
  void replace(int i, StableIValue value) {
    destroy(i);
    stack_[i] = value;
    plain_ |= 1u << i;
  }

  // The tensor in slot i, now the caller's.
  Owned take_tensor(int i) {
    Owned tensor(this->tensor(i));
    stack_[i] = 0;
    return tensor;
  }

  // Calls an operator whose arguments are our first `count`; it takes them, and its results are put into `results`.
  AOTITorchError give_to(const char* op, int count, StableIValue* results, int result_count) {
    StableIValue call[kMaxArguments];
    memcpy(call, stack_, sizeof(StableIValue) * count);
    memset(stack_, 0, sizeof(StableIValue) * count);
    const AOTITorchError error = torch_call_dispatcher(op, "", call, kBuildVersion);
    memcpy(results, call, sizeof(StableIValue) * result_count);
    return error;
  }

 private:
  void destroy(int i) {
    if (stack_[i] == 0 || kinds_[i] == Kind::value || (plain_ >> i & 1)) return;
    if (kinds_[i] == Kind::tensor) {
      aoti_torch_delete_tensor_object(tensor(i));
      return;
    }
    if (kinds_[i] == Kind::string) {
      torch_delete_string(from_stable<StringHandle>(stack_[i]));
      return;
    }
    StableIValue* box = from_stable<StableIValue*>(stack_[i]);
    if (kinds_[i] == Kind::optional_tensor) aoti_torch_delete_tensor_object(from_stable<AtenTensorHandle>(*box));
    delete_box(box);
  }

  StableIValue* stack_;
  const Kind* kinds_;
  int count_;
  uint32_t plain_ = 0;  // bit i: slot i was replaced
};

// The string result of an _explain_ operator, and the tensor result of the others, replace the arguments in the stack.
template <typename Body>
void boxed(StableIValue* stack, Body body) {
  const StableIValue result = body();  // the arguments are gone when it returns
  stack[0] = result;
}

// The same for several tensors.
template <typename Body>
void boxed_results(StableIValue* stack, Body body) {
  std::vector<Owned> results = body();  // the arguments are gone when it returns
  for (size_t i = 0; i < results.size(); ++i) stack[i] = to_stable(results[i].release());
}

// What we read of a tensor, borrowed from it.
struct TensorView {
  AtenTensorHandle handle;
  int64_t ndim, numel;
  const int64_t* sizes;
  const int64_t* strides;
  int32_t dtype, device_type, device_index;
};

inline TensorView view_of(AtenTensorHandle handle) {
  TensorView v;
  v.handle = handle;
  int64_t *sizes, *strides;
  const AOTITorchError code = aoti_torch_get_dim(handle, &v.ndim) | aoti_torch_get_numel(handle, &v.numel) |
                              aoti_torch_get_sizes(handle, &sizes) | aoti_torch_get_strides(handle, &strides) |
                              aoti_torch_get_dtype(handle, &v.dtype) | aoti_torch_get_device_type(handle, &v.device_type) |
                              aoti_torch_get_device_index(handle, &v.device_index);
  torch_check(code, "reading the shape of a tensor");
  v.sizes = sizes;
  v.strides = strides;
  return v;
}

inline const void* const_data(AtenTensorHandle handle) {
  const void* data;
  torch_check(torch_get_const_data_ptr(handle, &data), "reading the address of a tensor");
  return data;
}

inline void* mutable_data(AtenTensorHandle handle) {  // a copy-on-write tensor gets its own storage here
  void* data;
  torch_check(torch_get_mutable_data_ptr(handle, &data), "reading the address of a tensor");
  return data;
}

// Gradients are off in its scope: what runs inside is not recorded, also when it is made of aten operators.
class NoGrad {
 public:
  NoGrad() : before_(aoti_torch_grad_mode_is_enabled()) { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(before_); }
  NoGrad(const NoGrad&) = delete;

 private:
  bool before_;
};

}  // namespace tileops
