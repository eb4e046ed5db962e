// The receive region's allocator, and tensors over memory that torch does not own.
//
// Both run in every call, so that microseconds count: an allocation, its tensor and its return take
// less than one of them. The GIL guards all state; Python is only called where the state is at
// rest, since a garbage collection in there may give blocks back.
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>

#include "bind/bindings.hpp"
#include "bind/dlpack.hpp"
#include "bind/numbers.hpp"
#include "host/region.hpp"

namespace deep_comm {

namespace py = pybind11;

namespace {

constexpr size_t kAlignment = 128;

size_t align(size_t num_bytes) { return (num_bytes + kAlignment - 1) / kAlignment * kAlignment; }

// A block may be given back while kernels that read it are still queued: `mark` makes an event on
// the stream that is current at that moment, and on the one that was when the block was taken,
// whose work may use it without saying so; whoever gets the bytes next waits for both.
// Blocks that a CUDA graph was captured with are only handed out to later captures: replays write
// to them whenever they like.
class Region {
 public:
  using List = FreeList<py::object>;

  Region(size_t begin, size_t end, py::object mark, py::object is_capturing,
         py::object current_stream)
      : mark_(std::move(mark)),
        is_capturing_(std::move(is_capturing)),
        current_stream_(std::move(current_stream)) {
    begin = align(begin);
    if (end > begin) eager_.give_back({begin, end - begin, {}});
  }

  bool is_capturing() const { return is_capturing_().cast<bool>(); }
  uint64_t current_stream() const { return current_stream_({}).cast<uint64_t>(); }

  std::optional<List::Hole> take(size_t num_bytes, bool is_captured) {
    std::optional<List::Hole> taken = (is_captured ? captured_ : eager_).take(num_bytes);
    if (!taken && is_captured) taken = eager_.take(num_bytes);
    return taken;
  }

  // A scratch block leaves nothing to wait for: see allocate_scratch.
  void give_back(size_t offset, size_t num_bytes, bool is_captured, bool is_scratch,
                 std::optional<uint64_t> owner) {
    List::Hole hole{offset, num_bytes, {}};
    if (!is_captured && !is_scratch) {
      const uint64_t stream = current_stream();
      if (add_use(hole, stream) && owner && *owner != stream) add_use(hole, *owner);
    }
    (is_captured ? captured_ : eager_).give_back(std::move(hole));
  }

  void give_back_unused(size_t offset, size_t num_bytes, bool is_captured) {
    (is_captured ? captured_ : eager_).give_back({offset, num_bytes, {}});
  }

  size_t num_free_bytes() const { return eager_.num_bytes() + captured_.num_bytes(); }

 private:
  // False: nothing can be in flight.
  bool add_use(List::Hole& hole, uint64_t stream) {
    py::object event = mark_({stream});
    if (event.is_none()) return false;
    hole.uses.push_back({stream, num_marks_++, std::move(event)});
    return true;
  }

  NumberCall<1> mark_;
  py::object is_capturing_;
  NumberCall<0> current_stream_;
  List eager_;
  List captured_;
  uint64_t num_marks_ = 0;
};

// Bytes [offset, offset + num_bytes), given back when the last reference goes.
class Block {
 public:
  Block(std::shared_ptr<Region> region, size_t offset, size_t num_bytes, bool is_captured,
        bool is_scratch, std::optional<uint64_t> owner)
      : offset(offset),
        num_bytes(num_bytes),
        region_(std::move(region)),
        is_captured_(is_captured),
        is_scratch_(is_scratch),
        owner_(owner) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    if (Py_IsInitialized() == 0) return;  // at exit there is no next owner, and no Python to ask
    try {
      region_->give_back(offset, num_bytes, is_captured_, is_scratch_, owner_);
    } catch (py::error_already_set& error) {
      // Nobody knows who still reads the bytes: nobody gets them.
      error.discard_as_unraisable("giving back a block of the receive region");
    }
  }

  // Gives back what lies behind the first num_bytes. For bytes that no stream but the one the block
  // was allocated for has used: whatever that one waited for, the next owner is behind as well.
  void shrink(size_t new_num_bytes) {
    new_num_bytes = align(new_num_bytes == 0 ? 1 : new_num_bytes);
    if (new_num_bytes > num_bytes) throw std::invalid_argument("a block can only become smaller");
    if (new_num_bytes == num_bytes) return;
    region_->give_back_unused(offset + new_num_bytes, num_bytes - new_num_bytes, is_captured_);
    num_bytes = new_num_bytes;
  }

  // From now on others than the engine's kernels use a scratch block.
  void expose() { is_scratch_ = false; }

  const size_t offset;
  size_t num_bytes;

