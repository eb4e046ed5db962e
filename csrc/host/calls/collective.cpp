#include "host/calls/collective.hpp"

#include <algorithm>

#include "host/word_hash.hpp"

namespace deep_comm {

namespace {

constexpr int64_t kVecBytes = sizeof(Vec16);
// Above these, two shots move less than one. Of two ranks they move the same.
constexpr int64_t kMostOneShotBytes = 512 << 10, kMostOneShotBytesOfMany = 256 << 10;

struct CheckedCollective {
  Collective op;
  TensorRef x;
  TensorSpec out;
  Dtype dtype = Dtype::kBfloat16;
  int max_blocks = 1;
  int64_t num_bytes = 0, shard_bytes = 0, shard_vecs = 0, row_vecs = 0;
};

void require_x(const CallContext& context, const TensorRef& x, bool has_rows, bool is_added) {
  using Which = GivenProperty::Which;
  const auto refuse_x = [&](Which which, const std::string& rule) {
    refuse_argument("x", given_property(which, x.object), rule);
  };
  if (x.kind != TensorRef::Kind::kTensor) refuse_x(Which::kTypeName, "must be a tensor");
  if (!x.is_on_device) {
    refuse_x(Which::kDevice, "must be on this memory's device " + context.device_name);
  }
  if (is_added && !(x.type == kBfloat16 || x.type == kFloat16 || x.type == kFloat32)) {
    refuse_x(Which::kType, "must have dtype torch.bfloat16 or torch.float16 or torch.float32");
  }
  if (x.num_dims < (has_rows ? 1 : 0) || x.num_dims > kMaxTensorDims) {
    refuse_x(Which::kShape, std::string("must have ") + (has_rows ? "1" : "0") + " to " +
                                std::to_string(kMaxTensorDims) + " dimensions");
  }
  if (!x.is_contiguous()) refuse_x(Which::kShape, "must be contiguous");
}

// As x, with this many rows.
TensorSpec spec_of(const TensorRef& x, int64_t num_rows) {
  TensorSpec spec;
  spec.type = x.type;
  spec.num_dims = x.num_dims;
  spec.shape = x.shape;
  if (x.num_dims > 0) spec.shape[0] = num_rows;
  int64_t stride = 1;
  for (int dim = spec.num_dims - 1; dim >= 0; --dim) {
    spec.strides[dim] = stride;
    stride *= std::max<int64_t>(spec.shape[dim], 1);
  }
  return spec;
}

int64_t staged_bytes(const CallContext& context, Collective op, int64_t shard_vecs) {
  const int num_ranks = context.group.num_ranks;
  if (num_ranks == 1) return 0;
  return shard_vecs * kVecBytes * num_slots(op, num_ranks, context.staging.multicast != nullptr);
}

// What every collective begins with.
void begin(CallContext& context, Collective op, const TensorRef& x) {
  context.begin();
  const bool has_rows = op == Collective::kAllGather || op == Collective::kReduceScatter ||
                        op == Collective::kAllReduceNorm;
  require_x(context, x, has_rows, op != Collective::kAllGather);
}

// x: of begin.
CheckedCollective check(const CallContext& context, Collective op, const TensorRef& x,
                        const IntegerRef& num_sms) {
  const int num_ranks = context.group.num_ranks;
  const int64_t num_rows = x.num_dims > 0 ? x.shape[0] : 1;
  CheckedCollective checked{.op = op, .x = x, .out = spec_of(x, num_rows)};
  const int most_blocks = std::min(kMaxChannels, context.rings.max_sms.value_or(kMaxChannels));
  checked.max_blocks = static_cast<int>(require_integer("num_sms", num_sms, 1, most_blocks));
  checked.dtype = x.type == kFloat32   ? Dtype::kFloat32
                  : x.type == kFloat16 ? Dtype::kFloat16
                                       : Dtype::kBfloat16;
  checked.num_bytes = x.num_elements() * x.type.num_bytes;
  checked.shard_bytes = checked.num_bytes;
  if (op == Collective::kAllGather) {
    checked.out = spec_of(x, num_rows * num_ranks);
  } else if (op == Collective::kReduceScatter) {
    if (num_rows % num_ranks != 0) {
      refuse_argument(
          "x", given_property(GivenProperty::Which::kShape, x.object),
          "must have a first extent that the " + std::to_string(num_ranks) + " ranks divide");
    }
    checked.out = spec_of(x, num_rows / num_ranks);
    checked.shard_bytes = checked.num_bytes / num_ranks;
  } else if (op == Collective::kAllReduceNorm) {
    const int64_t row_bytes = num_rows == 0 ? 0 : checked.num_bytes / num_rows;
    checked.row_vecs = row_bytes / kVecBytes;
    checked.shard_bytes = ceil_div<int64_t>(num_rows, num_ranks) * row_bytes;
  } else if (op == Collective::kAllReduceTwice) {
    checked.shard_bytes = align_up(ceil_div<int64_t>(checked.num_bytes, num_ranks), kVecBytes);
  }
  checked.shard_vecs = ceil_div(checked.shard_bytes, kVecBytes);
  const int64_t staged = staged_bytes(context, op, checked.shard_vecs);
  if (staged > static_cast<int64_t>(context.staging.num_bytes)) {
    refuse_memory("staging_bytes", context.staging.num_bytes, static_cast<size_t>(staged),
                  "an x of " + std::to_string(checked.num_bytes) + " bytes");
  }
  return checked;
}

// Of the operation, the type, the shape and `digest`: bytes may be as many where these differ.
int agreed_of(Collective op, const TensorRef& x, int digest) {
  WordHash hash;
  hash.add(static_cast<uint64_t>(op));
  hash.add(static_cast<uint64_t>(x.type.id));
  hash.add(static_cast<uint64_t>(digest));
  for (int dim = 0; dim < x.num_dims; ++dim) hash.add(static_cast<uint64_t>(x.shape[dim]));
  return static_cast<int>(hash.value() >> 32 ^ hash.value());
}

// norm: of kAllReduceNorm; its output is made here, too.
struct Collected {
  Object out, normed;
};

Collected run(CallContext& context, const CheckedCollective& checked, int digest, RowNorm norm,
              const std::vector<const void*>& inputs) {
  CallOrder order(context.order, {});
  MadeTensor out = context.memory.empty(checked.out, order);
  MadeTensor normed;
  if (checked.op == Collective::kAllReduceNorm) {
    normed = context.memory.empty(checked.out, order);
    norm.normed = pointer_of<uint8_t>(normed.address);
    norm.row_vecs = checked.row_vecs;
  }
  const int agreed = agreed_of(checked.op, checked.x, digest);
  if (checked.num_bytes > 0) {
    CollectiveArgs args{};
    args.op = checked.op;
    args.x = pointer_of<uint8_t>(checked.x.address);
    args.out = pointer_of<uint8_t>(out.address);
    args.num_bytes = checked.num_bytes;
    args.shard_bytes = checked.shard_bytes;
    args.shard_vecs = checked.shard_vecs;
    args.staging = context.staging.offset;
    args.multicast = context.staging.multicast;
    args.norm = norm;
    context.launch([&] {
      context.engine.collective(args, checked.dtype, agreed, checked.max_blocks, order.stream());
    });
  } else if (context.group.num_ranks > 1) {
    // Nothing moves, but the ranks must agree on that.
    context.launch([&] { context.engine.barrier(agreed, order.stream()); });
  }
  order.finish(inputs, nullptr);
  context.end();
  return {std::move(out.tensor), std::move(normed.tensor)};
}

template <class Launch>
void launch_in(CallContext& context, CallOrder order, const Launch& launch) {
  context.launch([&] { launch(order.stream()); });
  order.finish({}, nullptr);
  context.end();
}

template <class Launch>
void launch_unordered(CallContext& context, const Launch& launch) {
  context.begin_unordered();
  launch_in(context, CallOrder::unordered(context.order), launch);
}

template <class Launch>
void launch_ordered(CallContext& context, const Launch& launch) {
  context.begin();
  launch_in(context, CallOrder(context.order, {}), launch);
}

Object collective(CallContext& context, Collective op, const TensorRef& x,
                  const IntegerRef& num_sms, int digest) {
  begin(context, op, x);
  return run(context, check(context, op, x, num_sms), digest, {}, {x.object}).out;
}

void require_like(const CallContext& context, const char* name, const TensorRef& tensor,
                  const TensorRef& x, int num_dims) {
  using Which = GivenProperty::Which;
  const auto refuse = [&](Which which, const char* rule) {
    refuse_argument(name, given_property(which, tensor.object), rule);
  };
  if (tensor.kind != TensorRef::Kind::kTensor) refuse(Which::kTypeName, "must be a tensor");
  if (!tensor.is_on_device) {
    refuse_argument(name, given_property(Which::kDevice, tensor.object),
                    "must be on this memory's device " + context.device_name);
  }
  if (!(tensor.type == x.type)) refuse(Which::kType, "must have x's dtype");
  bool fits = tensor.num_dims == num_dims && tensor.is_contiguous();
  for (int dim = 0; fits && dim < num_dims; ++dim) {
    fits = tensor.shape[dim] == x.shape[x.num_dims - num_dims + dim];
  }
  if (!fits) {
    refuse(Which::kShape, num_dims == 1 ? "must be contiguous, with x's last extent"
                                        : "must be contiguous, with x's shape");
  }
  if (tensor.address % kVecBytes != 0) {
    refuse(Which::kShape, "must begin at a multiple of 16 bytes");
  }
}

}  // namespace

Object all_gather(CallContext& context, const TensorRef& x, const IntegerRef& num_sms, int digest) {
  return collective(context, Collective::kAllGather, x, num_sms, digest);
}

Object reduce_scatter(CallContext& context, const TensorRef& x, const IntegerRef& num_sms,
                      int digest) {
  return collective(context, Collective::kReduceScatter, x, num_sms, digest);
}

Object all_reduce(CallContext& context, const TensorRef& x, AllReduceMethod method,
                  const IntegerRef& num_sms, int digest) {
  begin(context, Collective::kAllReduceTwice, x);  // as for kAllReduceOnce
  const int num_ranks = context.group.num_ranks;
  const int64_t most = num_ranks <= 4 ? kMostOneShotBytes : kMostOneShotBytesOfMany;
  // In one shot every rank asks the switch, whose order may differ from rank to rank. A sum of two
  // has no order.
  const bool has_order = context.staging.multicast == nullptr;
  const int64_t num_bytes = x.num_elements() * x.type.num_bytes;
  const bool has_room =
      staged_bytes(context, Collective::kAllReduceOnce, ceil_div(num_bytes, kVecBytes)) <=
      static_cast<int64_t>(context.staging.num_bytes);
  const bool is_small = num_ranks <= 2 || (has_order && has_room && num_bytes <= most);
  const bool is_one_shot =
      method == AllReduceMethod::kAuto ? is_small : method == AllReduceMethod::kOneShot;
  const Collective op = is_one_shot ? Collective::kAllReduceOnce : Collective::kAllReduceTwice;
  return run(context, check(context, op, x, num_sms), digest, {}, {x.object}).out;
}

std::pair<Object, Object> all_reduce_norm(CallContext& context, const TensorRef& x,
                                          const TensorRef& residual, const TensorRef& weight,
                                          float eps, const IntegerRef& num_sms) {
  begin(context, Collective::kAllReduceNorm, x);
  const CheckedCollective checked = check(context, Collective::kAllReduceNorm, x, num_sms);
  const auto refuse_x = [&](const char* rule) {
    refuse_argument("x", given_property(GivenProperty::Which::kShape, x.object), rule);
  };
  if (x.num_dims != 2) refuse_x("must have 2 dimensions");
  if (x.shape[1] * x.type.num_bytes % kVecBytes != 0 || x.shape[1] == 0) {
    refuse_x("must have rows of a multiple of 16 bytes");
  }
  if (x.address % kVecBytes != 0) refuse_x("must begin at a multiple of 16 bytes");
  require_like(context, "residual", residual, x, 2);
  require_like(context, "weight", weight, x, 1);
  Collected collected = run(context, checked, 0,
                            {.residual = pointer_of<uint8_t>(residual.address),
                             .weight = pointer_of<uint8_t>(weight.address),
                             .normed = nullptr,
                             .row_vecs = 0,
                             .eps = eps},
                            {x.object, residual.object, weight.object});
  return {std::move(collected.normed), std::move(collected.out)};
}

void signal_word(CallContext& context, uintptr_t word, int peer) {
  launch_unordered(context, [&](uint64_t stream) {
    context.engine.signal_word({{}, pointer_of<uint64_t>(word), nullptr, peer}, stream);
  });
}

void await_word(CallContext& context, uintptr_t word, uintptr_t count, int peer) {
  launch_unordered(context, [&](uint64_t stream) {
    context.engine.await_word({{}, pointer_of<uint64_t>(word), pointer_of<uint64_t>(count), peer},
                              stream);
  });
}

void begin_matmul(CallContext& context, const MatmulArgs& args, int digest) {
  launch_ordered(context,
                 [&](uint64_t stream) { context.engine.begin_matmul(args, digest, stream); });
}

void push(CallContext& context, const PushArgs& args) {
  launch_unordered(context, [&](uint64_t stream) { context.engine.push(args, stream); });
}

void await_push(CallContext& context, const MatmulArgs& args) {
  launch_unordered(context, [&](uint64_t stream) { context.engine.await_push(args, stream); });
}

void add_slots(CallContext& context, const AddSlotsArgs& args, Dtype dtype) {
  launch_unordered(context,
                   [&](uint64_t stream) { context.engine.add_slots(args, dtype, stream); });
}

void end_matmul(CallContext& context, const MatmulArgs& args) {
  launch_ordered(context, [&](uint64_t stream) { context.engine.end_matmul(args, stream); });
}

}  // namespace deep_comm
