// numpy arrays as spans, and vectors as numpy arrays. Every error names the argument and what is allowed.
#pragma once

#include <pybind11/numpy.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "histospec/types.h"

namespace histospec::bindings {

namespace py = pybind11;

// Keeps a contiguous numpy array alive while C++ reads it.
template <typename T>
class Array {
 public:
  Array() = default;
  explicit Array(py::array_t<T, py::array::c_style> array) : array_(std::move(array)) {}
  std::span<const T> span() const {
    return array_ ? std::span<const T>(array_->data(), static_cast<std::size_t>(array_->size())) : std::span<const T>();
  }

 private:
  std::optional<py::array_t<T, py::array::c_style>> array_;
};

using Tokens = Array<std::int32_t>;
using Mask = Array<std::uint8_t>;

// A one-dimensional numpy array of exactly this dtype (copied if it is not contiguous).
template <typename T>
Array<T> array_of(const std::string& field, py::handle value) {
  const auto wanted = [] { return std::string(py::str(py::dtype::of<T>())); };  // slow, so only for errors
  if (!py::isinstance<py::array>(value)) {
    throw py::value_error(field + ": must be a numpy array of " + wanted() + ", is a " +
                          std::string(py::str(py::type::of(value).attr("__name__"))));
  }
  const auto array = py::reinterpret_borrow<py::array>(value);
  if (!array.dtype().equal(py::dtype::of<T>())) {
    throw py::value_error(field + ": has dtype " + std::string(py::str(array.dtype())) + ", must be " + wanted());
  }
  if (array.ndim() != 1) {
    throw py::value_error(field + ": has " + std::to_string(array.ndim()) + " dimensions, must have 1");
  }
  return Array<T>(py::array_t<T, py::array::c_style>::ensure(array));
}

// Tokens: an int32 array, or a list or tuple of ints.
inline Tokens tokens_of(const std::string& field, py::handle value) {
  if (!py::isinstance<py::list>(value) && !py::isinstance<py::tuple>(value)) {
    return array_of<std::int32_t>(field, value);
  }
  // A tuple, because __index__ of an element is foreign code that could change a list.
  const py::tuple items(py::reinterpret_borrow<py::object>(value));
  py::array_t<std::int32_t, py::array::c_style> array(static_cast<py::ssize_t>(items.size()));
  std::int32_t* out = array.mutable_data();
  for (std::size_t i = 0; i < items.size(); ++i) {
    const py::object item = items[i];
    const std::string place = field + ": element " + std::to_string(i);
    if (!PyIndex_Check(item.ptr()) || py::isinstance<py::bool_>(item)) {
      throw py::value_error(place + " is not an integer");
    }
    const long long token = PyNumber_AsSsize_t(item.ptr(), nullptr);
    if (token == -1 && PyErr_Occurred()) throw py::error_already_set();
    if (token < 0 || token > INT32_MAX) throw py::value_error(place + " is outside [0, 2147483647]");
    out[i] = static_cast<std::int32_t>(token);
  }
  return Tokens(std::move(array));
}

// An int of 64 bits, such as the seed of coupled sampling, or None.
inline std::optional<std::int64_t> int_or_none(const std::string& field, py::handle value) {
  if (value.is_none()) return std::nullopt;
  if (!PyIndex_Check(value.ptr()) || py::isinstance<py::bool_>(value)) {
    throw py::value_error(field + ": must be an integer or None, is a " +
                          std::string(py::str(py::type::of(value).attr("__name__"))));
  }
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  if (!index) throw py::error_already_set();
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) throw py::value_error(field + ": is outside [-2**63, 2**63 - 1]");
  return number;
}

// A mask of generated tokens: bool or uint8. None: all tokens were generated.
inline Mask mask_of(const std::string& field, py::handle value) {
  if (value.is_none()) return Mask();
  if (py::isinstance<py::array>(value) && py::reinterpret_borrow<py::array>(value).dtype().kind() == 'b') {
    return array_of<std::uint8_t>(field, value.attr("view")("uint8"));
  }
  return array_of<std::uint8_t>(field, value);
}

// The bytes of a bytes object, which the caller keeps alive. None: no bytes.
inline std::span<const std::uint8_t> bytes_of(const std::string& field, py::handle value) {
  if (value.is_none()) return {};
  if (!py::isinstance<py::bytes>(value)) {
    throw py::value_error(field + ": must be bytes or None, is a " +
                          std::string(py::str(py::type::of(value).attr("__name__"))));
  }
  return {reinterpret_cast<const std::uint8_t*>(PyBytes_AS_STRING(value.ptr())),
          static_cast<std::size_t>(PyBytes_GET_SIZE(value.ptr()))};
}

template <typename T>
py::array_t<T> to_numpy(std::vector<T> values) {
  auto* owned = new std::vector<T>(std::move(values));
  const py::capsule owner(owned, [](void* p) { delete static_cast<std::vector<T>*>(p); });
  return py::array_t<T>(static_cast<py::ssize_t>(owned->size()), owned->data(), owner);
}

}  // namespace histospec::bindings
