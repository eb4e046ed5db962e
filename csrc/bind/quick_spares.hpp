// Metadata of low-latency dispatches that is used again: of three new tensors a call, which take
// more of the host's time than all else but the launch, one less, and no view.
#pragma once

#include <deque>
#include <utility>

#include "bind/torch_tensors.hpp"

namespace deep_comm {

// A metadata block, its first part, its storage, and what torch knows that by.
struct MetadataSpare {
  pybind11::object metadata, recv_count, storage, storage_name;
};

// Of one form of calls, for those of one stream, where whatever reads a block comes before a later
// dispatch that writes it. A block is used again when nobody else has one of its tensors, a view of
// one, or its storage; and after all others.
class MetadataSpares {
 public:
  MetadataSpares() = default;
  // tensor_uses(tensor), storage_uses(storage): how many in C++ share it.
  MetadataSpares(uint64_t stream, pybind11::object tensor_uses, pybind11::object storage_uses)
      : stream_(stream),
        tensor_uses_(std::move(tensor_uses)),
        storage_uses_(std::move(storage_uses)) {}

  void add(const TorchTensors& torch, MetadataSpare spare) {
    Entry entry{std::move(spare), {}, {}, false, {}};
    if (read(torch, entry, &entry.metadata, &entry.recv_count))
      entries_.push_back(std::move(entry));
  }

  bool has_stream(uint64_t stream) const { return !entries_.empty() && stream_ == stream; }

  // Leaves *metadata empty if the oldest block is in use; it then comes last again.
  void take(const TorchTensors& torch, pybind11::object* metadata, pybind11::object* recv_count,
            uintptr_t* address) {
    Entry entry = std::move(entries_.front());
    entries_.pop_front();
    Form forms[2];
    // Tensors change in place: such a block is done with.
    if (!read(torch, entry, &forms[0], &forms[1]) || !(forms[0] == entry.metadata) ||
        !(forms[1] == entry.recv_count)) {
      return;
    }
    if (is_free(&entry)) {
      *metadata = entry.spare.metadata;
      *recv_count = entry.spare.recv_count;
      *address = entry.metadata.address;
    }
    entries_.push_back(std::move(entry));
  }

 private:
  struct Form {
    uintptr_t address;
    int64_t size;
    bool operator==(const Form&) const = default;
  };
  struct Uses {
    int64_t native, python;
    bool operator==(const Uses&) const = default;
  };
  struct Entry {
    MetadataSpare spare;
    Form metadata, recv_count;
    bool is_known;
    Uses at_rest;  // of the storage, when nobody else has it
  };

  static bool read(const TorchTensors& torch, const Entry& entry, Form* metadata,
                   Form* recv_count) {
    return read(torch, entry.spare.metadata, metadata) &&
           read(torch, entry.spare.recv_count, recv_count);
  }
  static bool read(const TorchTensors& torch, const pybind11::object& tensor, Form* form) {
    TensorView view;
    if (!torch.view(tensor.ptr(), &view) || !view.is(kDlInt32) || view.num_dims() != 1 ||
        !view.is_contiguous()) {
      return false;
    }
    *form = {view.address(), view.extent(0)};
    return true;
  }

  // References of Python's are seen at once, those of C++ are asked for.
  bool is_free(Entry* entry) const {
    const auto& [metadata, recv_count, storage, storage_name] = entry->spare;
    if (Py_REFCNT(metadata.ptr()) != 1 || Py_REFCNT(recv_count.ptr()) != 1 ||
        uses(tensor_uses_, metadata) != 1 || uses(tensor_uses_, recv_count) != 1) {
      return false;
    }
    // How many torch itself counts differs by version; before the first call nobody else has it.
    const Uses now{uses(storage_uses_, storage_name), Py_REFCNT(storage.ptr())};
    if (!entry->is_known) entry->at_rest = now;
    entry->is_known = true;
    return now == entry->at_rest;
  }
  static int64_t uses(const pybind11::object& function, const pybind11::object& argument) {
    PyObject* const arguments[] = {argument.ptr()};
    PyObject* made = PyObject_Vectorcall(function.ptr(), arguments, 1, nullptr);
    if (made == nullptr) throw pybind11::error_already_set();
    const int64_t number = PyLong_AsLongLong(made);
    Py_DECREF(made);
    return number;
  }

  uint64_t stream_ = 0;
  pybind11::object tensor_uses_, storage_uses_;
  std::deque<Entry> entries_;
};

}  // namespace deep_comm
