#pragma once

namespace sparsetopk {

// The widest vector instruction set that the running CPU supports.
const char* simd_level() noexcept;

}  // namespace sparsetopk
