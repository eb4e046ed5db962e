// What one-step calls of normal mode are told apart by: the parts of a Buffer that they use, what a
// caller gives, and the forms of calls that have been made.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "bind/bindings.hpp"
#include "bind/likely_rows.hpp"
#include "bind/numbers.hpp"
#include "bind/quick_streams.hpp"
#include "bind/torch_tensors.hpp"
#include "host/memory.hpp"

namespace deep_comm::quick {

namespace py = pybind11;

// Of one Buffer.
struct Parts : StreamParts {
  TorchTensors torch;
  int num_ranks, ranks_per_node;
  uint64_t heap_base;
  py::object memory;               // of the heap
  NumberCall<5> take;              // Region.taker()
  NumberCall<11> count_layout;     // Engine.plan_layout(), between nodes plan_internode_layout()
  NumberCall<1> likely_rows;       // (num_tokens): numbers of rows to have room for, best first
  LikelyRows likely;               // the same of expanded dispatches
  NumberCall<1> likely_forwarded;  // (num_tokens): rows that may come to be handed on
  NumberCall<10> number_rows;      // Engine.expand_calls()
  NumberCall<20> expand_rows;
  NumberCall<14> reduce_experts;
  NumberCall<0> wait_counts;       // Engine.counts_waiter()
  NumberCall<1> wait_tier_counts;  // Engine.tier_counts_waiter()
  py::object float32, int32, uint8;

  uint64_t given(uint64_t address) const { return address == 0 ? heap_base : address; }

  // A block of the region, behind its last uses; false: there is no room.
  bool take_block(uint64_t num_bytes, const Order& order, bool is_scratch, py::object* block,
                  uint64_t* offset) const {
    const py::object taken = take({num_bytes, order.caller, order.is_behind_caller ? 1ull : 0ull, 0,
                                   is_scratch ? 1ull : 0ull});
    if (taken.is_none()) return false;
    *block = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(taken.ptr(), 0));
    const py::handle events = PyTuple_GET_ITEM(taken.ptr(), 1);
    for (const py::handle event : events) event.cast<const Event&>().wait(order.stream);
    *offset = block->cast<const Block&>().offset;
    return true;
  }

  // A tensor over the heap.
  py::object matrix(uint64_t offset, int64_t num_rows, int64_t num_columns, DlDataType dtype,
                    const py::object& block) const {
    return torch.matrix_over(heap_base + offset, num_rows, num_columns, dtype,
                             py::make_tuple(memory, block));
  }

  py::object vector(uint64_t offset, int64_t size, DlDataType dtype,
                    const py::object& block) const {
    return torch.vector_over(heap_base + offset, size, dtype, py::make_tuple(memory, block));
  }

  // An output of torch's.
  py::object empty(const TensorForm& form, const Order& order, uintptr_t* address) const {
    if (order.on_comm && !streams.is_none()) {
      py::object made = streams.attr("empty_for_both")(form.shape(), form.dtype());
      *address = torch.address_of(made);
      return made;
    }
    py::object made = torch.empty(form, address);
    if (order.is_async) record(made.ptr());
    return made;
  }

  // Outputs of torch's, in one allocation where that can be.
  template <size_t kCount>
  MadePieces<kCount> pieces(const TensorBlock<kCount>& block, const Order& order) const {
    if (!order.is_async) return torch.pieces(block);
    return torch.apart(block, [&](const TensorForm& form, uintptr_t* address) {
      return empty(form, order, address);
    });
  }

  py::object home_of(const Order& order) const {
    if (streams.is_none()) return py::none();
    return py::int_(order.home());
  }
};

// (code, bits) of DLPack.
using TypeCode = std::pair<int, int>;
inline DlDataType dtype_of(TypeCode code) {
  return {static_cast<uint8_t>(code.first), static_cast<uint8_t>(code.second), 1};
}
inline bool operator==(const DlDataType& left, const DlDataType& right) {
  return left.code == right.code && left.bits == right.bits && left.lanes == right.lanes;
}
inline int bytes_of(DlDataType dtype) { return dtype.bits / 8; }

