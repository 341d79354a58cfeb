#include "attention_copies.h"

#include "allocate.h"

namespace tileops {

namespace {

// A view of whole rows of 16 bytes, of as many dimensions as the caller's: behind those of q, k and v the kernel reads nothing,
// those of out it writes. The call has a dimension of one in front of those that the caller lacks.
Owned allocate_copy(AttentionTensor* tensor, DType type, const TensorView& like) {
  const int64_t first = 4 - like.ndim, *e = tensor->extents;
  std::vector<int64_t> sizes(e + first, e + 3);
  sizes.push_back(tensor->strides[2]);
  const Owned rows = empty_contiguous(sizes, type, like, "allocating a copy");
  tensor->data = mutable_data(rows.get());
  return strided_view(rows.get(), like.ndim, e + first, tensor->strides + first);
}

}  // namespace

AttentionCopies::AttentionCopies(AttentionCall* call, const TensorView& q, const TensorView& k, const TensorView& v) {
  if (!call->has_copies()) return;
  const NoGrad no_grad;
  AttentionTensor* read[] = {&call->q, &call->k, &call->v};
  const TensorView* given[] = {&q, &k, &v};
  for (int i = 0; i < 3; ++i) {
    if (!read[i]->copied) continue;
    copies_[i] = allocate_copy(read[i], call->type, *given[i]);
    torch_check(aoti_torch_copy_(copies_[i].get(), given[i]->handle, 0), "copying q, k or v");
  }
  if (call->out.copied) out_ = allocate_copy(&call->out, call->type, q);
}

void AttentionCopies::bring_back(AtenTensorHandle out) const {
  if (!out_) return;
  const NoGrad no_grad;
  torch_check(aoti_torch_copy_(out, out_.get(), 0), "copying the result to its place");
}

}  // namespace tileops
