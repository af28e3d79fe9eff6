// The kernels as custom calls of XLA. Compiled where the headers of its FFI are found; nothing is linked.
#pragma once

namespace sparsetopk {

struct Handler {
  const char* name;  // null after the last
  void* function;    // XLA_FFI_Handler*
};

extern const Handler handlers[];

}  // namespace sparsetopk
