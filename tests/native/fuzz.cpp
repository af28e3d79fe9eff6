// Calls every kernel on rows of awkward lengths and contents, checks what must hold for any of them, and ends with
// 1 if something does not. `make sanitize` builds it with sanitizers; all buffers are exactly as long as they
// must be, so that these see a single entry too many.
//
//   fuzz [seed] [effort]      effort 1 takes about a minute; 0 tries threads and memory alone
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#define SPARSETOPK_LEVEL baseline
#include "bracket.hpp"
#include "cotangents.hpp"
#include "cpu.hpp"
#include "dtypes.hpp"
#include "isotonic.hpp"
#include "lam.hpp"
#include "kernels.hpp"
#include "response_table.hpp"
#include "parallel.hpp"
#include "pieces.hpp"
#include "selection.hpp"
#include "targets.hpp"
#include "widened.hpp"

#ifdef SPARSETOPK_X86
#include <immintrin.h>
#endif

// Memory that runs out: so many more allocations succeed, on any thread, and then one fails; none does if it is negative.
static std::atomic<long> allocations_left{-1};

void* operator new(std::size_t size) {
  if (allocations_left.load() >= 0 && allocations_left.fetch_sub(1) == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

using namespace sparsetopk;
using sparsetopk::baseline::BFloat16;
using sparsetopk::baseline::Half;
using sparsetopk::baseline::Limits;
using sparsetopk::baseline::narrow;
using sparsetopk::baseline::Wide;
using sparsetopk::baseline::widen;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
// Seconds of CPU time until a call counts as endless, as a process may be stopped meanwhile; and by the clock, for one
// that waits for ever.
constexpr unsigned kPatience = 20, kWait = 1800;

std::mt19937_64 rng;
double effort = 1;
char current[256] = "start", row_of_it[256] = "";  // the call at work and a row of it, for the report
bool failed = false;
int failures = 0;

// Of a call that violates something, the first violation is reported.
void check(bool holds, const char* what, double got = kNaN, double expected = kNaN) {
  if (holds || failed) return;
  std::fprintf(stderr, "fuzz: %s (got %.17g, expected %.17g) in %s%s\n", what, got, expected, current, row_of_it);
  failed = true;
  if (++failures == 100) std::_Exit(1);
}

template <class... Values>
void begin_call(const char* format, Values... values) {
  std::snprintf(current, sizeof(current), format, values...);
  row_of_it[0] = 0;
  failed = false;
  const itimerval patience{{0, 0}, {kPatience, 0}};
  setitimer(ITIMER_PROF, &patience, nullptr);
  alarm(kWait);
}

extern "C" void too_long(int) {
  const char text[] = "fuzz: a call does not end: ";
  if (write(2, text, sizeof(text) - 1) < 0 || write(2, current, std::strlen(current)) < 0) std::_Exit(3);
  std::_Exit(2);
}

double uniform() { return std::uniform_real_distribution<double>()(rng); }
double normal() { return std::normal_distribution<double>()(rng); }
std::size_t below(std::size_t n) { return std::size_t(uniform() * double(n)); }

// ---------------------------------------------------------------------------------------------------- inputs

constexpr std::size_t kLengths[] = {0,    1,    2,    7,    8,    9,    15,   16,    17,    31,    32,
                                    33,   63,   64,   65,   100,  127,  128,  129,   255,   256,   257,
                                    383,  384,  385,  511,  512,  513,  1023, 1024,  1025,  2047,  2048,
                                    2049, 4095, 4096, 4097, 8191, 8192, 8193, 65535, 65536, 65537, 200000};

// How many rows: of short ones any number up to what fills a few vectors, as these share vectors.
std::size_t rows_of(std::size_t n) { return n > 10000 ? 1 : n == 1025 ? 68 : n <= 400 ? 1 + below(40) : 3; }

template <class X>
struct Units;  // the spacing of numbers at 1, and next to 0
template <>
struct Units<double> {
  static constexpr double one = 0x1p-52, zero = 5e-324;
};
template <>
struct Units<float> {
  static constexpr double one = 0x1p-23, zero = 0x1p-149;
};
template <>
struct Units<Half> {
  static constexpr double one = 0x1p-10, zero = 0x1p-24;
};
template <>
struct Units<BFloat16> {
  static constexpr double one = 0x1p-7, zero = 0x1p-133;
};

constexpr const char* kContents[] = {"normal",     "cauchy",     "lognormal", "two-valued", "constant",
                                     "ascending",  "descending", "integer",   "rounded",    "zeros",
                                     "infinities", "nan",        "padding",   "subnormal",  "largest",
                                     "near ties",  "near zero",  "outliers",  "any bits"};

template <class X>
double entry(const std::string& content, double share) {
  constexpr double largest = Limits<X>::largest, one = Units<X>::one, zero = Units<X>::zero;
  if (content == "cauchy") return std::tan(3.14159265358979 * (uniform() - 0.5));
  if (content == "lognormal") return std::exp(5 * normal()) * (uniform() < 0.5 ? 1 : -1);
  if (content == "two-valued") return uniform() < 0.5 ? 1 : -0.5;
  if (content == "constant") return 0.7;
  if (content == "ascending") return 4 * share - 2;
  if (content == "descending") return 2 - 4 * share;
  if (content == "integer") return double(below(7)) - 3;
  if (content == "rounded") return std::round(10 * normal()) / 10;
  if (content == "zeros") return uniform() < 0.7 ? (uniform() < 0.5 ? 0.0 : -0.0) : normal();
  if (content == "infinities") return uniform() < 0.2 ? (uniform() < 0.5 ? kInf : -kInf) : normal();
  if (content == "padding") return uniform() < 0.5 ? -kInf : normal();
  if (content == "subnormal") return zero * std::round(20 * normal());
  if (content == "largest")
    return largest * (1 - uniform() * (uniform() < 0.5 ? 1e-2 : 1)) * (uniform() < 0.5 ? 1 : -1);
  if (content == "near ties") {  // a few roundings apart, with some far away
    const double step = double(below(4));
    return uniform() < 0.1 ? 1000 * normal() : (2 - (1 + step) * one) * (uniform() < 0.1 ? -1 : 1);
  }
  if (content == "outliers")  // of every size: whatever digit is looked at, few differ in it
    return uniform() < 0.99 ? 1 : (1 + std::exp2(60 * (uniform() - 1))) * std::exp2(below(2) == 0 ? 0 : 30 * normal());
  if (content == "any bits") return largest * std::exp2(-300 * uniform()) * (uniform() < 0.5 ? 1 : -1);
  if (content == "near zero") return uniform() < 0.2 ? normal() : uniform() < 0.5 ? 0 : zero * double(below(4));
  return normal();
}

template <class X>
X from_double(double value) {
  return narrow<X>(Wide<X>(value));
}

// x[i] for i in rows of length n, ``stride`` apart; nothing follows the last row.
template <class X>
std::vector<X> make_rows(const std::string& content, std::size_t rows, std::size_t n, std::size_t stride) {
  std::vector<X> x(rows == 0 ? 0 : (rows - 1) * stride + n);
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = from_double<X>(entry<X>(content, double(i % stride) / double(stride)));
  if (content == "nan" && n > 0)
    for (std::size_t row = 0; row < rows; ++row) x[row * stride + below(n)] = from_double<X>(kNaN);
  return x;
}

std::vector<double> ks(std::size_t n) {
  const double length = double(n);
  return {0,
          0.3 * std::min(length, 1.0),
          std::floor(length / 2),
          0.37 * length,
          length - 0.5,
          length,
          std::floor(length / 10),
          length + 1,
          -1,
          kNaN,
          kInf,
          std::min(1.0, length),
          length - 1e-9,
          std::min(1e-300, length),
          std::min(3.0, length)};
}
constexpr double kLams[] = {0, 1e-300, 5e-324, 1e-8, 0.1, 1, 1e8, 1e300, kNaN, -1, kInf};

// ------------------------------------------------------------------------------------------- the top-k family

struct Setting {
  const char* name;
  Operator op;
  double exponent;
  bool debias;
};
constexpr Setting kSettings[] = {
    {"mask 2", Operator::mask, 1, false},
    {"mask 3/2", Operator::mask, 2, false},
    {"mask 4/3", Operator::mask, 3, false},
    {"mask 1.2", Operator::mask, 5, false},
    {"mask 3", Operator::mask, 0.5, false},
    {"magnitude 2", Operator::magnitude, 1, false},
    {"magnitude 2 debias", Operator::magnitude, 1, true},
    {"magnitude 4/3", Operator::magnitude, 3, false},
    {"magnitude 4/3 debias", Operator::magnitude, 3, true},
    {"magnitude 3", Operator::magnitude, 0.5, false},
    {"magnitude 3 debias", Operator::magnitude, 0.5, true},
    {"sign 2", Operator::sign, 1, false},
    {"sign 4/3", Operator::sign, 3, false},
    {"sign 3", Operator::sign, 0.5, false},
    {"two-sided 2", Operator::two_sided, 1, false},
    {"two-sided 3/2", Operator::two_sided, 2, false},
    {"two-sided 4/3", Operator::two_sided, 3, false},
};

template <class X>
constexpr Dtype dtype_of() {
  return std::is_same_v<X, float>    ? Dtype::float32
         : std::is_same_v<X, double> ? Dtype::float64
         : std::is_same_v<X, Half>   ? Dtype::float16
                                     : Dtype::bfloat16;
}

struct Level {
  const char* name;
  const Kernels& kernels;
};

// The level that calls go to, and those below it.
std::vector<Level> levels() {
  std::vector<Level> all{{"baseline", baseline::all}};
#ifdef SPARSETOPK_WIDE
  if (simd_level() >= SimdLevel::avx2) all.push_back({"avx2", avx2::all});
  if (simd_level() >= SimdLevel::avx512) all.push_back({"avx512", avx512::all});
#endif
  return all;
}

// Everything that a call writes.
template <class X>
struct Result {
  std::vector<X> y, dx;
  std::vector<State> state;
  std::vector<double> dk, dlam;

  Result(std::size_t rows, std::size_t n) : y(rows * n), dx(rows * n), state(rows), dk(rows), dlam(rows) {}
};

template <class X, class Forward, class Backward>
Result<X> run(Problem problem, const std::vector<X>& g, Forward forward, Backward backward) {
  Result<X> result(problem.rows, problem.n);
  problem.state = result.state.data();
  forward(problem, result.y.data());
  backward(problem, g.data(), result.dx.data(), result.dk.data(), result.dlam.data());
  return result;
}

template <class X>
bool same_bits(const std::vector<X>& a, const std::vector<X>& b) {
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(X)) == 0;
}

template <class X>
void check_same(const Result<X>& a, const Result<X>& b, const char* what) {
  check(same_bits(a.y, b.y), what);
  check(same_bits(a.state, b.state), what);
  check(same_bits(a.dx, b.dx), what);
  check(same_bits(a.dk, b.dk) && same_bits(a.dlam, b.dlam), what);
}

// What holds for a row whatever it contains.
template <class X>
void check_row(const Problem& problem, const X* x, double k, double lam, const X* y, const X* dx, double dk,
               double dlam) {
  const std::size_t n = problem.n;
  const bool absolute = problem.op == Operator::magnitude || problem.op == Operator::sign;
  bool valid = k >= 0 && k <= double(n) && lam >= 0 && lam < kInf;
  std::size_t candidates = 0;
  double largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double value = double(widen(x[i]));
    valid = valid && value == value && !(absolute && std::isinf(value));
    candidates += absolute || value > -kInf;
    largest = std::max(largest, std::fabs(value));
  }
  // The derivatives of the magnitude are sums of keys, which may be beyond the largest double.
  const bool derivatives = problem.op != Operator::magnitude || largest < 1e150;
  double sum = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double value = double(widen(x[i])), out = double(widen(y[i])), slope = double(widen(dx[i]));
    check(valid == (out == out), valid ? "NaN in y" : "y of an invalid row is not NaN", out);
    check(valid ? std::isfinite(slope) || !derivatives : slope != slope, "dx", slope);
    if (!valid) continue;
    const double most = problem.op == Operator::magnitude ? std::fabs(value) + 4 * Units<X>::one * largest : 1;
    check(std::fabs(out) <= most, "y is too large", out, most);
    check(absolute ? out == 0 || (out < 0) == (value < 0) : out >= 0, "y has the wrong sign", out, value);
    sum += std::fabs(out);
  }
  check(valid ? std::isfinite(dk) || !derivatives : dk != dk, "dk", dk);
  check(valid ? std::isfinite(dlam) || !derivatives : dlam != dlam, "dlam", dlam);
  if (!valid || problem.op == Operator::magnitude) return;
  const double expected = std::min(k, double(candidates));
  // Every y is rounded once, and t was; near 0 the response for p > 2 magnifies what t lost.
  const double each = problem.exponent < 1 || sizeof(Wide<X>) == sizeof(float) ? 2e-7 : 1e-12;
  const double tolerance =
      Units<X>::one * expected + double(n) * Units<X>::zero + each * (1 + expected) + 1e-15 * double(n);
  check(sum <= expected + tolerance, "the sum of y is over k", sum, expected);
  if (problem.op == Operator::sign) return;
  check(sum >= expected - tolerance, "the sum of y is under k", sum, expected);
}

