// Handlers for XLA: shapes, types, and nothing else. Leading axes are rows, whatever their number.
#include "ffi.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "isotonic.hpp"
#include "lam.hpp"
#include "parallel.hpp"
#include "problem.hpp"
#include "selection.hpp"
#include "targets.hpp"
#include "xla/ffi/api/ffi.h"

#ifdef __linux__
#include <sched.h>
#endif

namespace sparsetopk {
namespace {

namespace ffi = xla::ffi;
using ffi::AnyBuffer;
using ffi::DataType;
using ffi::Error;
using Result = ffi::Result<AnyBuffer>;
using Shape = std::vector<std::int64_t>;

// The static arguments of a call, by the names that JAX gives them: of a handler's signature they are the part that
// XLA cannot tell by types alone.
constexpr char kOp[] = "op", kExponent[] = "exponent", kDebias[] = "debias", kIgnored[] = "ignored",
               kCompletion[] = "completion", kSmoothing[] = "smoothing", kSize[] = "size", kDescending[] = "descending",
               kFractional[] = "fractional", kLeast[] = "least", kPhi[] = "phi", kFloor[] = "floor", kInW[] = "in_w";
using Op = ffi::Attr<std::int32_t, kOp>;
using Exponent = ffi::Attr<double, kExponent>;
using Debias = ffi::Attr<bool, kDebias>;
using Ignored = ffi::Attr<std::int64_t, kIgnored>;
using CompletedBy = ffi::Attr<std::int32_t, kCompletion>;
using Smoothing = ffi::Attr<double, kSmoothing>;
using Size = ffi::Attr<double, kSize>;
using Descending = ffi::Attr<bool, kDescending>;
using Fractional = ffi::Attr<std::int64_t, kFractional>;
using Least = ffi::Attr<double, kLeast>;
using Phi = ffi::Attr<std::int32_t, kPhi>;
using Floor = ffi::Attr<double, kFloor>;
using InW = ffi::Attr<bool, kInW>;

std::size_t usable_cpus() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::size_t(CPU_COUNT(&set));
#endif
  return std::thread::hardware_concurrency();
}

// As XLA does for its own operations: all CPUs that the process may use, unless told otherwise.
std::size_t thread_count() {
  static const std::size_t count = [] {
    const char* wanted = std::getenv("SPARSETOPK_THREADS");
    const std::size_t found = wanted != nullptr ? std::strtoul(wanted, nullptr, 10) : usable_cpus();
    return std::max<std::size_t>(found, 1);
  }();
  return count;
}

// x (..., n): its rows, and the shapes that the other arguments must have.
struct Rows {
  explicit Rows(const AnyBuffer& x) : shape(x.dimensions().begin(), x.dimensions().end()) {
    if (shape.empty()) return;
    n = std::size_t(shape.back());
    per_row = shape;
    per_row.back() = 1;
    for (std::size_t axis = 0; axis + 1 < shape.size(); ++axis) count *= std::size_t(shape[axis]);
  }
  Shape shape, per_row;
  std::size_t count = 1, n = 0;
};

// Collects what is wrong with the arguments; the first complaint is kept.
class Checker {
 public:
  void shape(const char* name, const AnyBuffer& found, const Shape& expected) {
    const Shape shape(found.dimensions().begin(), found.dimensions().end());
    if (shape != expected) complain(name, "have shape " + text(expected), text(shape));
  }
  void dtype(const char* name, const AnyBuffer& found, std::initializer_list<DataType> expected) {
    for (const DataType one : expected)
      if (found.element_type() == one) return;
    std::string names;
    for (const DataType one : expected) names += (names.empty() ? "" : " or ") + text(one);
    complain(name, "be " + names, text(found.element_type()));
  }
  void require(bool holds, const char* name, const std::string& expected, const std::string& found) {
    if (!holds) complain(name, expected, found);
  }
  bool passed() const { return message_.empty(); }
  Error error() const { return Error::InvalidArgument(message_); }

