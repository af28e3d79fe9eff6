// Handlers for XLA: shapes, types, and nothing else. Leading axes are rows, whatever their number.
#include "ffi.hpp"

#include <algorithm>
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
#include "problem.hpp"
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
    case DataType::F64: return Dtype::float64;
    case DataType::F16: return Dtype::float16;
    case DataType::BF16: return Dtype::bfloat16;
    default: return Dtype::float32;
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

// y, and the state of every row; k = whole + frac, so that float32 holds large counts.
Error threshold(AnyBuffer x, AnyBuffer whole, AnyBuffer frac, AnyBuffer lam, Result y, Result pivot, Result delta,
                std::int32_t op, double exponent, bool debias) {
  const Rows rows(x);
  Checker check;
  check.require(!rows.shape.empty(), "x", "have at least one axis", "a scalar");
  check.dtype("x", x, {DataType::F32, DataType::F64, DataType::F16, DataType::BF16});
  check.dtype("whole", whole, {DataType::S32});
  check.dtype("frac", frac, {DataType::F32, DataType::F64});
  check.dtype("lam", lam, {DataType::F32, DataType::F64});
  check.dtype("y", *y, {x.element_type()});
  check.dtype("pivot", *pivot, {lam.element_type()});
  check.dtype("delta", *delta, {lam.element_type()});
  check.shape("whole", whole, rows.per_row);
  check.shape("frac", frac, rows.per_row);
  check.shape("lam", lam, rows.per_row);
  check.shape("y", *y, rows.shape);
  check.shape("pivot", *pivot, rows.per_row);
  check.shape("delta", *delta, rows.per_row);
  check.require(op >= 0 && op <= int(Operator::two_sided), "op", "be in [0, 3]", std::to_string(op));
  if (!check.passed()) return check.error();

  const std::int32_t* counts = whole.typed_data<std::int32_t>();
  std::vector<double> k(counts, counts + rows.count), lams(rows.count);
  add(frac, k);
  add(lam, lams);
  std::vector<State> state(rows.count);
  forward({Operator(op), exponent, debias, dtype_of(x), rows.count, rows.n, rows.n, x.untyped_data(), k.data(), 1,
           lams.data(), 1, state.data(), thread_count()},
          y->untyped_data());
  const auto store = [&](const AnyBuffer& to, double State::*member) {
    with_floats(to, [&](auto* out) {
      for (std::size_t i = 0; i < rows.count; ++i) out[i] = std::decay_t<decltype(*out)>(state[i].*member);
    });
  };
  store(*pivot, &State::pivot);
  store(*delta, &State::delta);
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
    {"sparsetopk_pav", reinterpret_cast<void*>(pav_handler)},
    {nullptr, nullptr},
};

}  // namespace sparsetopk