template <class X>
void fuzz_rows(const char* dtype, const Setting& setting, const char* content, std::size_t n) {
  const std::size_t rows = rows_of(n), stride = n + (n % 2);
  std::vector<X> x = make_rows<X>(content, rows, n, stride);
  // In magnitude sums over a row are of the size of its entries, and must be finite: docs/maths.md has the domain.
  if (setting.op == Operator::magnitude && sizeof(X) == sizeof(double))
    for (X& value : x)
      if (std::fabs(double(widen(value))) > 1e300 && std::isfinite(double(widen(value))))
        value = from_double<X>(double(widen(value)) * 1e-14);
  std::vector<X> g(rows * n);
  for (X& value : g) value = from_double<X>(normal());
  const auto choices = ks(n);
  std::vector<double> k(rows), lam(rows);
  for (double& value : k) value = choices[below(choices.size())];
  for (double& value : lam) value = kLams[below(std::size(kLams))];
  const bool single = below(4) == 0;
  Problem problem{setting.op, setting.exponent,     setting.debias, dtype_of<X>(),        rows,    n, stride, x.data(),
                  k.data(),   std::size_t(!single), lam.data(),     std::size_t(!single), nullptr, 1};
  const auto table = response_table(setting.exponent);  // for the levels, which are called as dispatch.cpp does
  problem.table = table.get();
  begin_call("%s of %s, %s, n = %zu", setting.name, dtype, content, n);
  entries_read();
  const Result<X> result = run(problem, g, forward, backward);
  const double read = double(entries_read()) / double(rows), length = double(n);
  check(read <= (n > baseline::kShort ? 8 * length + 12288 : 11 * length + 8192), "entries read", read, length);
  problem.threads = 4;
  check_same(result, run(problem, g, forward, backward), "four threads differ from one");
  for (const Level& level : levels()) {
    const auto with_forward = [&](const Problem& p, void* y) { forward_in(level.kernels, p, 0, rows, y); };
    const auto with_backward = [&](const Problem& p, const void* dy, void* dx, double* dk, double* dlam) {
      backward_in(level.kernels, p, 0, rows, dy, dx, dk, dlam);
    };
    check_same(result, run(problem, g, with_forward, with_backward), level.name);
  }
  for (std::size_t row = 0; row < rows; ++row) {
    const double of_k = k[single ? 0 : row], of_lam = lam[single ? 0 : row];
    std::snprintf(row_of_it, sizeof(row_of_it), ", row %zu with k = %.17g, lam = %g and state %.17g, %.17g", row, of_k,
                  of_lam, result.state[row].pivot, result.state[row].delta);
    check_row(problem, x.data() + row * stride, of_k, of_lam, result.y.data() + row * n, result.dx.data() + row * n,
              result.dk[row], result.dlam[row]);
  }
}

