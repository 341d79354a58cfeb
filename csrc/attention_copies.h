// Copies in the place of tensors of attention that TMA cannot address: rows of whole 16 bytes.
#pragma once

#include "attention_choice.h"
#include "stable.h"

namespace tileops {

// From now on the call's tensors; q, k and v are brought there at once, in the stream of their device.
class AttentionCopies {
 public:
  AttentionCopies(AttentionCall* call, const TensorView& q, const TensorView& k, const TensorView& v);
  void bring_back(AtenTensorHandle out) const;  // the result to its place, if it has a copy

 private:
  Owned copies_[3], out_;
};

}  // namespace tileops