 private:
  std::shared_ptr<Region> region_;
  bool is_captured_;
  bool is_scratch_;
  std::optional<uint64_t> owner_;  // the stream that was current
};

// (block, events to wait for), or None. Events of stream `after` are left out: the caller's work is
// behind everything on it.
py::object take(const std::shared_ptr<Region>& region, size_t num_bytes,
                std::optional<uint64_t> after, std::optional<uint64_t> owner, bool is_captured,
                bool is_scratch) {
  num_bytes = align(num_bytes == 0 ? 1 : num_bytes);
  std::optional<Region::List::Hole> taken = region->take(num_bytes, is_captured);
  if (!taken) return py::none();
  py::object block = py::cast(
      std::make_unique<Block>(region, taken->offset, num_bytes, is_captured, is_scratch, owner));
  py::list events;
  // A capture may not wait for work outside of it, and begins with the device idle.
  if (!is_captured) {
    for (const Region::List::Use& use : taken->uses) {
      if (!after || *after != use.stream) events.append(use.event);
    }
  }
  return py::make_tuple(std::move(block), std::move(events));
}

// For callers who do not know what the current stream is doing.
py::object allocate(const std::shared_ptr<Region>& region, size_t num_bytes,
                    std::optional<uint64_t> after, bool is_scratch) {
  const bool is_captured = region->is_capturing();
  std::optional<uint64_t> owner;
  if (!is_captured) owner = region->current_stream();
  return take(region, num_bytes, after, owner, is_captured, is_scratch);
}

// For those who do; all streams are there, `is_behind` says whether the caller's work is
// behind its own stream's.
py::object take_numbers(const std::shared_ptr<Region>& region,
                        const std::array<uint64_t, 5>& numbers) {
  const auto [num_bytes, owner, is_behind, is_captured, is_scratch] = numbers;
  return take(region, num_bytes, is_behind != 0 ? std::optional<uint64_t>(owner) : std::nullopt,
              is_captured != 0 ? std::nullopt : std::optional<uint64_t>(owner), is_captured != 0,
              is_scratch != 0);
}

// make_dlpack_matrix without pybind11's look at the arguments: seven numbers and the owner.
PyObject* matrix(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 8) {
    PyErr_Format(PyExc_TypeError, "matrix() takes 8 arguments, %zd were given", count);
    return nullptr;
  }
  int64_t numbers[7];
  for (int position = 0; position < 7; ++position) {
    numbers[position] = static_cast<int64_t>(PyLong_AsUnsignedLongLongMask(arguments[position]));
    if (numbers[position] == -1 && PyErr_Occurred() != nullptr) return nullptr;
  }
  try {
    const DlDataType dtype = {static_cast<uint8_t>(numbers[3]), static_cast<uint8_t>(numbers[4]),
                              1};
    const DlDevice device = {static_cast<int32_t>(numbers[5]), static_cast<int32_t>(numbers[6])};
    return make_dlpack_matrix(static_cast<uintptr_t>(numbers[0]), numbers[1], numbers[2], dtype,
                              device, py::reinterpret_borrow<py::object>(arguments[7]))
        .release()
        .ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

PyMethodDef kMatrix = {"matrix", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&matrix)),
                       METH_FASTCALL,
                       "matrix(address, num_rows, num_columns, type_code, type_bits, device_type, "
                       "device_index, owner)"};

}  // namespace

void bind_region(py::module_& m) {
  py::class_<Block>(m, "Block", py::module_local(),
                    "Bytes of the heap, given back when the last reference goes.")
      .def_readonly("offset", &Block::offset)
      .def_readonly("num_bytes", &Block::num_bytes)
      .def("expose", &Block::expose)
      .def("shrink", &Block::shrink, py::arg("num_bytes"));
  py::class_<Region, std::shared_ptr<Region>>(m, "Region", py::module_local(),
                                              "First-fit allocator of blocks.")
      .def(py::init<size_t, size_t, py::object, py::object, py::object>(), py::arg("begin"),
           py::arg("end"), py::arg("mark"), py::arg("is_capturing"), py::arg("current_stream"))
      .def(
          "allocate",
          [](const std::shared_ptr<Region>& self, size_t num_bytes, std::optional<uint64_t> after) {
            return allocate(self, num_bytes, after, false);
          },
          py::arg("num_bytes"), py::arg("after") = py::none())
      .def(
          "allocate_scratch",
          [](const std::shared_ptr<Region>& self, size_t num_bytes, std::optional<uint64_t> after) {
            return allocate(self, num_bytes, after, true);
          },
          py::arg("num_bytes"), py::arg("after") = py::none(),
          "A block that only the engine's kernels use. They run one behind the other, and all "
          "owners of blocks have "
          "them written by kernels, so that nobody has to wait for this one's end.")
      .def(
          "taker",
          [](const py::object& self) {
            return number_function<5, &take_numbers>("take", self.cast<std::shared_ptr<Region>>(),
                                                     py::none());
          },
          "take(num_bytes, stream, is_behind_stream, is_captured, is_scratch): allocate and "
          "allocate_scratch for "
          "callers who know the current stream.")
      .def_property_readonly("num_free_bytes", &Region::num_free_bytes);
  m.attr("matrix") = py::reinterpret_steal<py::object>(PyCFunction_New(&kMatrix, nullptr));
}

}  // namespace deep_comm