// A loss against the output that it is made of, with labels (alone or filled up), weights or nothing to compare with.
template <class X>
void fuzz_loss(const char* dtype, const Setting& setting, const char* content, std::size_t n) {
  constexpr const char* kTargets[] = {"labels", "labels filled up", "weights", "no targets"};
  const std::size_t rows = rows_of(n), kind = below(4);
  const std::vector<X> x = make_rows<X>(content, rows, n, n);
  const auto choices = ks(n);
  std::vector<double> k(rows), lam(rows), weights(rows * n), value(rows), again(rows);
  for (double& one : k) one = choices[below(choices.size())];
  for (double& one : lam) one = kLams[below(std::size(kLams))];
  for (double& weight : weights) weight = below(3) == 0 ? uniform() : 0;
  std::vector<std::int64_t> labels(rows);
  for (std::int64_t& label : labels) label = below(4) == 0 ? -100 : std::int64_t(below(n));
  const Targets targets{kind < 2 ? labels.data() : nullptr, -100, kind == 1, kind == 2 ? weights.data() : nullptr};
  std::vector<State> state(rows);
  std::vector<X> y(rows * n), residual(rows * n), same(rows * n);
  const auto table = response_table(setting.exponent);
  const Problem problem{setting.op, setting.exponent, false, dtype_of<X>(), rows, n,          n, x.data(), k.data(),
                        1,          lam.data(),       1,     state.data(),  1,    table.get()};
  begin_call("loss of %s of %s, %s, n = %zu, %s", setting.name, dtype, content, n, kTargets[kind]);
  loss(problem, targets, residual.data(), value.data());
  for (const Level& level : levels()) {
    loss_in(level.kernels, problem, 0, rows, targets, same.data(), again.data());
    check(same_bits(residual, same) && same_bits(value, again), level.name);
  }
  forward(problem, y.data());
  for (std::size_t row = 0; row < rows; ++row) {
    std::snprintf(row_of_it, sizeof(row_of_it), ", row %zu with k = %.17g, lam = %g", row, k[row], lam[row]);
    const bool counts = kind >= 2 || labels[row] != -100;
    if (!counts) check(value[row] == 0, "the loss of a row that does not count", value[row], 0);
    bool finite = k[row] >= 0 && k[row] <= double(n) && lam[row] >= 0 && lam[row] < 1e100;
    for (std::size_t j = row * n; j < (row + 1) * n; ++j) {
      const double out = double(widen(y[j])), got = double(widen(residual[j]));
      finite = finite && std::fabs(double(widen(x[j]))) < 1e100;
      const bool here = kind == 0 && std::int64_t(j - row * n) == labels[row];
      const double t = kind == 2 ? weights[j] : here ? 1 : 0;
      const double expected = counts ? double(widen(from_double<X>(out - t))) : 0;
      // In 16 bits y is rounded here, and not there, where it is made by other kernels, those of float32.
      const double size = std::fabs(out) + std::fabs(out - t);
      const double room = sizeof(X) == 2 ? Units<X>::one * size + Units<float>::one : 0;
      const bool equal = got == expected || std::fabs(got - expected) <= room || (out != out && got != got);
      check(kind == 1 || equal, "y - t", got, expected);
    }
    check(!finite || std::isfinite(value[row]), "the loss of finite numbers", value[row]);
  }
}

// Losses with any targets: without a completion that of weights, whichever type they have; and the same by any number of
// threads.
template <class X>
void fuzz_completed_loss(const char* dtype, const Setting& setting, const char* content, std::size_t n) {
  const std::size_t rows = rows_of(n);
  const std::vector<X> x = make_rows<X>(content, rows, n, n);
  const auto choices = ks(n);
  std::vector<double> k(rows), lam(rows), doubles(rows * n), value(rows), again(rows);
  for (double& one : k) one = choices[below(choices.size())];
  for (double& one : lam) one = kLams[below(std::size(kLams))];
  std::vector<float> singles(rows * n);
  for (std::size_t i = 0; i < singles.size(); ++i) doubles[i] = singles[i] = below(3) == 0 ? float(uniform()) : 0;
  std::vector<std::int64_t> labels(rows);
  for (std::int64_t& label : labels) label = below(4) == 0 ? -100 : std::int64_t(below(n + 1));
  std::vector<State> state(rows);
  std::vector<X> slope(rows * n), same(rows * n);
  const auto table = response_table(setting.exponent);
  Problem problem{setting.op, setting.exponent, false, dtype_of<X>(), rows, n,          n, x.data(), k.data(),
                  1,          lam.data(),       1,     state.data(),  1,    table.get()};
  begin_call("completed loss of %s of %s, %s, n = %zu", setting.name, dtype, content, n);
  loss(problem, {nullptr, 0, false, doubles.data()}, slope.data(), value.data());
  for (const TargetRows& weights :
       {TargetRows{nullptr, 0, singles.data(), nullptr}, TargetRows{nullptr, 0, nullptr, doubles.data()}}) {
    completed_loss(problem, weights, Completion::none, 0, same.data(), again.data());
    bool equal = true;
    for (std::size_t i = 0; i < rows; ++i)
      equal &= value[i] == again[i] || (value[i] != value[i] && again[i] != again[i]);
    check(same_bits(slope, same) && equal, "weights of either type");
  }
  const Completion completion = Completion(below(3));
  const double smoothing = completion == Completion::best || below(2) == 0 ? 0 : uniform();
  const bool by_labels = below(2) == 0;
  const TargetRows targets{by_labels ? labels.data() : nullptr, -100, by_labels ? nullptr : singles.data(), nullptr};
  completed_loss(problem, targets, completion, smoothing, slope.data(), value.data());
  problem.threads = 3;
  completed_loss(problem, targets, completion, smoothing, same.data(), again.data());
  check(same_bits(slope, same) && same_bits(value, again), "three threads differ from one");
  for (std::size_t row = 0; row < rows && by_labels; ++row) {
    if (labels[row] == -100) check(value[row] == 0, "the loss of a row that does not count", value[row], 0);
    if (labels[row] == std::int64_t(n)) check(value[row] != value[row], "a label that is no class", value[row]);
  }
}

