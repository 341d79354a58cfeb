// The C functions of libtorch's stable shim that we call, declared by hand.
//
// Why not torch's own headers: a source build then needs no multi-gigabyte torch, builds in seconds, and does not depend on
// which torch happens to be installed. The ABI, not the header, is torch's promise (a shim function is not modified for two
// years after its release). tests/binding compiles these lines after torch's own headers, so that a declaration that differs is
// a compile error.
//
// Strong: in libtorch_cpu since torch 2.10. Weak: newer than 2.10, or in libtorch_cuda; NULL where torch lacks it.
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {
#pragma GCC visibility push(default)

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
class TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
struct DeviceGuardOpaque;
using DeviceGuardHandle = DeviceGuardOpaque*;
struct StringOpaque;
using StringHandle = StringOpaque*;
using AOTITorchError = int32_t;  // 0 is success
using StableIValue = uint64_t;  // one argument or result of an operator, see stable.h

int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_device_type_cuda();
int32_t aoti_torch_device_type_meta();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_float8_e5m2();
int32_t aoti_torch_dtype_float8_e4m3fn();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_int16();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_bool();
int32_t aoti_torch_dtype_complex64();
int32_t aoti_torch_dtype_complex128();

AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* ret_dim);
AOTITorchError aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* ret_numel);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** ret_sizes);  // borrowed
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** ret_strides);  // borrowed
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* ret_dtype);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* ret_device_type);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* ret_device_index);
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void** ret_data_ptr);
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** ret_data_ptr);

AOTITorchError aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, AtenTensorHandle* ret_new_tensor);
AOTITorchError aoti_torch__reinterpret_tensor(AtenTensorHandle self, int64_t ndim, const int64_t* sizes_ptr,
                                              const int64_t* strides_ptr, int64_t storage_offset, AtenTensorHandle* ret_new_tensor);
AOTITorchError aoti_torch_copy_(AtenTensorHandle self, AtenTensorHandle src, int32_t non_blocking);
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle orig_handle, AtenTensorHandle* new_handle);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);

bool aoti_torch_grad_mode_is_enabled();
void aoti_torch_grad_mode_set_enabled(bool enabled);
void aoti_torch_warn(const char* func, const char* file, uint32_t line, const char* msg);

AOTITorchError aoti_torch_create_device_guard(int32_t device_index, DeviceGuardHandle* ret_guard);
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle guard);

AOTITorchError torch_new_string_handle(const char* data, size_t length, StringHandle* handle);
AOTITorchError torch_delete_string(StringHandle handle);
AOTITorchError torch_string_length(StringHandle handle, size_t* length);
AOTITorchError torch_string_c_str(StringHandle handle, const char** data);  // borrowed

AOTITorchError torch_call_dispatcher(const char* opName, const char* overloadName, StableIValue* stack,
                                     uint64_t extension_build_version);
AOTITorchError aoti_torch_library_init_fragment(const char* ns, const char* file, uint32_t line,
                                                TorchLibraryHandle* ret_new_torch_lib);
AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* k, const char* file, uint32_t line,
                                            TorchLibraryHandle* ret_new_torch_lib);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle self, const char* schema);
AOTITorchError torch_library_impl(TorchLibraryHandle self, const char* name, void (*fn)(StableIValue*, uint64_t, uint64_t),
                                  uint64_t extension_build_version);
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle tlh);

// In libtorch_cuda, which our NEEDED libtorch.so leads to when torch has CUDA.
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
// torch 2.13
__attribute__((weak)) const char* torch_exception_get_what_without_backtrace();
__attribute__((weak)) AOTITorchError torch_new_stable_ivalue(StableIValue** ret_value);
__attribute__((weak)) AOTITorchError torch_delete_stable_ivalue(StableIValue* value);

#pragma GCC visibility pop
}