// The Config of a call, or None and the default in its place.
struct Named {
  py::object config, standard;

  bool is(PyObject* other_config, PyObject* other_standard) const {
    return is_same(config.ptr(), other_config) && is_same(standard.ptr(), other_standard);
  }

 private:
  static bool is_same(PyObject* mine, PyObject* other) {
    if (mine == other) return true;
    const int equal = PyObject_RichCompareBool(mine, other, Py_EQ);
    if (equal < 0) PyErr_Clear();
    return equal > 0;
  }
};

// Rows as they travel, with or without scales.
struct Rows {
  DlDataType dtype, scale_dtype;
  int64_t hidden, num_scales;  // 0: without
  int64_t cast = 0;            // not 0: given as bfloat16, cast on their way (ScaleOptions.cast)

  bool operator==(const Rows& other) const {
    return dtype == other.dtype && hidden == other.hidden && num_scales == other.num_scales &&
           (num_scales == 0 || scale_dtype == other.scale_dtype) && cast == other.cast;
  }
  int row_bytes() const { return static_cast<int>(hidden) * bytes_of(dtype); }
  int scale_row_bytes() const {
    return num_scales == 0 ? 0 : static_cast<int>(num_scales) * bytes_of(scale_dtype);
  }
};

// x or (x, scales) as a caller gives them.
struct Payload {
  TensorView x, scales;
  bool has_scales = false;
  int64_t cast = 0;

  bool read(const TorchTensors& torch, PyObject* given, PyObject* given_cast) {
    cast = PyLong_AsLongLong(given_cast);
    if (PyTuple_CheckExact(given)) {
      if (PyTuple_GET_SIZE(given) != 2 || !torch.view(PyTuple_GET_ITEM(given, 1), &scales) ||
          scales.num_dims() != 2) {
        return false;
      }
      has_scales = true;
      given = PyTuple_GET_ITEM(given, 0);
    }
    return torch.view(given, &x) && x.num_dims() == 2 && x.is_contiguous() &&
           x.address() % 16 == 0 && (!has_scales || scales.extent(0) == x.extent(0));
  }
  int64_t num_tokens() const { return x.extent(0); }
  bool is(const Rows& rows) const {
    if (cast != rows.cast) return false;
    if (cast != 0) return x.is(kDlBfloat16) && x.extent(1) == rows.hidden && !has_scales;
    return x.is(rows.dtype) && x.extent(1) == rows.hidden && has_scales == (rows.num_scales > 0) &&
           (!has_scales || (scales.is(rows.scale_dtype) && scales.extent(1) == rows.num_scales));
  }
};

// Where the parts of a handle's Expansion lie, and its sizes.
struct KnownExpansion {
  uint64_t send_row, num_expanded, recv_rows, expert_offsets, expert_counts;
  int64_t num_topk, num_local_experts, num_tokens_limit;
};

// What a handle that the Buffer knows says: KnownHandle.numbers, or what a native step has left in it.
struct Known {
  static constexpr char kName[] = "deep_comm.known";  // of capsules that hold one

  uint64_t num_experts, mask, send_head, rank_prefix, channel_prefix, recv_channel_prefix;
  int64_t num_recv_rows, num_tokens, num_rows, num_channels, num_topk;
  bool has_default_sms;
  std::optional<KnownExpansion> expansion;

