// Handlers for XLA: shapes, types, and nothing else. Leading axes are rows, whatever their number.
#include "ffi.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <initializer_list>
#include <limits>
#include <new>
#include <sstream>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "isotonic.hpp"
#include "parallel.hpp"
#include "problem.hpp"
#include "selection.hpp"
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
  Numbers(std::size_t rows, const AnyBuffer& whole, const AnyBuffer& frac, const AnyBuffer& lam)
      : k(whole.typed_data<std::int32_t>(), whole.typed_data<std::int32_t>() + rows), lams(rows), state(rows) {
    add(frac, k);
    add(lam, lams);
  }
  Problem of(const Rows& rows, const AnyBuffer& x, std::int32_t op, double exponent, bool debias) {
    return {Operator(op),     exponent, debias, dtype_of(x), rows.count, rows.n,       rows.n,
            x.untyped_data(), k.data(), 1,      lams.data(), 1,          state.data(), thread_count()};
  }
  std::vector<double> k, lams;
  std::vector<State> state;
};

// What forward and backward are both asked with.
void check_problem(Checker& check, const Rows& rows, const AnyBuffer& x, const AnyBuffer& whole, const AnyBuffer& frac,
                   const AnyBuffer& lam, std::int32_t op) {
  check.require(!rows.shape.empty(), "x", "have at least one axis", "a scalar");
  check.dtype("x", x, {DataType::F32, DataType::F64, DataType::F16, DataType::BF16});
  check.dtype("whole", whole, {DataType::S32});
  check.dtype("frac", frac, {DataType::F32, DataType::F64});
  check.dtype("lam", lam, {DataType::F32, DataType::F64});
  check.shape("whole", whole, rows.per_row);
  check.shape("frac", frac, rows.per_row);
  check.shape("lam", lam, rows.per_row);
  check.require(op >= 0 && op <= int(Operator::two_sided), "op", "be in [0, 3]", std::to_string(op));
}

// Writes numbers of rows into a buffer of float32 or float64.
template <class F>
void store(const AnyBuffer& to, std::size_t rows, F&& value) {
  with_floats(to, [&](auto* out) {
    for (std::size_t i = 0; i < rows; ++i) out[i] = std::decay_t<decltype(*out)>(value(i));
  });
}

// The state of a row as float32 holds it best. A threshold that is closer to 0 than to its pivot has more digits as
// the pivot; and what the pivot loses of its own goes to delta.
State in_float32(State state, double lam) {
  if (!std::isfinite(state.pivot) || !(lam > 0)) return state;
  const double v = state.pivot - lam * state.delta;
  if (std::fabs(v) <= lam * std::fabs(state.delta) && float(v) != 0) return {v, 0};
  const double near = double(float(state.pivot));
  return {near, state.delta + (near - state.pivot) / lam};
}

// y, and the state of every row.
Error threshold(AnyBuffer x, AnyBuffer whole, AnyBuffer frac, AnyBuffer lam, Result y, Result pivot, Result delta,
                std::int32_t op, double exponent, bool debias) {
  const Rows rows(x);
  Checker check;
  check_problem(check, rows, x, whole, frac, lam, op);
  check.dtype("y", *y, {x.element_type()});
  check.dtype("pivot", *pivot, {lam.element_type()});
  check.dtype("delta", *delta, {lam.element_type()});
  check.shape("y", *y, rows.shape);
  check.shape("pivot", *pivot, rows.per_row);
  check.shape("delta", *delta, rows.per_row);
  if (!check.passed()) return check.error();

  Numbers numbers(rows.count, whole, frac, lam);
  forward(numbers.of(rows, x, op, exponent, debias), y->untyped_data());
  if (lam.element_type() == DataType::F32)
    for (std::size_t i = 0; i < rows.count; ++i) numbers.state[i] = in_float32(numbers.state[i], numbers.lams[i]);
  store(*pivot, rows.count, [&](std::size_t i) { return numbers.state[i].pivot; });
  store(*delta, rows.count, [&](std::size_t i) { return numbers.state[i].delta; });
  return Error::Success();
}

XLA_FFI_DEFINE_HANDLER(threshold_handler, translated(threshold),
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Attr<std::int32_t>("op")
                           .Attr<double>("exponent")
                           .Attr<bool>("debias"));

// The cotangents of x, k and lam, from the state of every row and the cotangent g of y.
Error threshold_backward(AnyBuffer x, AnyBuffer whole, AnyBuffer frac, AnyBuffer lam, AnyBuffer pivot, AnyBuffer delta,
                         AnyBuffer g, Result dx, Result dk, Result dlam, std::int32_t op, double exponent,
                         bool debias) {
  const Rows rows(x);
  Checker check;
  check_problem(check, rows, x, whole, frac, lam, op);
  check.dtype("pivot", pivot, {DataType::F32, DataType::F64});
  check.dtype("delta", delta, {DataType::F32, DataType::F64});
  check.dtype("g", g, {x.element_type()});
  check.dtype("dx", *dx, {x.element_type()});
  check.dtype("dk", *dk, {lam.element_type()});
  check.dtype("dlam", *dlam, {lam.element_type()});
  check.shape("pivot", pivot, rows.per_row);
  check.shape("delta", delta, rows.per_row);
  check.shape("g", g, rows.shape);
  check.shape("dx", *dx, rows.shape);
  check.shape("dk", *dk, rows.per_row);
  check.shape("dlam", *dlam, rows.per_row);
  if (!check.passed()) return check.error();

  Numbers numbers(rows.count, whole, frac, lam);
  const auto load = [&](const AnyBuffer& from, double State::* member) {
    with_floats(from, [&](const auto* in) {
      for (std::size_t i = 0; i < rows.count; ++i) numbers.state[i].*member = double(in[i]);
    });
  };
  load(pivot, &State::pivot);
  load(delta, &State::delta);
  std::vector<double> in_k(rows.count), in_lam(rows.count);
  backward(numbers.of(rows, x, op, exponent, debias), g.untyped_data(), dx->untyped_data(), in_k.data(), in_lam.data());
  store(*dk, rows.count, [&](std::size_t i) { return in_k[i]; });
  store(*dlam, rows.count, [&](std::size_t i) { return in_lam[i]; });
  return Error::Success();
}