 private:
  static std::string text(DataType dtype) {
    std::ostringstream out;
    out << dtype;
    return out.str();
  }
  static std::string text(const Shape& shape) {
    std::string out;
    for (const std::int64_t size : shape) out += (out.empty() ? "" : ", ") + std::to_string(size);
    return "(" + out + (shape.size() == 1 ? ",)" : ")");
  }
  void complain(const char* name, const std::string& expected, const std::string& found) {
    if (passed()) message_ = std::string(name) + " must " + expected + ", got " + found;
  }
  std::string message_;
};

// f on the data of a buffer of float32 or float64.
template <class F>
void with_floats(const AnyBuffer& buffer, F&& f) {
  if (buffer.element_type() == DataType::F32) return f(buffer.typed_data<float>());
  f(buffer.typed_data<double>());
}

// Adds the numbers of a buffer to what is there.
void add(const AnyBuffer& buffer, std::vector<double>& to) {
  with_floats(buffer, [&](const auto* from) {
    for (std::size_t i = 0; i < to.size(); ++i) to[i] += double(from[i]);
  });
}

Dtype dtype_of(const AnyBuffer& x) {
  switch (x.element_type()) {
    case DataType::F64:
      return Dtype::float64;
    case DataType::F16:
      return Dtype::float16;
    case DataType::BF16:
      return Dtype::bfloat16;
    default:
      return Dtype::float32;
  }
}

// A handler: XLA must never see an exception, which would end the process.
template <class... Arguments>
auto translated(Error (*function)(Arguments...)) {
  return [function](Arguments... arguments) {
    try {
      return function(arguments...);
    } catch (const std::bad_alloc&) {
      return Error(ffi::ErrorCode::kResourceExhausted, "sparsetopk: out of memory");
    } catch (const std::exception& error) {
      return Error::Internal(error.what());
    }
  };
}

// k and lam of every row as the kernels take them, and its state; k = whole + frac, so that float32 holds large counts.
struct Numbers {
  Numbers(std::size_t rows, const AnyBuffer& whole, const AnyBuffer& frac)
      : k(whole.typed_data<std::int32_t>(), whole.typed_data<std::int32_t>() + rows), lams(rows), state(rows) {
    add(frac, k);
  }
  Numbers(std::size_t rows, const AnyBuffer& whole, const AnyBuffer& frac, const AnyBuffer& lam)
      : Numbers(rows, whole, frac) {
    add(lam, lams);
  }
  Problem of(const Rows& rows, const AnyBuffer& x, std::int32_t op, double exponent, bool debias) {
    // One lam for all rows is told as one: the kernels have a way of their own where it is 0.
    const bool one = std::all_of(lams.begin(), lams.end(), [this](double lam) { return lam == lams[0]; });
    return {Operator(op),     exponent, debias, dtype_of(x), rows.count,        rows.n,       rows.n,
            x.untyped_data(), k.data(), 1,      lams.data(), std::size_t(!one), state.data(), thread_count()};
  }
  // The state of every row in buffers of float32 or float64.
  void store_state(const AnyBuffer& pivot, const AnyBuffer& delta);
  void load_state(const AnyBuffer& pivot, const AnyBuffer& delta);
  std::vector<double> k, lams;
  std::vector<State> state;
};

// Numbers of rows.
void check_numbers(Checker& check, const Rows& rows, const char* name, const AnyBuffer& found) {
  check.dtype(name, found, {DataType::F32, DataType::F64});
  check.shape(name, found, rows.per_row);
}

// Rows, their k, and the operator.
void check_rows(Checker& check, const Rows& rows, const AnyBuffer& x, const AnyBuffer& whole, const AnyBuffer& frac,
                std::int32_t op) {
  check.require(!rows.shape.empty(), "x", "have at least one axis", "a scalar");
  check.dtype("x", x, {DataType::F32, DataType::F64, DataType::F16, DataType::BF16});
  check.dtype("whole", whole, {DataType::S32});
  check.shape("whole", whole, rows.per_row);
  check_numbers(check, rows, "frac", frac);
  check.require(op >= 0 && op <= int(Operator::two_sided), "op", "be in [0, 3]", std::to_string(op));
}

// What forward and backward are both asked with.
void check_problem(Checker& check, const Rows& rows, const AnyBuffer& x, const AnyBuffer& whole, const AnyBuffer& frac,
                   const AnyBuffer& lam, std::int32_t op) {
  check_rows(check, rows, x, whole, frac, op);
  check_numbers(check, rows, "lam", lam);
}

// Writes numbers of rows into a buffer of float32 or float64.
template <class F>
void store(const AnyBuffer& to, std::size_t rows, F&& value) {
  with_floats(to, [&](auto* out) {
    for (std::size_t i = 0; i < rows; ++i) out[i] = std::decay_t<decltype(*out)>(value(i));
  });
}

// The state of a row as float32 holds it best. One that it holds as it is stays, as entries may be at the very edge of
// its block. A threshold that is closer to 0 than to its pivot has more digits as the pivot; and what the pivot loses of
// its own goes to delta.
State in_float32(State state, double lam) {
  if (!std::isfinite(state.pivot) || !(lam > 0)) return state;
  if (double(float(state.pivot)) == state.pivot && double(float(state.delta)) == state.delta) return state;
  const double v = state.pivot - lam * state.delta;
  if (std::fabs(v) <= lam * std::fabs(state.delta) && float(v) != 0) return {v, 0};
  const double near = double(float(state.pivot));
  return {near, state.delta + (near - state.pivot) / lam};
}

void Numbers::store_state(const AnyBuffer& pivot, const AnyBuffer& delta) {
  if (pivot.element_type() == DataType::F32)
    for (std::size_t i = 0; i < state.size(); ++i) state[i] = in_float32(state[i], lams[i]);
  store(pivot, state.size(), [&](std::size_t i) { return state[i].pivot; });
  store(delta, state.size(), [&](std::size_t i) { return state[i].delta; });
}

void Numbers::load_state(const AnyBuffer& pivot, const AnyBuffer& delta) {
  const auto load = [this](const AnyBuffer& from, double State::* member) {
    with_floats(from, [&](const auto* in) {
      for (std::size_t i = 0; i < state.size(); ++i) state[i].*member = double(in[i]);
    });
  };
  load(pivot, &State::pivot);
  load(delta, &State::delta);
}

// The state of every row, among the results of a forward.
void check_state(Checker& check, const Rows& rows, const AnyBuffer& lam, const AnyBuffer& pivot,
                 const AnyBuffer& delta) {
  check.dtype("pivot", pivot, {lam.element_type()});
  check.dtype("delta", delta, {lam.element_type()});
  check.shape("pivot", pivot, rows.per_row);
  check.shape("delta", delta, rows.per_row);
}

// y, and the state of every row.
Error threshold(AnyBuffer x, AnyBuffer whole, AnyBuffer frac, AnyBuffer lam, Result y, Result pivot, Result delta,
                Op op, Exponent exponent, Debias debias) {
  const Rows rows(x);
  Checker check;
  check_problem(check, rows, x, whole, frac, lam, *op);
  check.dtype("y", *y, {x.element_type()});
  check.shape("y", *y, rows.shape);
  check_state(check, rows, lam, *pivot, *delta);
  if (!check.passed()) return check.error();

  Numbers numbers(rows.count, whole, frac, lam);
  forward(numbers.of(rows, x, *op, *exponent, *debias), y->untyped_data());
  numbers.store_state(*pivot, *delta);
  return Error::Success();
}

XLA_FFI_DEFINE_HANDLER(threshold_handler, translated(threshold));

// The state of every row, among the arguments of a backward, and its results.
void check_backward(Checker& check, const Rows& rows, const AnyBuffer& x, const AnyBuffer& lam, const AnyBuffer& pivot,
                    const AnyBuffer& delta, const AnyBuffer& dx, const AnyBuffer& dk, const AnyBuffer& dlam) {
  check_numbers(check, rows, "pivot", pivot);
  check_numbers(check, rows, "delta", delta);
  check.dtype("dx", dx, {x.element_type()});
  check.dtype("dk", dk, {lam.element_type()});
  check.dtype("dlam", dlam, {lam.element_type()});
  check.shape("dx", dx, rows.shape);
  check.shape("dk", dk, rows.per_row);
  check.shape("dlam", dlam, rows.per_row);
}

// The cotangents of x, k and lam, from the state of every row and the cotangent g of y.
Error threshold_backward(AnyBuffer x, AnyBuffer whole, AnyBuffer frac, AnyBuffer lam, AnyBuffer pivot, AnyBuffer delta,
                         AnyBuffer g, Result dx, Result dk, Result dlam, Op op, Exponent exponent, Debias debias) {
  const Rows rows(x);
  Checker check;
  check_problem(check, rows, x, whole, frac, lam, *op);
  check_backward(check, rows, x, lam, pivot, delta, *dx, *dk, *dlam);
  check.dtype("g", g, {x.element_type()});
  check.shape("g", g, rows.shape);
  if (!check.passed()) return check.error();

  Numbers numbers(rows.count, whole, frac, lam);
  numbers.load_state(pivot, delta);
  std::vector<double> in_k(rows.count), in_lam(rows.count);
  Problem problem = numbers.of(rows, x, *op, *exponent, *debias);
  if (pivot.element_type() == DataType::F32) problem.rounding = 0x1p-23;
  backward(problem, g.untyped_data(), dx->untyped_data(), in_k.data(), in_lam.data());
  store(*dk, rows.count, [&](std::size_t i) { return in_k[i]; });
  store(*dlam, rows.count, [&](std::size_t i) { return in_lam[i]; });
  return Error::Success();
}

XLA_FFI_DEFINE_HANDLER(threshold_backward_handler, translated(threshold_backward));

// f(x, 1_k) of every row, for the operators that have a loss.
Error value(AnyBuffer x, AnyBuffer whole, AnyBuffer frac, AnyBuffer lam, Result found, Op op, Exponent exponent) {
  const Rows rows(x);
  Checker check;
  check_problem(check, rows, x, whole, frac, lam, *op);
  check_numbers(check, rows, "value", *found);
  check.require(*op == int(Operator::mask) || *op == int(Operator::two_sided), "op", "be 0 or 3", std::to_string(*op));
  if (!check.passed()) return check.error();

  Numbers numbers(rows.count, whole, frac, lam);
  std::vector<double> values(rows.count);
  const std::unique_ptr<char[]> y(new char[x.size_bytes()]);
  const Targets none{nullptr, 0, false, nullptr};
  loss(numbers.of(rows, x, *op, *exponent, false), none, y.get(), values.data());
  store(*found, rows.count, [&](std::size_t i) { return values[i]; });
  return Error::Success();
}

XLA_FFI_DEFINE_HANDLER(value_handler, translated(value));

// Class indices for the core.
std::vector<std::int64_t> labels_of(const AnyBuffer& labels) {
  const auto read = [&](const auto* from) { return std::vector<std::int64_t>(from, from + labels.element_count()); };
  if (labels.element_type() == DataType::S32) return read(labels.typed_data<std::int32_t>());
  return read(labels.typed_data<std::int64_t>());
}

// The rows whose label is no class; the kernel is told to ignore these.
std::vector<std::size_t> without_class(std::vector<std::int64_t>& labels, std::size_t n, std::int64_t ignored) {
  std::vector<std::size_t> bad;
  for (std::size_t i = 0; i < labels.size(); ++i)
    if (labels[i] != ignored && (labels[i] < 0 || std::size_t(labels[i]) >= n)) labels[i] = ignored, bad.push_back(i);
  return bad;
}

// A row of NaN.
void spoil(const AnyBuffer& rows, std::size_t row, std::size_t n) {
  const auto fill = [&](auto* to, auto nan) { std::fill(to + row * n, to + (row + 1) * n, nan); };
  if (rows.element_type() == DataType::F32) return fill(rows.typed_data<float>(), std::nanf(""));
  if (rows.element_type() == DataType::F64) return fill(rows.typed_data<double>(), std::nan(""));
  const bool half = rows.element_type() == DataType::F16;
  fill(static_cast<std::uint16_t*>(rows.untyped_data()), std::uint16_t(half ? 0x7e00 : 0x7fc0));
}

// The losses of rows with labels, compared with these alone or spread.
std::vector<double> loss_of_labels(const Problem& problem, const AnyBuffer& targets, std::int64_t ignored, bool spread,
                                   const AnyBuffer& slope) {
  std::vector<double> values(problem.rows);
  std::vector<std::int64_t> labels = labels_of(targets);
  const std::vector<std::size_t> bad = without_class(labels, problem.n, ignored);
  loss(problem, {labels.data(), ignored, spread, nullptr}, slope.untyped_data(), values.data());
  for (const std::size_t row : bad) {
    values[row] = std::nan("");
    spoil(slope, row, problem.n);
  }
  return values;
}

// Those with labels or weights, completed and smoothed in any way.
std::vector<double> loss_of_targets(const Problem& problem, const AnyBuffer& targets, std::int64_t ignored,
                                    Completion completion, double smoothing, const AnyBuffer& slope) {
  std::vector<double> values(problem.rows);
  std::vector<std::int64_t> labels;
  TargetRows rows{nullptr, ignored, nullptr, nullptr};
  if (targets.element_type() == DataType::F32)
    rows.singles = targets.typed_data<float>();
  else if (targets.element_type() == DataType::F64)
    rows.doubles = targets.typed_data<double>();
  else
    labels = labels_of(targets), rows.labels = labels.data();
  completed_loss(problem, rows, completion, smoothing, slope.untyped_data(), values.data());
  return values;
}

// The loss of every row for its targets, and its gradient y - t; NaN where they are none.
Error target_loss(AnyBuffer x, AnyBuffer whole, AnyBuffer frac, AnyBuffer lam, AnyBuffer targets, Result found,
                  Result slope, Op op, Exponent exponent, Ignored ignored, CompletedBy completion,
                  Smoothing smoothing) {
  const Rows rows(x);
  const DataType type = targets.element_type();
  const bool labels = type == DataType::S32 || type == DataType::S64;
  Checker check;
  check_problem(check, rows, x, whole, frac, lam, *op);
  if (!labels) check.dtype("targets", targets, {DataType::S32, DataType::S64, DataType::F32, DataType::F64});
  check.shape("targets", targets, labels ? rows.per_row : rows.shape);
  check_numbers(check, rows, "value", *found);
  check.dtype("slope", *slope, {x.element_type()});
  check.shape("slope", *slope, rows.shape);
  check.require(*op == int(Operator::mask) || *op == int(Operator::two_sided), "op", "be 0 or 3", std::to_string(*op));
  check.require(*completion >= 0 && *completion <= int(Completion::best), "completion", "be in [0, 2]",
                std::to_string(*completion));
  check.require(*smoothing >= 0 && *smoothing <= 1, "smoothing", "be in [0, 1]", std::to_string(*smoothing));
  if (!check.passed()) return check.error();

  Numbers numbers(rows.count, whole, frac, lam);
  const Problem problem = numbers.of(rows, x, *op, *exponent, false);
  const Completion by = Completion(*completion);
  const bool plain = labels && by != Completion::best && *smoothing == 0;
  const std::vector<double> values = plain
                                         ? loss_of_labels(problem, targets, *ignored, by == Completion::spread, *slope)
                                         : loss_of_targets(problem, targets, *ignored, by, *smoothing, *slope);
  store(*found, rows.count, [&](std::size_t i) { return values[i]; });
  return Error::Success();
}

XLA_FFI_DEFINE_HANDLER(target_loss_handler, translated(target_loss));

// Rows to threads, some at a time, so that a short row costs no more than it must.
struct SlotsOfRows {
  Dtype dtype;
  const char* y;
  std::size_t rows, n, row_bytes, capacity, together;
  std::int32_t* indices;

