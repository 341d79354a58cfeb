// What the dispatcher knows of a kernel: one row of a generated table (csrc/generated/registry.cpp).
#pragma once

#include <stdint.h>

namespace tileops {

enum class Target : int { portable = 0, sm_90a = 1 };
enum class DType : int { none = 0, bf16 = 1, f16 = 2, f32 = 3 };  // as DTypeCode of include/tileops/types.h

constexpr int64_t item_size(DType type) { return type == DType::f32 ? 4 : 2; }  // in bytes, of the three

// A kernel that computes each row of its tensors [batch, outer, inner, cols] by itself; grid = (ceil(inner / rows_per_block),
// outer, batch).
struct RowVariant {
  const char* op;
  const char* name;
  Target target;
  DType x, y;
  int vector;          // elements per access; above 1: unit column stride, and base, strides and cols are multiples of it,
                       // for the weight too (unless shifted)
  bool lanes_on_rows;  // neighbouring threads hold neighbouring rows: for a row (inner) stride of 1, and the above of rows
  bool shifted;        // only that x and y (of one dtype) have unit column stride and rows that lie alike in their vectors
  int64_t max_cols;    // 0: any
  int rows_per_block;
  bool paced;  // launched as clusters of one CTA, which start more slowly: tileops_dsl/kernels/NOTES.md
  int threads;
  int shared_bytes;
  const void* kernel;
};

extern const RowVariant row_variants[];  // in order of preference: the first eligible row is taken
extern const int row_variant_count;

// Of a tensor that TMA moves: columns and rows of a box, bytes of the swizzle in shared memory.
struct MapBox {
  int columns, rows, swizzle;
};

// A persistent kernel that computes c [batch, m, n] = a b tile by tile. A cluster has `cluster` tiles, one above the other.
struct ProductVariant {
  const char* op;
  const char* name;
  Target target;
  DType x, y;  // of a and b; of c and residual
  bool transpose_a;  // a is stored [k, m], not [m, k]
  bool transpose_b;  // b is stored [n, k], not [k, n]
  int vector;  // above 1: base and strides of a, b, c and residual are multiples of 16 bytes
  int bm, bn, bk;  // the tile: rows and columns of c, and of k in one step
  int cluster;
  int threads;
  int shared_bytes;
  MapBox maps[4];  // a, b, c, residual; where TMA moves them
  const void* kernel;
};

// A problem on which a product kernel was timed, in the same run as eager PyTorch.
struct ProductMeasurement {
  int variant;  // index in product_variants
  const char* gpu;
  int64_t rows, n, k;  // rows: batch * m
  bool fused;  // more than a bias in the epilogue
  double us, baseline_us;
};

extern const ProductVariant product_variants[];
extern const int product_variant_count;
extern const ProductMeasurement product_measurements[];
extern const int product_measurement_count;

// A persistent kernel of attention, out [batch, sq, heads, head_dim_v], for head dims up to its own and either no mask, the
// causal one or a window, which may be causal too.
struct AttentionVariant {
  const char* op;
  const char* name;
  Target target;
  DType x;  // of q, k, v and out
  bool causal;
  bool lengths, paged;          // of requests of different lengths; of keys in the pages of a cache
  bool window, sinks, softcap;  // whether it has them; tileops_dsl/kernels/flash_attention.py
  bool longest_first;           // a CTA for each tile
  int bm, bn, head_dim;  // the tile: queries, and keys in one step
  int head_dim_v;        // of v and out
  int threads;
  int shared_bytes;
  MapBox maps[4];  // q, k, v, out; with lengths none of out
  const void* kernel;
};

// A problem on which an attention kernel was timed, in the same run as eager PyTorch.
struct AttentionMeasurement {
  int variant;  // index in attention_variants
  const char* gpu;
  int64_t batch_heads, sq, sk;  // batch_heads: batches * heads of q
  int64_t window;  // how many keys a query sees at most; 0: a window hides none
  int64_t head_dim, head_dim_v;  // 0: the kernel's
  double us, baseline_us;
};

extern const AttentionVariant attention_variants[];
extern const int attention_variant_count;
extern const AttentionMeasurement attention_measurements[];
extern const int attention_measurement_count;

// A kernel of mla_decode, for parts of all requests (include/tileops/deal_part.h); grid = (ceil(rows / bm), parts).
// One of mla_decode_few, another program for fewer rows, stores out without TMA and takes other parameters.
struct MlaVariant {
  const char* op;
  const char* name;
  Target target;
  DType x;  // of q, kv_cache and out
  int bm, block, head_dim, head_dim_v;  // the tile: queries and heads, tokens of a block, columns of a key and of a value
  int unit;  // a page has any multiple of so many tokens; 0: those of a block
  int threads;
  int shared_bytes;
  MapBox maps[3];  // q, kv_cache, out; of mla_decode_few no out
  const void* kernel;
};

// A kernel of flash_attention_paged for a few queries of each request: parts of all items
// (include/tileops/deal_part.h), an item being a key head of a request; grid = (ceil(rows / bm), parts).
struct DecodeVariant {
  const char* op;
  const char* name;
  Target target;
  DType x;  // of q, keys, values and out
  int bm, bn, head_dim;  // the tile: queries and heads of a group, and keys in one step
  int head_dim_v;        // of v and out
  bool softcap;
  int threads;
  int shared_bytes;
  MapBox maps[3];  // q, k, v
  const void* kernel;
};

extern const DecodeVariant decode_variants[];
extern const int decode_variant_count;

extern const MlaVariant mla_variants[];
extern const int mla_variant_count;

}  // namespace tileops
