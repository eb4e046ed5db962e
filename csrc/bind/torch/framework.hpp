// Framework over torch: tensors made and tensors over memory, streams, what its allocator is told.
// torch is not linked; all goes through torch's functions in Python and DLPack.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include "bind/dlpack.hpp"
#include "bind/torch/reader.hpp"
#include "bind/torch/types.hpp"
#include "host/framework.hpp"

namespace deep_comm {

class TorchFramework final : public Framework {
 public:
  // device: torch.device. comm_stream: torch.cuda.Stream, or None on a target without streams.
  // exchange_api: torch.Tensor.__dlpack_c_exchange_api__, or None for a torch without one.
  // current_stream: returns the current stream's number; None: torch's own, 0 on the host.
  TorchFramework(const pybind11::object& device, pybind11::object comm_stream,
                 const pybind11::object& exchange_api, pybind11::object current_stream);

  uint64_t current_stream() const override;
  Object current_stream_object() const override;  // empty without streams
  void set_current_stream(const Object& stream) override;
  MadeTensor empty(const TensorSpec& spec) override;
  MadeTensor empty_on_comm(const TensorSpec& spec) override;
  Object over(uintptr_t address, const TensorSpec& spec, std::shared_ptr<void> owner) override;
  Object part(const void* tensor, const TensorSpec& spec, size_t offset) override;
  bool is_inference_mode() const override;
  std::shared_ptr<void> leave_inference_mode() override;
  void record_on_comm(const void* tensor) override;
  void record_on_current(const void* tensor) override;
  void comm_waits_for(const void* event) override;

 private:
  bool has_streams() const { return !comm_stream_.is_none(); }
  // An attribute of torch.cuda, as it is now.
  pybind11::object of_cuda(const char* name) const;
  pybind11::object torch_stream() const;
  void record(const void* tensor, const pybind11::object& stream) const;

  pybind11::object make_strided(const TensorSpec& spec) const;
  pybind11::object make_empty(const TensorSpec& spec) const;
  // Elements of a flat tensor from `begin` on.
  pybind11::object make_range(pybind11::handle whole, const TensorSpec& range, int64_t begin) const;
  pybind11::object make_over(uintptr_t address, const TensorSpec& spec, DlDataType type,
                             std::shared_ptr<void> owner) const;
  bool is_made_by_dlpack(ElementType type) const;

  const TorchTypes& types_;
  TorchDevice device_;
  TensorReader reader_;
  const DlExchangeApi* api_;  // null: a capsule and torch.from_dlpack
  pybind11::object comm_stream_, current_stream_;
  pybind11::object torch_cuda_, empty_strided_, from_dlpack_, is_deterministic_, deterministic_;
  // See compiled_code_function. (shape, strides, dtype) on the current device, and (tensor, shape,
  // strides, begin); or None: the public functions serve.
  pybind11::object empty_directly_, range_directly_;
  pybind11::object is_inference_mode_, inference_mode_;
  pybind11::tuple options_;  // names of empty_strided's keywords
  // By ScalarType; empty: nobody has asked yet.
  mutable std::array<std::optional<bool>, 256> made_by_dlpack_;
};

}  // namespace deep_comm