template <class X>
void fuzz_selection(const char* dtype, const char* content, std::size_t n) {
  const std::vector<X> y = make_rows<X>(content, 1, n, n);
  const std::size_t capacity = 1 + below(n);
  std::vector<std::int64_t> indices(capacity);
  begin_call("%zu slots of %s, %s, n = %zu", capacity, dtype, content, n);
  select_slots(dtype_of<X>(), 1, n, y.data(), capacity, indices.data());
  std::vector<bool> kept(n);
  double least = kInf;
  const auto size = [&](std::size_t j) {
    const double value = std::fabs(double(widen(y[j])));
    return value == value ? value : 0;
  };
  for (std::size_t slot = 0; slot < capacity; ++slot) {
    const std::int64_t at = indices[slot];
    check(at >= 0 && std::size_t(at) < n && (slot == 0 || at > indices[slot - 1]), "an index", double(at));
    if (failed) return;
    kept[std::size_t(at)] = true, least = std::min(least, size(std::size_t(at)));
  }
  for (std::size_t j = 0; j < n; ++j) check(kept[j] || size(j) <= least, "a larger entry is left out", size(j), least);
}

// The operator in slots against its whole output, forward and backward; and the lam that leaves so many fractional.
template <class X>
void fuzz_solved_slots(const char* dtype, const Setting& setting, const char* content, std::size_t n) {
  const std::size_t rows = rows_of(n), capacity = 1 + below(n);
  const std::vector<X> x = make_rows<X>(content, rows, n, n);
  const auto choices = ks(n);
  std::vector<double> k(rows), lam(rows), dropped(rows), dk(rows), dlam(rows), again_k(rows), again_lam(rows);
  for (double& one : k) one = choices[below(choices.size())];
  for (double& one : lam) one = kLams[below(std::size(kLams))];
  std::vector<State> state(rows);
  std::vector<X> y(rows * n), values(rows * capacity), g(rows * n), dx(rows * n), again(rows * n);
  std::vector<std::int32_t> indices(rows * capacity);
  std::vector<std::int64_t> expected(rows * capacity);
  const Problem problem{setting.op,
                        setting.exponent,
                        setting.debias,
                        dtype_of<X>(),
                        rows,
                        n,
                        n,
                        x.data(),
                        k.data(),
                        1,
                        lam.data(),
                        1,
                        state.data(),
                        2};
  begin_call("%s of %s, %s, n = %zu, in %zu slots", setting.name, dtype, content, n, capacity);
  select(problem, {capacity, values.data(), indices.data(), dropped.data()});
  forward(problem, y.data());
  select_slots(dtype_of<X>(), rows, n, y.data(), capacity, expected.data());
  std::vector<X> of_values(rows * capacity);
  for (X& one : of_values) one = from_double<X>(normal());
  std::vector<double> of_dropped(rows);
  for (double& one : of_dropped) one = below(2) == 0 ? 0 : double(widen(from_double<X>(normal())));
  for (std::size_t row = 0; row < rows; ++row) {
    std::vector<bool> kept(n);
    double left_out = 0;
    for (std::size_t slot = row * capacity; slot < (row + 1) * capacity; ++slot) {
      check(indices[slot] == expected[slot], "an index", indices[slot], double(expected[slot]));
      const std::size_t at = row * n + std::size_t(expected[slot]);
      kept[std::size_t(expected[slot])] = true, g[at] = of_values[slot];
      const double found = double(widen(values[slot])), wanted = double(widen(y[at]));
      check(found == wanted || (found != found && wanted != wanted), "a value", found, wanted);
    }
    for (std::size_t j = 0; j < n; ++j) {
      const double value = double(widen(y[row * n + j])), slope = of_dropped[row];
      if (kept[j]) continue;
      left_out += std::fabs(value);
      if ((value > 0 || value < 0) && slope != 0) g[row * n + j] = from_double<X>(value > 0 ? slope : -slope);
    }
    const bool bad = state[row].pivot != state[row].pivot;
    check(bad ? dropped[row] != dropped[row]
              : std::fabs(dropped[row] - left_out) <= 1e-12 * left_out || dropped[row] == left_out,
          "what is left out", dropped[row], left_out);
  }
  select_backward(problem, {capacity, indices.data(), of_values.data(), of_dropped.data()}, dx.data(), dk.data(),
                  dlam.data());
  backward(problem, g.data(), again.data(), again_k.data(), again_lam.data());
  check(same_bits(dx, again) && same_bits(dk, again_k) && same_bits(dlam, again_lam), "the backward of slots");
}

// The lam that leaves so many fractional: there is one, unless the row or k is bad.
template <class X>
void fuzz_chosen_lam(const char* dtype, const Setting& setting, const char* content, std::size_t n) {
  const std::size_t rows = rows_of(n), fractional = 1 + below(n);
  const std::vector<X> x = make_rows<X>(content, rows, n, n);
  const auto choices = ks(n);
  std::vector<double> k(rows), chosen(rows), again(rows);
  for (double& one : k) one = choices[below(choices.size())];
  Problem problem{setting.op,
                  setting.exponent,
                  setting.debias,
                  dtype_of<X>(),
                  rows,
                  n,
                  n,
                  x.data(),
                  k.data(),
                  1,
                  nullptr,
                  0,
                  nullptr,
                  1};
  begin_call("lam for %zu fractional ones of %s of %s, %s, n = %zu", fractional, setting.name, dtype, content, n);
  choose_lam(problem, fractional, 1e-300, chosen.data());
  problem.threads = 3;
  choose_lam(problem, fractional, 1e-300, again.data());
  check(same_bits(chosen, again), "three threads differ from one");
  for (std::size_t row = 0; row < rows; ++row) {
    bool bad = !(k[row] >= 0 && k[row] <= double(n));
    for (std::size_t j = row * n; j < (row + 1) * n; ++j) {
      const double value = double(widen(x[j]));
      bad |= value != value || (setting.op == Operator::magnitude && std::fabs(value) == kInf);
    }
    check(bad ? chosen[row] != chosen[row] : chosen[row] > 0 && chosen[row] < kInf, "a chosen lam", chosen[row]);
  }
}

// Where subnormal numbers count as 0, calls must end all the same.
void flush_subnormals(bool flush) {
#ifdef SPARSETOPK_X86
  _mm_setcsr(flush ? _mm_getcsr() | 0x8040u : _mm_getcsr() & ~0x8040u);
#else
  (void)flush;
#endif
}

