#pragma once

#include <stdint.h>
#include <stdlib.h>

namespace qllm {
namespace {  // every instruction set has its own, as in vec.h

// Memory of one thread that lives between calls and starts on a cache line.
template <class T>
class Scratch {
 public:
  ~Scratch() { free(data_); }
  T* of(int64_t size) {
    if (size > size_) {
      free(data_);
      data_ = (T*)aligned_alloc(64, (size * sizeof(T) + 127) / 64 * 64);
      size_ = size;
    }
    return data_;
  }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace
}  // namespace qllm
