// Arguments of calls as they come from Python: tensors, integers, flags.
#pragma once

#include <pybind11/pybind11.h>

#include "bind/dlpack.hpp"
#include "bind/torch/types.hpp"
#include "host/require.hpp"
#include "host/tensor.hpp"

namespace deep_comm {

// A device as torch and as DLPack name it.
struct TorchDevice {
  static constexpr int32_t kHost = 1, kCuda = 2;

  // `given`: a torch.device, of the host or of CUDA; without an index it is that of index 0.
  explicit TorchDevice(const pybind11::object& given);

  bool is_cuda() const { return dlpack.type == kCuda; }
  // A torch.device, as tensors' attributes have it.
  bool is(PyObject* other) const;

  DlDevice dlpack;
  pybind11::object object;  // torch.device; the host's without an index
};

// The table of functions in Tensor.__dlpack_c_exchange_api__; null for None and for what is not of
// DLPack 1.
const DlExchangeApi* find_exchange_api(const pybind11::object& exchange_api);

// Reads tensors for a Buffer of one device: plain ones through DLPack's C exchange API in some 20 ns;
// through Python's attributes in 0.5 µs where that does not serve: without the API, for instances of
// subclasses, for types that DLPack lacks, for tensors of other devices.
class TensorReader {
 public:
  // exchange_api: torch.Tensor's, or None for a torch without one.
  TensorReader(const pybind11::object& device, const pybind11::object& exchange_api);

  // No Python error is left behind. What claims to be a tensor of the device but has no memory there
  // (torch's fake tensors, sparse ones) is kOther.
  TensorRef read(PyObject* object) const;

 private:
  bool read_described(PyObject* object, TensorRef* out) const;
  bool read_attributes(PyObject* object, TensorRef* out) const;

  const TorchTypes& types_;
  TorchDevice device_;
  const DlExchangeApi* api_;  // null: attributes serve
};

// Throws nothing.
IntegerRef read_integer(PyObject* object);
// As Python's bool(); throws what that raises.
bool read_flag(PyObject* object);

}  // namespace deep_comm