// The k boundary by digits alone, against that of a sorted row.
template <class X>
void fuzz_digits(const char* dtype, const char* content, std::size_t n, bool flush) {
  using T = Wide<X>;
  std::vector<X> x = make_rows<X>(content, 1, n, n), room(n);
  for (X& value : x)
    if (!std::isfinite(double(widen(value)))) value = from_double<X>(0.5);
  const double k = std::max(0.5, below(2) == 0 ? double(below(n)) : uniform() * (double(n) - 1));
  const int bits = below(2) == 0 ? baseline::kDigit : baseline::kShortDigit;
  begin_call("digits of %s, %s, n = %zu, k = %.17g, %d bits, flushed %d", dtype, content, n, k, bits, int(flush));
  flush_subnormals(flush);
  std::vector<T> sorted(n);
  for (std::size_t i = 0; i < n; ++i) sorted[i] = widen(x[i]);
  std::sort(sorted.begin(), sorted.end(), [](T a, T b) { return a > b; });
  std::size_t read = 0;
  baseline::Bracket<T> bracket(k, sorted.back(), sorted.front(), read);
  baseline::Open<X> open;
  open.room = room.data();
  bracket.take(0, n);
  const baseline::Mask<baseline::Power<1>> mask{};
  baseline::tighten_by_digits(bracket, open, static_cast<const X*>(x.data()), n, 0.0, mask, bits);
  check(bracket.hi == sorted[bracket.above - 1], "x_[above]", double(bracket.hi), double(sorted[bracket.above - 1]));
  check(bracket.lo == sorted[bracket.below - 1], "x_[below]", double(bracket.lo), double(sorted[bracket.below - 1]));
  flush_subnormals(false);
  const std::size_t digits = (8 * sizeof(T) + std::size_t(bits) - 1) / std::size_t(bits);
  check(read <= digits * n + baseline::kFew, "entries read", double(read), double(digits * n));
}

// What lies between two bounds in a tile, from nothing to all of it, and next to nothing of it in most words.
template <class X>
void fuzz_marks(const char* dtype, std::size_t n) {
  using T = Wide<X>;
  const double share = below(4) == 0 ? double(below(2)) : std::pow(uniform(), 3);
  begin_call("marks of %s, n = %zu, share %.3g", dtype, n, share);
  std::vector<X> x(n);
  for (std::size_t i = 0; i < n; ++i) {
    const double inside = uniform() < share ? 1.5 : below(2) == 0 ? 3 : -1;
    x[i] = from_double<X>(below(50) == 0 ? kNaN : inside);
  }
  std::vector<T> keys(n);
  std::vector<std::uint32_t> expected, kept_at, found(n + 16);
  std::size_t over = 0;
  for (std::size_t i = 0; i < n; ++i) {
    keys[i] = widen(x[i]);
    if (keys[i] >= 1 && keys[i] <= 2) expected.push_back(std::uint32_t(i));
    if (!(keys[i] < 1) && !(keys[i] > 2)) kept_at.push_back(std::uint32_t(i));
    over += keys[i] > 2;
  }
  const std::size_t count = baseline::positions_between(keys.data(), n, T(1), T(2), found.data());
  check(count == expected.size(), "the number of positions", double(count), double(expected.size()));
  check(std::equal(expected.begin(), expected.end(), found.begin()), "positions");
  baseline::Marks marks;
  marks.set<false, false>(keys.data(), n, T(1), T(2));
  std::vector<X> there(n + 16);
  marks.gather(n, 7, x.data(), found.data(), there.data());
  bool same = true;
  for (std::size_t i = 0; i < count; ++i)
    same &= found[i] == expected[i] + 7 && std::memcmp(&there[i], &x[expected[i]], sizeof(X)) == 0;
  check(same, "what is gathered");
  std::vector<X> kept = x;
  const baseline::TilePart part = baseline::keep_between<false>(kept.data(), n, T(1), T(2), kept.data());
  check(part.count == kept_at.size() && part.over == over, "what is kept", double(part.count), double(kept_at.size()));
  for (std::size_t i = 0; i < kept_at.size(); ++i) same &= std::memcmp(&kept[i], &x[kept_at[i]], sizeof(X)) == 0;
  check(same, "entries that are kept in their own place");
}

// Entries of a row that are noted in the place of its output come back to where they were, with 0 between them.
template <class X, bool kX>
void fuzz_notes(const char* dtype, std::size_t n) {
  const double share = uniform() < 0.3 ? 0 : uniform() * uniform() / 3;
  begin_call("notes of %s, n = %zu, share %.3g, x %d", dtype, n, share, int(kX));
  std::vector<X> x(n), expected(n, X{}), dx(n, from_double<X>(kNaN));
  for (std::size_t i = 0; i < n; ++i) {
    const bool inside = uniform() < share;
    x[i] = from_double<X>(inside ? 1 + uniform() : 3);
    if (inside) expected[i] = x[i];
  }
  baseline::Notes<X, kX> notes(dx.data());
  baseline::Chunk<X> chunk;
  bool fits = n > baseline::kTile;
  for (std::size_t i = 0; i < n; i += baseline::kTile) {
    const std::size_t length = std::min(n - i, baseline::kTile);
    std::vector<Wide<X>> keys(length);
    for (std::size_t j = 0; j < length; ++j) keys[j] = widen(x[i + j]);
    baseline::Marks marks;
    marks.set<false, false>(keys.data(), length, Wide<X>(1), Wide<X>(2));
    fits &= marks.count <= length / 4;
    if (!chunk.has_room(marks)) notes.add(chunk), chunk.clear();
    chunk.append(marks, x.data() + i, x.data() + i, length, kX);
    if (chunk.count >= baseline::Chunk<X>::kEnough) notes.add(chunk), chunk.clear();
  }
  notes.add(chunk);
  check(notes.complete() || !fits, "notes that fit");
  if (!notes.complete()) return;
  bool same = true;
  for (std::size_t end = n; !notes.empty(); end = chunk.begin) {
    notes.take(chunk, end);
    if (kX) same &= std::memcmp(chunk.x, chunk.g, chunk.count * sizeof(X)) == 0;
    std::fill_n(dx.begin() + std::ptrdiff_t(chunk.begin), chunk.length, X{});
    chunk.scatter(dx.data());
  }
  check(same && std::memcmp(dx.data(), expected.data(), n * sizeof(X)) == 0, "what was noted");
}

// The first key from a bound on, wherever it is looked for first, also where subnormal numbers count as 0.
template <class T>
void fuzz_first_key() {
  const auto number = [] { return T(std::exp2(uniform() * 40 - 20) * normal() * (below(4) == 0 ? 1e-40 : 1)); };
  const bool flush = below(2) == 0;
  flush_subnormals(flush);
  const T ends[] = {number(), number()}, low = std::min(ends[0], ends[1]), high = std::max(ends[0], ends[1]);
  const T bound = below(2) == 0 ? number() : below(2) == 0 ? low : high;
  const T guess = below(2) == 0 ? number() : baseline::next_up(bound);
  begin_call("first key from %.17g in %.17g to %.17g, near %.17g, flushed %d", double(bound), double(low), double(high),
             double(guess), int(flush));
  const auto reaches = [&](T a) { return a >= bound; };
  const auto first = baseline::first_key(low, high, guess, reaches);
  const auto begin = baseline::ordered(low), end = baseline::ordered(high);
  check(first >= begin && first <= end + 1, "a key out of its range");
  if (first <= end) check(reaches(baseline::from_ordered<T>(first)), "a key below the bound");
  if (first > begin) check(!reaches(baseline::from_ordered<T>(first - 1)), "a key that is not the first");
  flush_subnormals(false);
}

