#pragma once

namespace sparsetopk {

// The widest vector instruction set that both this build and the running CPU support.
const char* simd_level() noexcept;

}  // namespace sparsetopk