  void operator()(std::size_t part) const {
    const std::size_t first = part * together, count = std::min(together, rows - first);
    std::vector<std::int64_t> found(count * capacity);
    select_slots(dtype, count, n, y + first * row_bytes, capacity, found.data());
    std::copy(found.begin(), found.end(), indices + first * capacity);
  }
};

// The shape of slots, which the indices have.
Shape check_slots(Checker& check, const Rows& rows, const AnyBuffer& indices) {
  check.dtype("indices", indices, {DataType::S32});
  Shape slots = rows.shape;
  if (slots.empty()) return slots;
  slots.back() = indices.dimensions().size() == slots.size() ? indices.dimensions().back() : 0;
  check.shape("indices", indices, slots);
  check.require(slots.back() >= 0 && std::size_t(slots.back()) <= rows.n, "indices", "have at most n slots",
                std::to_string(slots.back()));
  return slots;
}

// The indices of the largest entries of every row in magnitude, in order; see selection.hpp.
Error select_largest(AnyBuffer y, Result indices) {
  const Rows rows(y);
  Checker check;
  check.require(!rows.shape.empty(), "y", "have at least one axis", "a scalar");
  check.dtype("y", y, {DataType::F32, DataType::F64, DataType::F16, DataType::BF16});
  const Shape slots = check_slots(check, rows, *indices);
  if (!check.passed()) return check.error();
  const std::size_t capacity = std::size_t(slots.back());
  if (capacity == 0 || rows.count == 0) return Error::Success();
  constexpr std::size_t kEntries = 1 << 14;  // that a thread is given at once
  const std::size_t together = std::max<std::size_t>(1, kEntries / rows.n);
  SlotsOfRows job{dtype_of(y),
                  static_cast<const char*>(y.untyped_data()),
                  rows.count,
                  rows.n,
                  y.size_bytes() / rows.count,
                  capacity,
                  together,
                  indices->typed_data<std::int32_t>()};
  parallel_for((rows.count + together - 1) / together, thread_count(),
               [](void* context, std::size_t part) { (*static_cast<const SlotsOfRows*>(context))(part); }, &job);
  return Error::Success();
}

XLA_FFI_DEFINE_HANDLER(select_largest_handler, translated(select_largest));

// What slots are made of, and how many of them a row has.
std::size_t check_selected(Checker& check, const Rows& rows, const AnyBuffer& x, const AnyBuffer& values,
                           const AnyBuffer& indices, const AnyBuffer& dropped) {
  const Shape slots = check_slots(check, rows, indices);
  check.require(rows.n == 0 || slots.empty() || slots.back() > 0, "indices", "have a slot", "none");
  check.dtype("values", values, {x.element_type()});
  check.shape("values", values, slots);
  check_numbers(check, rows, "dropped", dropped);
  return slots.empty() ? 0 : std::size_t(slots.back());
}

// The operator in slots, and the state of every row.
Error select_solved(AnyBuffer x, AnyBuffer whole, AnyBuffer frac, AnyBuffer lam, Result values, Result indices,
                    Result dropped, Result pivot, Result delta, Op op, Exponent exponent, Debias debias) {
  const Rows rows(x);
  Checker check;
  check_problem(check, rows, x, whole, frac, lam, *op);
  const std::size_t capacity = check_selected(check, rows, x, *values, *indices, *dropped);
  check_state(check, rows, lam, *pivot, *delta);
  if (!check.passed()) return check.error();

  Numbers numbers(rows.count, whole, frac, lam);
  std::vector<double> left_out(rows.count);
  select(numbers.of(rows, x, *op, *exponent, *debias),
         {capacity, values->untyped_data(), indices->typed_data<std::int32_t>(), left_out.data()});
  store(*dropped, rows.count, [&](std::size_t i) { return left_out[i]; });
  numbers.store_state(*pivot, *delta);
  return Error::Success();
}

XLA_FFI_DEFINE_HANDLER(select_solved_handler, translated(select_solved));

// The same straight through: the hard selection first.
Error select_hard_first(AnyBuffer x, AnyBuffer whole, AnyBuffer frac, AnyBuffer lam, Result values, Result indices,
                        Result dropped, Result pivot, Result delta, Result selected, Op op, Exponent exponent,
                        Debias debias) {
  const Rows rows(x);
  Checker check;
  check_problem(check, rows, x, whole, frac, lam, *op);
  const std::size_t capacity = check_selected(check, rows, x, *values, *indices, *dropped);
  check_state(check, rows, lam, *pivot, *delta);
  check.dtype("selected", *selected, {DataType::PRED});
  check.shape("selected", *selected, Shape(indices->dimensions().begin(), indices->dimensions().end()));
  if (!check.passed()) return check.error();

  Numbers numbers(rows.count, whole, frac, lam);
  std::vector<double> left_out(rows.count);
  select_straight(numbers.of(rows, x, *op, *exponent, *debias),
                  {capacity, values->untyped_data(), indices->typed_data<std::int32_t>(), left_out.data()},
                  selected->typed_data<bool>());
  store(*dropped, rows.count, [&](std::size_t i) { return left_out[i]; });
  numbers.store_state(*pivot, *delta);
  return Error::Success();
}

XLA_FFI_DEFINE_HANDLER(select_hard_first_handler, translated(select_hard_first));

// The cotangents of x, k and lam from those of values and dropped.
Error select_pulled(AnyBuffer x, AnyBuffer whole, AnyBuffer frac, AnyBuffer lam, AnyBuffer pivot, AnyBuffer delta,
                    AnyBuffer indices, AnyBuffer of_values, AnyBuffer of_dropped, Result dx, Result dk, Result dlam,
                    Op op, Exponent exponent, Debias debias) {
  const Rows rows(x);
  Checker check;
  check_problem(check, rows, x, whole, frac, lam, *op);
  check_backward(check, rows, x, lam, pivot, delta, *dx, *dk, *dlam);
  const Shape slots = check_slots(check, rows, indices);
  check.dtype("of_values", of_values, {x.element_type()});
  check.shape("of_values", of_values, slots);
  check_numbers(check, rows, "of_dropped", of_dropped);
  if (!check.passed()) return check.error();

  Numbers numbers(rows.count, whole, frac, lam);
  numbers.load_state(pivot, delta);
  std::vector<double> left_out(rows.count), in_k(rows.count), in_lam(rows.count);
  add(of_dropped, left_out);
  select_backward(
      numbers.of(rows, x, *op, *exponent, *debias),
      {std::size_t(slots.back()), indices.typed_data<std::int32_t>(), of_values.untyped_data(), left_out.data()},
      dx->untyped_data(), in_k.data(), in_lam.data());
  store(*dk, rows.count, [&](std::size_t i) { return in_k[i]; });
  store(*dlam, rows.count, [&](std::size_t i) { return in_lam[i]; });
  return Error::Success();
}

XLA_FFI_DEFINE_HANDLER(select_pulled_handler, translated(select_pulled));

// The lam of every row that leaves so many entries fractional; see lam.hpp.
Error chosen_lam(AnyBuffer x, AnyBuffer whole, AnyBuffer frac, Result lam, Op op, Exponent exponent,
                 Fractional fractional, Least least) {
  const Rows rows(x);
  Checker check;
  check_rows(check, rows, x, whole, frac, *op);
  check_numbers(check, rows, "lam", *lam);
  check.require(*op != int(Operator::sign), "op", "have no signs", std::to_string(*op));
  check.require(*fractional >= 1 && std::size_t(*fractional) <= rows.n, "fractional", "be in [1, n]",
                std::to_string(*fractional));
  check.require(*least > 0 && *least < 1, "least", "be in (0, 1)", std::to_string(*least));
  if (!check.passed()) return check.error();

  Numbers numbers(rows.count, whole, frac);
  std::vector<double> found(rows.count);
  choose_lam(numbers.of(rows, x, *op, *exponent, false), std::size_t(*fractional), *least, found.data());
  store(*lam, rows.count, [&](std::size_t i) { return found[i]; });
  return Error::Success();
}

XLA_FFI_DEFINE_HANDLER(chosen_lam_handler, translated(chosen_lam));

// The lam of every row with which the blocks of its relaxed rank have so many entries on average.
Error chosen_rank_lam(AnyBuffer x, Result lam, Exponent exponent, Size size, Descending descending, Least least) {
  const Rows rows(x);
  Checker check;
  check.require(!rows.shape.empty(), "x", "have at least one axis", "a scalar");
  check.dtype("x", x, {DataType::F32, DataType::F64});
  check_numbers(check, rows, "lam", *lam);
  check.require(*size >= 1, "size", "be at least 1", std::to_string(*size));
  check.require(*least > 0 && *least < 1, "least", "be in (0, 1)", std::to_string(*least));
  if (!check.passed()) return check.error();

  std::vector<double> found(rows.count);
  with_floats(x, [&](const auto* data) {
    choose_rank_lam({*exponent, *size, *least, *descending}, rows.count, rows.n, data, found.data(), thread_count());
  });
  store(*lam, rows.count, [&](std::size_t i) { return found[i]; });
  return Error::Success();
}

XLA_FFI_DEFINE_HANDLER(chosen_rank_lam_handler, translated(chosen_rank_lam));

// Rows of one type for the isotonic problem, and what is found of their entries.
void check_blocks(Checker& check, const Rows& rows, const AnyBuffer& lam, const AnyBuffer& d, const AnyBuffer& block,
                  const AnyBuffer& paired) {
  check.require(!rows.shape.empty(), "d", "have at least one axis", "a scalar");
  check.dtype("d", d, {DataType::F32, DataType::F64});
  check.dtype("lam", lam, {d.element_type()});
  check.dtype("block", block, {DataType::S32});
  check.dtype("paired", paired, {DataType::S32});
  check.shape("lam", lam, rows.per_row);
  check.shape("d", d, rows.shape);
  check.shape("block", block, rows.shape);
  check.shape("paired", paired, rows.shape);
  check.require(rows.n <= std::size_t(std::numeric_limits<std::int32_t>::max()), "d",
                "have at most 2^31 - 1 entries per row", std::to_string(rows.n));
}

// Entries of rows, of the type that all of them have.
void check_entries(Checker& check, const Rows& rows, const char* name, const AnyBuffer& found, const AnyBuffer& first) {
  check.dtype(name, found, {first.element_type()});
  check.shape(name, found, rows.shape);
}

// d, block and paired of rows in any order; see isotonic.hpp.
Error pav(AnyBuffer x, AnyBuffer w, AnyBuffer lam, Result d, Result block, Result paired, Phi phi, Exponent exponent) {
  const Rows rows(x);
  Checker check;
  check.dtype("x", x, {DataType::F32, DataType::F64});
  check_blocks(check, rows, lam, *d, *block, *paired);
  check_entries(check, rows, "x", x, *d);
  check_entries(check, rows, "w", w, *d);
  check.require(*phi >= 0 && *phi <= int(PhiName::exp), "phi", "be in [0, 3]", std::to_string(*phi));
  if (!check.passed()) return check.error();
  with_floats(x, [&](const auto* data) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
    solve_permutahedron<T>(PhiName(*phi), *exponent, rows.count, rows.n, data, w.typed_data<T>(), lam.typed_data<T>(),
                           d->typed_data<T>(), block->typed_data<std::int32_t>(), paired->typed_data<std::int32_t>(),
                           thread_count());
  });
  return Error::Success();
}