// Every half is a normal float or 0: none is lost where subnormal numbers count as 0.
void fuzz_halves() {
  begin_call("all halves, subnormal numbers flushed");
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Half half{std::uint16_t(bits)};
    const float expected = widen(half);
    flush_subnormals(true);
    const float found = widen(half);
    const Half back = narrow<Half>(found);
    flush_subnormals(false);
    check(std::memcmp(&found, &expected, sizeof(found)) == 0, "a half", double(found), double(expected));
    check(back.bits == bits || expected != expected, "a half and back", double(back.bits), double(bits));
    const std::int32_t exponent = std::int32_t(bits >> 10 & 31), fraction = std::int32_t(bits & 1023);
    const double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    check(exponent == 31 || std::fabs(double(expected)) == size, "the size of a half", double(expected), size);
  }
}

template <class X>
void fuzz_flushed(const char* dtype, const Setting& setting, const char* content, std::size_t n) {
  const std::vector<X> x = make_rows<X>(content, 1, n, n);
  const auto choices = ks(n);
  const double k = choices[below(choices.size())], lam = kLams[below(std::size(kLams))];
  Result<X> result(1, n);
  const Problem problem{setting.op,
                        setting.exponent,
                        setting.debias,
                        dtype_of<X>(),
                        1,
                        n,
                        n,
                        x.data(),
                        &k,
                        0,
                        &lam,
                        0,
                        result.state.data(),
                        1};
  begin_call("%s of %s, %s, n = %zu, k = %g, lam = %g, subnormal numbers flushed", setting.name, dtype, content, n, k,
             lam);
  flush_subnormals(true);
  forward(problem, result.y.data());
  backward(problem, x.data(), result.dx.data(), result.dk.data(), result.dlam.data());
  flush_subnormals(false);
}

// ------------------------------------------------------------------------------------ a row in several pieces

// All passes over the pieces of a row, with room beside the outputs or without, against plain loops over all entries.
template <class X>
void fuzz_pieces(const char* dtype, const char* content, std::size_t n, bool with_room) {
  const std::vector<X> x = make_rows<X>(content, 1, n, n);
  std::vector<X> g(n);
  for (X& value : g) value = from_double<X>(normal());
  double ends[] = {std::fabs(double(widen(x[below(n)]))), std::fabs(double(widen(x[below(n)])))};
  const bool bad = std::any_of(x.begin(), x.end(), [](X value) { return !std::isfinite(double(widen(value))); });
  if (bad) ends[0] = 0.5, ends[1] = 0.6;
  const double lo = std::min(ends[0], ends[1]), hi = std::max(ends[0], ends[1]);
  const double lam = kLams[3 + below(4)], exponent = below(2) == 0 ? 1 : 3;
  begin_call("pieces of %s, %s, n = %zu, lam = %g, [%g, %g], room %d", dtype, content, n, lam, lo, hi, int(with_room));
  std::vector<std::vector<X>> outs;
  std::vector<std::vector<char>> rooms;
  std::vector<Piece> pieces;
  for (std::size_t start = 0; start < n;) {
    const std::size_t length = std::min({n - start, std::size_t(65536), 1 + below(n)});
    outs.emplace_back(length);
    rooms.emplace_back(length / kFewest * (sizeof(X) + 2));
    pieces.push_back({x.data() + start, outs.back().data(), g.data() + start, std::int64_t(length),
                      std::int64_t(dtype_of<X>()), 0, with_room ? rooms.back().data() : nullptr, 0, 0});
    start += length;
  }
  const Pieces all{pieces.data(), pieces.size(), 2};
  const Counts counts = gather(all, {lo, hi, lo, hi, below(2) == 0});
  std::int64_t over = 0, from_lo = 0, at_lo = 0;
  for (const X value : x) {
    const double a = std::fabs(double(widen(value)));
    over += a > hi, from_lo += a >= lo, at_lo += a == lo;
  }
  check((counts.invalid > 0) == bad, "invalid", double(counts.invalid), bad);
  if (bad) return;
  check(counts.over == over && counts.over_hi == over, "over", double(counts.over), double(over));
  check(counts.from_lo == from_lo, "from_lo", double(counts.from_lo), double(from_lo));
  std::vector<std::int64_t> tied(pieces.size()), buckets(kBuckets);
  ties(all, lo, tied.data());
  std::int64_t found = 0;
  for (const std::int64_t count : tied) found += count;
  check(found == at_lo, "ties", double(found), double(at_lo));
  std::uint64_t first, last;
  std::memcpy(&first, &lo, sizeof(first)), std::memcpy(&last, &hi, sizeof(last));
  int shift = 0;
  while ((last - first) >> shift >= kBuckets) ++shift;
  histogram(all, first, last, shift, buckets.data());
  found = 0;
  for (const std::int64_t count : buckets) found += count;
  check(found == from_lo - over, "histogram", double(found), double(from_lo - over));
  const Neighbours beside = neighbours(all, hi);
  check(beside.above == hi && (beside.below < hi || beside.below != beside.below), "neighbours", beside.above, hi);
  const Spread row{exponent, true, double(n) / 3, lam, {hi, 0}, below(2) == 0};
  const Masses sums = masses(all, row);
  check(sums.mass == 0 && sums.above >= 0, "masses", sums.mass, 0);
  apply(all, row);  // t = 0 at hi: nothing below it, x from where it is whole
  for (std::size_t i = 0; i < pieces.size(); ++i)
    for (std::size_t j = 0; j < outs[i].size(); ++j) {
      const double value = double(widen(static_cast<const X*>(pieces[i].x)[j])), y = double(widen(outs[i][j]));
      check(std::fabs(value) > hi ? y * value >= 0 : y == 0, "y", y, value);
    }
  double block[kBlockSums];
  block_sums(all, row, block);
  cotangents(all, row, block);
  for (const auto& out : outs)
    for (const X value : out)
      check(hi > 1e100 || std::isfinite(double(widen(value))), "dx of pieces", double(widen(value)));
}

template <class X>
void fuzz_dtype(const char* dtype, std::size_t n) {
  for (const Setting& setting : kSettings)
    for (const char* content : kContents) {
      const double repeats = effort * std::min(6.0, (n == 1025 ? 20 : 400) / (double(n) + 1));
      for (double left = repeats; left > 0; --left) {
        if (left < 1 && uniform() > left) break;
        fuzz_rows<X>(dtype, setting, content, n);
        fuzz_flushed<X>(dtype, setting, content, n);
        const bool mask = setting.op == Operator::mask || setting.op == Operator::two_sided;
        if (mask && n > 0) fuzz_loss<X>(dtype, setting, content, n);
        if (mask && n > 0) fuzz_completed_loss<X>(dtype, setting, content, n);
        if (setting.op == Operator::mask && n > 0) fuzz_selection<X>(dtype, content, n);
        if (n > 0) fuzz_solved_slots<X>(dtype, setting, content, n);
        if (n > 0 && setting.op != Operator::sign) fuzz_chosen_lam<X>(dtype, setting, content, n);
      }
    }
  if (n == 0) return;
  for (int i = 0; i < 100 && n <= baseline::kTile; ++i) fuzz_marks<X>(dtype, n);
  for (int i = 0; i < 10; ++i) fuzz_notes<X, false>(dtype, n), fuzz_notes<X, true>(dtype, n);
  for (int i = 0; i < 20; ++i) fuzz_first_key<Wide<X>>();
  for (const char* content : kContents)
    for (const bool flag : {false, true}) {
      fuzz_pieces<X>(dtype, content, n, flag);
      if (n > 1) fuzz_digits<X>(dtype, content, n, flag);
    }
}

// ----------------------------------------------------------------------------------------- sorting and pooling