XLA_FFI_DEFINE_HANDLER(threshold_backward_handler, translated(threshold_backward),
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Attr<std::int32_t>("op")
                           .Attr<double>("exponent")
                           .Attr<bool>("debias"));

// Rows to threads, some at a time, so that a short row costs no more than it must.
struct Slots {
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

// The indices of the largest entries of every row in magnitude, in order; see selection.hpp.
Error select(AnyBuffer y, Result indices) {
  const Rows rows(y);
  Checker check;
  check.require(!rows.shape.empty(), "y", "have at least one axis", "a scalar");
  check.dtype("y", y, {DataType::F32, DataType::F64, DataType::F16, DataType::BF16});
  check.dtype("indices", *indices, {DataType::S32});
  if (!check.passed()) return check.error();
  Shape slots = rows.shape;
  slots.back() = indices->dimensions().size() == slots.size() ? indices->dimensions().back() : 0;
  check.shape("indices", *indices, slots);
  check.require(slots.back() >= 0 && std::size_t(slots.back()) <= rows.n, "indices", "have at most n slots",
                std::to_string(slots.back()));
  if (!check.passed()) return check.error();
  const std::size_t capacity = std::size_t(slots.back());
  if (capacity == 0 || rows.count == 0) return Error::Success();
  constexpr std::size_t kEntries = 1 << 14;  // that a thread is given at once
  const std::size_t together = std::max<std::size_t>(1, kEntries / rows.n);
  Slots job{dtype_of(y),
            static_cast<const char*>(y.untyped_data()),
            rows.count,
            rows.n,
            y.size_bytes() / rows.count,
            capacity,
            together,
            indices->typed_data<std::int32_t>()};
  parallel_for((rows.count + together - 1) / together, thread_count(),
               [](void* context, std::size_t part) { (*static_cast<const Slots*>(context))(part); }, &job);
  return Error::Success();
}

XLA_FFI_DEFINE_HANDLER(select_handler, translated(select), ffi::Ffi::Bind().Arg<AnyBuffer>().Ret<AnyBuffer>());

// d, block and paired of rows in any order; see isotonic.hpp.
Error pav(AnyBuffer x, AnyBuffer w, AnyBuffer lam, Result d, Result block, Result paired, std::int32_t phi,
          double exponent) {
  const Rows rows(x);
  Checker check;
  check.require(!rows.shape.empty(), "x", "have at least one axis", "a scalar");
  check.dtype("x", x, {DataType::F32, DataType::F64});
  check.dtype("w", w, {x.element_type()});
  check.dtype("lam", lam, {x.element_type()});
  check.dtype("d", *d, {x.element_type()});
  check.dtype("block", *block, {DataType::S32});
  check.dtype("paired", *paired, {DataType::S32});
  check.shape("w", w, rows.shape);
  check.shape("lam", lam, rows.per_row);
  check.shape("d", *d, rows.shape);
  check.shape("block", *block, rows.shape);
  check.shape("paired", *paired, rows.shape);
  check.require(rows.n <= std::size_t(std::numeric_limits<std::int32_t>::max()), "x",
                "have at most 2^31 - 1 entries per row", std::to_string(rows.n));
  check.require(phi >= 0 && phi <= int(PhiName::exp), "phi", "be in [0, 3]", std::to_string(phi));
  if (!check.passed()) return check.error();
  with_floats(x, [&](const auto* data) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
    solve_permutahedron<T>(PhiName(phi), exponent, rows.count, rows.n, data, w.typed_data<T>(), lam.typed_data<T>(),
                           d->typed_data<T>(), block->typed_data<std::int32_t>(), paired->typed_data<std::int32_t>(),
                           thread_count());
  });
  return Error::Success();
}

XLA_FFI_DEFINE_HANDLER(pav_handler, translated(pav),
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Attr<std::int32_t>("phi")
                           .Attr<double>("exponent"));

}  // namespace

const Handler handlers[] = {
    {"sparsetopk_threshold", reinterpret_cast<void*>(threshold_handler)},
    {"sparsetopk_threshold_backward", reinterpret_cast<void*>(threshold_backward_handler)},
    {"sparsetopk_select", reinterpret_cast<void*>(select_handler)},
    {"sparsetopk_pav", reinterpret_cast<void*>(pav_handler)},
    {nullptr, nullptr},
};

}  // namespace sparsetopk