XLA_FFI_DEFINE_HANDLER(pav_handler, translated(pav));

// The same for phi = identity, with y; lam may be 0.
Error permutahedron(AnyBuffer x, AnyBuffer w, AnyBuffer lam, Result y, Result d, Result block, Result paired,
                    Exponent exponent) {
  const Rows rows(x);
  Checker check;
  check.dtype("x", x, {DataType::F32, DataType::F64});
  check_blocks(check, rows, lam, *d, *block, *paired);
  check_entries(check, rows, "x", x, *d);
  check_entries(check, rows, "w", w, *d);
  check_entries(check, rows, "y", *y, *d);
  if (!check.passed()) return check.error();
  with_floats(x, [&](const auto* data) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
    const Kept<T> kept{d->typed_data<T>(), block->typed_data<std::int32_t>(), paired->typed_data<std::int32_t>()};
    respond_permutahedron<T>(*exponent, rows.count, rows.n, data, w.typed_data<T>(), lam.typed_data<T>(),
                             y->typed_data<T>(), kept, thread_count());
  });
  return Error::Success();
}

XLA_FFI_DEFINE_HANDLER(permutahedron_handler, translated(permutahedron));

// The cotangents of x, w (of length 1, and 0, if it is not asked for) and lam from that of y.
Error permutahedron_pulled(AnyBuffer lam, AnyBuffer d, AnyBuffer block, AnyBuffer paired, AnyBuffer g, Result dx,
                           Result dw, Result dlam, Exponent exponent, Floor floor, InW in_w) {
  const Rows rows(d);
  Checker check;
  check_blocks(check, rows, lam, d, block, paired);
  check_entries(check, rows, "g", g, d);
  check_entries(check, rows, "dx", *dx, d);
  check.dtype("dw", *dw, {d.element_type()});
  check.shape("dw", *dw, *in_w ? rows.shape : rows.per_row);
  check.dtype("dlam", *dlam, {d.element_type()});
  check.shape("dlam", *dlam, rows.per_row);
  if (!check.passed()) return check.error();
  with_floats(d, [&](const auto* data) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
    const Kept<const T> kept{data, block.typed_data<std::int32_t>(), paired.typed_data<std::int32_t>()};
    T* of_w = dw->typed_data<T>();
    if (!*in_w) std::fill_n(of_w, rows.count, T(0));
    pull_permutahedron<T>(*exponent, rows.count, rows.n, lam.typed_data<T>(), kept, g.typed_data<T>(),
                          {dx->typed_data<T>(), *in_w ? of_w : nullptr, dlam->typed_data<T>()}, *floor, thread_count());
  });
  return Error::Success();
}