template <class T>
void fuzz_sort(const char* content, std::size_t n) {
  const std::size_t rows = 2;
  const std::vector<T> x = make_rows<T>(content, rows, n, n);
  std::vector<std::int64_t> order(rows * n);
  begin_call("sort of %s, n = %zu, %zu bytes", content, n, sizeof(T));
  argsort_descending(rows, n, x.data(), order.data());
  for (std::size_t row = 0; row < rows; ++row) {
    const T* values = x.data() + row * n;
    const std::int64_t* at = order.data() + row * n;
    std::vector<bool> seen(n);
    for (std::size_t i = 0; i < n; ++i) {
      check(at[i] >= 0 && std::size_t(at[i]) < n && !seen[std::size_t(at[i])], "not a permutation", double(at[i]));
      seen[std::size_t(at[i])] = true;
      if (i == 0) continue;
      const T before = values[at[i - 1]], here = values[at[i]];
      const bool tie = before == here || (before != before && here != here);
      check(tie ? at[i - 1] < at[i] : before > here || here != here, "not in decreasing order", double(here));
    }
  }
}

template <class T>
void fuzz_permutahedron(const char* content, std::size_t n, double exponent, PhiName phi) {
  const std::size_t rows = 2, w_rows = below(2) + 1;
  const std::vector<T> x = make_rows<T>(content, rows, n, n);
  std::vector<T> w(w_rows * n), dy(rows * n);
  for (T& value : w) value = T(phi == PhiName::identity ? normal() : std::fabs(std::round(2 * normal())));
  for (T& value : dy) value = T(normal());
  constexpr double lams[] = {1e-300, 1e-8, 0.1, 1, 1e8};
  const std::vector<double> lam{lams[below(5)], lams[below(5)]};
  begin_call("permutahedron of %s, n = %zu, %zu bytes, exponent %g, phi %d, lam %g, %g", content, n, sizeof(T),
             exponent, int(phi), lam[0], lam[1]);
  const bool finite = std::all_of(x.begin(), x.end(), [](T value) { return std::isfinite(value); });
  std::vector<double> d(rows * n);
  std::vector<std::int64_t> block(rows * n), paired(rows * n);
  std::vector<T> keys = x;
  if (phi != PhiName::identity && phi != PhiName::exp)
    for (T& value : keys) value = std::fabs(value);
  const FloatRows of_x{keys.data(), sizeof(T), rows, n}, of_w{w.data(), sizeof(T), w_rows, n};
  const std::size_t threads = below(2) + 1;
  const bool solved =
      solve_permutahedron(phi, exponent, of_x, of_w, lam.data(), d.data(), block.data(), paired.data(), threads);
  check(solved == finite, "finite", solved, finite);
  if (finite)
    for (std::size_t i = 0; i < rows * n; ++i)
      check(block[i] >= 0 && block[i] < std::int64_t(n) && paired[i] >= 0 && paired[i] < std::int64_t(n), "block ids",
            double(block[i]), double(paired[i]));
  if (phi != PhiName::identity) return;

  std::vector<T> y(rows * n), dx(rows * n), saved_d(rows * n);
  std::vector<std::uint32_t> order(rows * n), first(rows * n), w_order(w_rows * n);
  std::vector<double> dw(w_rows * n), dlam(rows);
  const Saved<T> saved{order.data(), first.data(), w_order.data(), saved_d.data()};
  check(permutahedron_forward<T>(exponent, rows, of_x, of_w, lam.data(), y.data(), saved, threads) == finite, "finite");
  if (!finite) return;
  permutahedron_backward<T>(exponent, rows, n, rows, w_rows, saved, lam.data(), dy.data(), dx.data(), dw.data(),
                            dlam.data(), 1e-8, threads);
  {  // a single row of x, and w in the type of x, are as many rows that are the same
    std::vector<T> y_one(rows * n), y_all(rows * n), dx_one(rows * n), dx_all(rows * n), twice(rows * n);
    std::vector<T> dw_one(w_rows * n), dw_all(w_rows * n);
    for (std::size_t i = 0; i < rows * n; ++i) twice[i] = x[i % n];
    const FloatRows one{x.data(), sizeof(T), 1, n}, all{twice.data(), sizeof(T), rows, n};
    permutahedron_forward<T>(exponent, rows, one, of_w, lam.data(), y_one.data(), saved, threads);
    permutahedron_backward<T>(exponent, rows, n, 1, w_rows, saved, lam.data(), dy.data(), dx_one.data(), dw_one.data(),
                              dlam.data(), 1e-8, threads);
    permutahedron_forward<T>(exponent, rows, all, of_w, lam.data(), y_all.data(), saved, 1);
    permutahedron_backward<T>(exponent, rows, n, rows, w_rows, saved, lam.data(), dy.data(), dx_all.data(),
                              dw_all.data(), dlam.data(), 1e-8, 1);
    check(y_one == y_all && dx_one == dx_all && dw_one == dw_all, "a single row of x");
  }
  for (std::size_t row = 0; row < rows; ++row) {
    double sum = 0, expected = 0, size = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const double out = double(y[row * n + i]), in = double(w[(w_rows == 1 ? 0 : row) * n + i]);
      check(out == out, "NaN in y", out);
      check(dx[row * n + i] == dx[row * n + i], "NaN in dx");
      sum += out, expected += in, size += std::fabs(out) + std::fabs(in);
    }
    check(dlam[row] == dlam[row], "NaN in dlam");
    const double each = std::max(Units<T>::one, exponent < 1 ? 1e-7 : 1e-11);
    check(std::fabs(sum - expected) <= each * size, "the sum of y is not that of w", sum, expected);
  }
}

// Values of the permutahedron and of its conjugate, and a lam for ranks: numbers where all is finite and in the domain.
template <class T>
void fuzz_values(const char* content, std::size_t n, double exponent, PhiName phi) {
  const std::size_t rows = rows_of(n);
  const std::vector<T> x = make_rows<T>(content, rows, n, n);
  std::vector<T> w(rows * n), lam(rows), y(rows * n), value(rows), y_again(rows * n), again(rows), in_k(rows);
  std::vector<double> k(rows), chosen(rows), chosen_again(rows);
  for (T& one : w) one = T(uniform());
  for (T& one : lam) one = T(kLams[below(std::size(kLams))]);
  for (double& one : k) one = double(below(n + 1)) + (below(2) == 0 ? 0 : 0.5);
  begin_call("values of %s, n = %zu, %zu bytes", content, n, sizeof(T));
  const auto same_by_threads = [&](const auto& call) {
    call(y.data(), value.data(), 1);
    call(y_again.data(), again.data(), 3);
    check(same_bits(y, y_again) && same_bits(value, again), "three threads differ from one");
  };
  same_by_threads([&](T* of_y, T* of_value, std::size_t threads) {
    evaluate_permutahedron<T>(phi, exponent, rows, n, x.data(), w.data(), lam.data(), of_y, of_value, threads);
  });
  if (phi == PhiName::half_square || phi == PhiName::exp)
    same_by_threads([&](T* of_y, T* of_value, std::size_t threads) {
      conjugate_of_top_k<T>(phi, rows, n, x.data(), k.data(), of_value, of_y, in_k.data(), threads);
    });
  const RankSearch search{exponent, 1 + uniform() * double(n), sizeof(T) == 4 ? 1e-36 : 1e-300, below(2) == 0};
  choose_rank_lam<T>(search, rows, n, x.data(), chosen.data(), 1);
  choose_rank_lam<T>(search, rows, n, x.data(), chosen_again.data(), 3);
  check(same_bits(chosen, chosen_again), "three threads differ from one");
  for (std::size_t row = 0; row < rows; ++row) {
    bool bad = false;
    for (std::size_t j = row * n; j < (row + 1) * n; ++j) bad |= x[j] != x[j] || double(x[j]) == kInf;
    check(bad ? chosen[row] != chosen[row] : chosen[row] > 0 && chosen[row] < kInf, "a lam for ranks", chosen[row]);
    if (k[row] > double(n))
      check(phi == PhiName::identity || phi == PhiName::abs || value[row] != value[row], "a bad k");
  }
}

