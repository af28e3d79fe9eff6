#pragma once

#if defined(__x86_64__)
#define SPARSETOPK_X86
#endif

namespace sparsetopk {

enum class SimdLevel { baseline, avx2, avx512 };

// The widest level that this CPU supports, or the environment variable SPARSETOPK_SIMD if it asks for less.
SimdLevel simd_level() noexcept;
const char* simd_name(SimdLevel level) noexcept;

}  // namespace sparsetopk