  bool read(PyObject* numbers) {
    constexpr Py_ssize_t kPlain = 12, kExpanded = kPlain + 8;
    if (PyCapsule_IsValid(numbers, kName) != 0) {
      *this = *static_cast<const Known*>(PyCapsule_GetPointer(numbers, kName));
      return true;
    }
    if (!PyTuple_CheckExact(numbers)) return false;
    const Py_ssize_t count = PyTuple_GET_SIZE(numbers);
    if (count != kPlain && count != kExpanded) return false;
    std::array<uint64_t, kExpanded> read;
    for (Py_ssize_t position = 0; position < count; ++position) {
      read[static_cast<size_t>(position)] =
          PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(numbers, position));
    }
    const auto as_signed = [&](size_t position) { return static_cast<int64_t>(read[position]); };
    *this = {read[0],       read[1],       read[2],      read[3],      read[4],
             read[5],       as_signed(6),  as_signed(7), as_signed(8), as_signed(9),
             as_signed(10), read[11] != 0, std::nullopt};
    if (count == kExpanded) {
      expansion = {read[12], read[13],      read[14],      read[15],
                   read[16], as_signed(17), as_signed(18), as_signed(19)};
    }
    return true;
  }
};

// The same in a handle that is new (Handle._native), and whose it is: Context.owner, and the stream of
// its memory or None, as KnownHandle.home_stream.
struct FreshKnown : Known {
  py::object owner, home;

  static const FreshKnown* of(PyObject* capsule) {
    if (PyCapsule_IsValid(capsule, kName) == 0) return nullptr;
    return static_cast<const FreshKnown*>(
        static_cast<const Known*>(PyCapsule_GetPointer(capsule, kName)));
  }
  static py::object capsule(Known known, py::object owner, py::object home) {
    auto made = std::make_unique<FreshKnown>(
        FreshKnown{std::move(known), std::move(owner), std::move(home)});
    auto capsule = py::reinterpret_steal<py::object>(
        PyCapsule_New(static_cast<Known*>(made.get()), kName,
                      [](PyObject* self) { delete FreshKnown::of(self); }));
    if (!capsule) throw py::error_already_set();
    made.release();
    return capsule;
  }
};

// Need nobody be told that the stream uses the handle? After an asynchronous call the caller does.
inline bool is_home(PyObject* home_stream, const Parts& parts, const Order& order) {
  return parts.streams.is_none() || order.is_async || home_stream == Py_None ||
         PyLong_AsUnsignedLongLongMask(home_stream) == order.stream;
}

// None, or how an asynchronous call is given: see StreamParts::begin.
inline bool is_asynchronous(PyObject* object) {
  return object == Py_None || (PyTuple_CheckExact(object) && PyTuple_GET_SIZE(object) == 2);
}

inline bool is_boolean(PyObject* object) { return object == Py_True || object == Py_False; }

// Forms of calls that have been made; the oldest goes when there are many.
template <class Form>
class Forms {
 public:
  template <class Fits>
  std::shared_ptr<const Form> find(const Fits& fits) const {
    for (const auto& form : forms_) {
      if (fits(*form)) return form;
    }
    return nullptr;
  }
  void add(Form form) {
    constexpr size_t kMost = 64;
    if (forms_.size() == kMost) forms_.pop_front();
    forms_.push_back(std::make_shared<const Form>(std::move(form)));
  }

 private:
  std::deque<std::shared_ptr<const Form>> forms_;  // calls hold what they use: the GIL may be lent
};

template <size_t kCount>
struct CachedForm {
  Named named;
  Rows rows;
  int64_t num_channels, num_local_blocks;
  bool is_expanded;
  NumberCall<kCount> launch;
};
using CachedDispatch = CachedForm<28>;
using CachedTierDispatch = CachedForm<32>;  // between nodes

template <size_t kCount>
struct CombineForm {
  Named named;
  DlDataType dtype;
  py::object torch_dtype;
  int64_t hidden, num_topk, num_channels, num_local_blocks;
  bool has_default_sms;                      // of the handle
  uint64_t staging_row_bytes, dtype_number;  // how Engine.expand_calls() counts dtypes
  NumberCall<kCount> launch;
};
using Combine = CombineForm<15>;
using TierCombine = CombineForm<20>;  // between nodes

// How blocks that hold what a call writes are laid out, by its number of tokens: what
// `layout_of` (num_tokens) says of it, and its `offsets`, as many as Parts has.
template <class Parts>
class Layouts {
 public:
  explicit Layouts(py::object layout_of) : layout_of_(std::move(layout_of)) {}