void fuzz_isotonic(std::size_t n) {
  constexpr double exponents[] = {1, 2, 3, 5, 0.5};
  for (const char* content : kContents) {
    const double repeats = effort * std::min(1.0, 2000 / (double(n) + 1));
    if (uniform() > repeats) continue;
    fuzz_sort<float>(content, n);
    fuzz_sort<double>(content, n);
    for (double exponent : exponents)
      for (PhiName phi : {PhiName::identity, PhiName::half_square, PhiName::abs, PhiName::exp}) {
        if (uniform() > 2 * repeats) continue;
        fuzz_permutahedron<float>(content, n, exponent, phi);
        fuzz_permutahedron<double>(content, n, exponent, phi);
        if (n > 0) fuzz_values<float>(content, n, exponent, phi);
        if (n > 0) fuzz_values<double>(content, n, exponent, phi);
      }
  }
}

// ------------------------------------------------------------------------------------------------------ threads

// What is thrown on any thread comes back to the caller, after which the pool works as before.
void fuzz_exceptions() {
  struct Work {
    std::size_t bad;
    std::atomic<std::size_t> done{0};
  };
  const auto run = [](void* context, std::size_t i) {
    Work& work = *static_cast<Work*>(context);
    if (i == work.bad) throw std::bad_alloc();
    ++work.done;
  };
  for (std::size_t count : {std::size_t(1), std::size_t(7), std::size_t(1000)})
    for (std::size_t threads : {std::size_t(1), std::size_t(4)}) {
      begin_call("%zu jobs on %zu threads, one of which throws", count, threads);
      Work work{below(count)};
      bool thrown = false;
      try {
        parallel_for(count, threads, run, &work);
      } catch (const std::bad_alloc&) {
        thrown = true;
      }
      check(thrown && work.done < count, "an exception is lost", double(work.done), double(count));
      Work good{count};
      parallel_for(count, threads, run, &good);
      check(good.done == count, "jobs are lost", double(good.done), double(count));
    }
}

// ------------------------------------------------------------------------------------------------------- memory

// Every allocation of a call fails once: each time that is an exception, nothing leaks (the address sanitizer would
// say so), and in the end the call succeeds.
template <class F>
void fuzz_memory_of(const char* name, F&& call) {
  bool succeeded = false;
  for (long allowed = 0; !succeeded && allowed < 10000; ++allowed) {
    begin_call("%s, of which allocation %ld fails", name, allowed);
    allocations_left = allowed;
    try {
      call();
      succeeded = true;
    } catch (const std::bad_alloc&) {
    }
    allocations_left = -1;
  }
  check(succeeded, "a call that never succeeds");
}

void fuzz_memory(std::size_t n) {
  const std::size_t rows = 5;
  const std::vector<double> x = make_rows<double>("normal", rows, n, n), w = make_rows<double>("descending", 1, n, n);
  const std::vector<double> lam(rows, 0.3), k(rows, double(n) / 2);
  std::vector<double> y(rows * n), dx(rows * n), d(rows * n), dk(rows), dlam(rows), value(rows);
  std::vector<std::int64_t> order(rows * n), block(rows * n), paired(rows * n), labels(rows, 0);
  for (const Setting& setting : kSettings) {
    Result<double> result(rows, n);
    const Problem problem{setting.op,
                          setting.exponent,
                          setting.debias,
                          Dtype::float64,
                          rows,
                          n,
                          n,
                          x.data(),
                          k.data(),
                          1,
                          lam.data(),
                          1,
                          result.state.data(),
                          3};
    fuzz_memory_of(setting.name, [&] {
      forward(problem, y.data());
      backward(problem, x.data(), dx.data(), dk.data(), dlam.data());
    });
    std::vector<std::int32_t> indices(rows * n);
    fuzz_memory_of("the operator in slots", [&] {
      select(problem, {n, y.data(), indices.data(), value.data()});
      select_backward(problem, {n, indices.data(), y.data(), value.data()}, dx.data(), dk.data(), dlam.data());
    });
    if (setting.op != Operator::sign)
      fuzz_memory_of("a choice of lam", [&] { choose_lam(problem, 1, 1e-300, value.data()); });
    if (setting.op != Operator::mask && setting.op != Operator::two_sided) continue;
    const Targets targets{labels.data(), -100, false, nullptr};
    fuzz_memory_of("a loss", [&] { loss(problem, targets, y.data(), value.data()); });
  }
  fuzz_memory_of("slots", [&] { select_slots(Dtype::float64, rows, n, y.data(), (n + 1) / 2, order.data()); });
  fuzz_memory_of("a sort", [&] { argsort_descending(rows, n, x.data(), order.data()); });
  const FloatRows of_x{x.data(), sizeof(double), rows, n}, of_w{w.data(), sizeof(double), 1, n};
  fuzz_memory_of("blocks", [&] {
    solve_permutahedron(PhiName::identity, 2, of_x, of_w, lam.data(), d.data(), block.data(), paired.data(), 3);
  });
  std::vector<std::uint32_t> by_size(rows * n), first(rows * n), of_weights(n);
  const Saved<double> saved{by_size.data(), first.data(), of_weights.data(), d.data()};
  fuzz_memory_of("a permutahedron", [&] {
    permutahedron_forward<double>(2, rows, of_x, of_w, lam.data(), y.data(), saved, 3);
    std::vector<double> dw(n);
    permutahedron_backward<double>(2, rows, n, rows, 1, saved, lam.data(), x.data(), dx.data(), dw.data(), dlam.data(),
                                   1e-8, 3);
  });
}

}  // namespace

int main(int argc, char** argv) {
  rng.seed(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1);
  if (argc > 2) effort = std::atof(argv[2]);
  signal(SIGALRM, too_long);
  signal(SIGPROF, too_long);
  fuzz_exceptions();
  for (std::size_t n : {std::size_t(1), std::size_t(33), std::size_t(5000), std::size_t(70000)}) fuzz_memory(n);
  if (effort == 0) return failures > 0;
  fuzz_halves();
  for (std::size_t n : kLengths) {
    const auto start = std::chrono::steady_clock::now();
    fuzz_isotonic(n);
    fuzz_dtype<float>("float32", n);
    fuzz_dtype<double>("float64", n);
    fuzz_dtype<Half>("float16", n);
    fuzz_dtype<BFloat16>("bfloat16", n);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    std::printf("n = %-7zu %5.1f s\n", n, taken.count());
    std::fflush(stdout);
  }
  std::printf("levels:");
  for (const Level& level : levels()) std::printf(" %s", level.name);
  std::printf("\n");
  return failures > 0;
}
