#include "cpu.hpp"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

#ifdef SPARSETOPK_WIDE  // set by the build that has kernels for more
#include <cpuid.h>
#endif

namespace sparsetopk {
namespace {

SimdLevel supported() noexcept {
#ifdef SPARSETOPK_WIDE
  // What these kernels are compiled for; see CMakeLists.txt. Not all compilers know f16c by its name.
  unsigned a, b, c = 0, d;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  const bool v3 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4) return SimdLevel::avx512;
  if (v3) return SimdLevel::avx2;
#endif
  return SimdLevel::baseline;
}

}  // namespace

const char* simd_name(SimdLevel level) noexcept {
  return level == SimdLevel::avx512 ? "avx512" : level == SimdLevel::avx2 ? "avx2" : "baseline";
}

SimdLevel simd_level() noexcept {
  static const SimdLevel level = [] {
    const SimdLevel widest = supported();
    const char* wanted = std::getenv("SPARSETOPK_SIMD");
    if (wanted == nullptr) return widest;
    for (SimdLevel lower : {SimdLevel::baseline, SimdLevel::avx2})
      if (std::strcmp(wanted, simd_name(lower)) == 0 && lower < widest) return lower;
    return widest;
  }();
  return level;
}

}  // namespace sparsetopk