XLA_FFI_DEFINE_HANDLER(permutahedron_pulled_handler, translated(permutahedron_pulled));

// The arrays that rows were put together of, each from a multiple of ``width`` on. To XLA every copy would be a program
// of its own.
Error cut(AnyBuffer x, ffi::RemainingRets found, std::int64_t width) {
  const Rows rows(x);
  const std::size_t size = rows.count * rows.n > 0 ? x.size_bytes() / (rows.count * rows.n) : 0;
  const char* from = static_cast<const char*>(x.untyped_data());
  Checker check;
  check.require(!rows.shape.empty(), "x", "have at least one axis", "a scalar");
  check.require(width >= 1, "width", "be at least 1", std::to_string(width));
  std::size_t begin = 0;
  for (std::size_t i = 0; i < found.size() && check.passed(); ++i) {
    auto each = found.get<AnyBuffer>(i);
    if (!each.has_value()) return each.error();
    const AnyBuffer& to = **each;
    const Rows part(to);
    check.dtype("parts", to, {x.element_type()});
    check.require(part.per_row == rows.per_row, "parts", "have the rows of x", "others");
    check.require(begin <= rows.n && part.n <= rows.n - begin, "parts", "have no more entries than x", "more");
    if (!check.passed() || part.n == 0) continue;
    char* out = static_cast<char*>(to.untyped_data());
    for (std::size_t row = 0; row < rows.count; ++row)
      std::memcpy(out + row * part.n * size, from + (row * rows.n + begin) * size, part.n * size);
    begin += (part.n + std::size_t(width) - 1) / std::size_t(width) * std::size_t(width);
  }
  return check.passed() ? Error::Success() : check.error();
}

