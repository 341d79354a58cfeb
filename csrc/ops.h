// The boxed kernels of the operators, and the namespace they are registered in.
#pragma once

#include "torch_shim.h"

#ifndef TILEOPS_NAMESPACE
#define TILEOPS_NAMESPACE tileops
#endif
#define TILEOPS_STRING_(x) #x
#define TILEOPS_STRING(x) TILEOPS_STRING_(x)
#define TILEOPS_QUALIFIED(op) TILEOPS_STRING(TILEOPS_NAMESPACE) "::" op

namespace tileops {

void flash_attention(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void flash_attention_out(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void explain_flash_attention(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void flash_attention_paged(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void flash_attention_paged_out(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void explain_flash_attention_paged(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void flash_attention_varlen(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void flash_attention_varlen_out(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void explain_flash_attention_varlen(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void merge_attention(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void merge_attention_out(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void explain_merge_attention(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void mla_decode(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void mla_decode_out(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void explain_mla_decode(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void gemm(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void gemm_out(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void explain_gemm(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void softmax(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void softmax_out(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void explain_softmax(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void rms_norm(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void rms_norm_out(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void explain_rms_norm(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void rms_norm_silu(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void rms_norm_silu_out(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void explain_rms_norm_silu(StableIValue* stack, uint64_t inputs, uint64_t outputs);

}  // namespace tileops