  Parts of(int64_t num_tokens) const {  // a copy: another thread may make room in between
    constexpr size_t kMost = 256;
    const auto known = known_.find(num_tokens);
    if (known != known_.end()) return known->second;
    py::object layout = layout_of_(num_tokens);
    typename Parts::Offsets offsets;
    py::tuple given = layout.attr("offsets");
    if (given.size() != offsets.size()) throw std::invalid_argument("offsets of another layout");
    for (size_t part = 0; part < offsets.size(); ++part) {
      offsets[part] = given[part].cast<uint64_t>();
    }
    if (known_.size() >= kMost) known_.clear();
    return known_.emplace(num_tokens, Parts::of(std::move(layout), offsets)).first->second;
  }

 private:
  py::object layout_of_;
  mutable std::unordered_map<int64_t, Parts> known_;  // of the calls before
};

// Where the parts of a slab lie, and its bytes: SlabLayout.offsets.
struct SlabParts {
  using Offsets = std::array<uint64_t, 7>;
  py::object layout;  // the SlabLayout
  uint64_t channel_prefix, recv_channel_prefix, per_expert, send_head, recv_counts, mask, num_bytes;
  int64_t num_channels;

  static SlabParts of(const py::object& layout, const Offsets& at) {
    const auto num_channels = layout.attr("num_channels").cast<int64_t>();
    return {layout, at[0], at[1], at[2], at[3], at[4], at[5], at[6], num_channels};
  }
};

// The same between nodes: TierSlabLayout.offsets.
struct TierSlabParts {
  using Offsets = std::array<uint64_t, 16>;
  py::object layout;  // the TierSlabLayout
  uint64_t rank_prefix, send_node_head, recv_node_prefix, recv_node_sum, recv_rank_start,
      recv_rank_sum, forward_places, per_expert, per_rank, send_places, combine_start;
  uint64_t counts_per_rank, counts_per_node, counts_per_expert, mask;  // of a layout made here
  uint64_t num_bytes;

  static TierSlabParts of(py::object layout, const Offsets& at) {
    return {std::move(layout),
            at[0],
            at[1],
            at[2],
            at[3],
            at[4],
            at[5],
            at[6],
            at[7],
            at[8],
            at[9],
            at[10],
            at[11],
            at[12],
            at[13],
            at[14],
            at[15]};
  }
};

// Of a dispatch with new routing, of any number of tokens.
struct NewForm {
  Named named;
  Rows rows;
  int64_t num_topk, num_experts, alignment;
  int idx_bytes;
  bool has_layout, is_expanded;
  int64_t num_local_experts, num_local_blocks;

  bool is_like(const NewForm& other) const {
    return rows == other.rows && num_topk == other.num_topk && num_experts == other.num_experts &&
           alignment == other.alignment && idx_bytes == other.idx_bytes &&
           has_layout == other.has_layout && is_expanded == other.is_expanded &&
           named.is(other.named.config.ptr(), other.named.standard.ptr());
  }
};

struct NewDispatch : NewForm {
  NumberCall<19> notify;
  NumberCall<28> launch;
  Layouts<SlabParts> slabs;
};

struct NewTierDispatch : NewForm {  // between nodes
  NumberCall<17> notify;
  NumberCall<32> launch;
  Layouts<TierSlabParts> slabs;
};

// A number that needs no conversion.
inline bool as_number(PyObject* object, int64_t* number) {
  if (!PyLong_CheckExact(object)) return false;
  *number = PyLong_AsLongLong(object);
  if (*number < 0) PyErr_Clear();
  return *number >= 0;
}

inline bool is_indices(const TensorView& idx) {
  return (idx.is(kDlInt64) || idx.is(kDlInt32)) && idx.num_dims() == 2 && idx.is_contiguous();
}

}  // namespace deep_comm::quick