XLA_FFI_DEFINE_HANDLER(cut_handler, cut, ffi::Ffi::Bind().Arg<AnyBuffer>().RemainingRets().Attr<std::int64_t>("width"));

}  // namespace

const Handler handlers[] = {
    {"sparsetopk_cut", reinterpret_cast<void*>(cut_handler)},
    {"sparsetopk_threshold", reinterpret_cast<void*>(threshold_handler)},
    {"sparsetopk_threshold_backward", reinterpret_cast<void*>(threshold_backward_handler)},
    {"sparsetopk_value", reinterpret_cast<void*>(value_handler)},
    {"sparsetopk_target_loss", reinterpret_cast<void*>(target_loss_handler)},
    {"sparsetopk_largest", reinterpret_cast<void*>(select_largest_handler)},
    {"sparsetopk_select", reinterpret_cast<void*>(select_solved_handler)},
    {"sparsetopk_select_straight", reinterpret_cast<void*>(select_hard_first_handler)},
    {"sparsetopk_select_backward", reinterpret_cast<void*>(select_pulled_handler)},
    {"sparsetopk_choose_lam", reinterpret_cast<void*>(chosen_lam_handler)},
    {"sparsetopk_choose_rank_lam", reinterpret_cast<void*>(chosen_rank_lam_handler)},
    {"sparsetopk_permutahedron", reinterpret_cast<void*>(permutahedron_handler)},
    {"sparsetopk_permutahedron_backward", reinterpret_cast<void*>(permutahedron_pulled_handler)},
    {"sparsetopk_pav", reinterpret_cast<void*>(pav_handler)},
    {nullptr, nullptr},
};

}  // namespace sparsetopk
