// Collectives of tensor parallelism, and the words of symmetric memory; see csrc/device/tp.
#pragma once

#include "host/calls/call_context.hpp"

namespace deep_comm {

enum class AllReduceMethod : int { kAuto, kOneShot, kTwoShot };

// Each returns its output, a tensor of the framework's, and runs on the caller's stream. num_sms: the
// most blocks. digest: of what else the ranks must agree on, besides the type and the shape of x. Throw
// CallError: kArgument, kBufferTooSmall; kRecorded.
Object all_gather(CallContext& context, const TensorRef& x, const IntegerRef& num_sms, int digest);
Object reduce_scatter(CallContext& context, const TensorRef& x, const IntegerRef& num_sms,
                      int digest);
Object all_reduce(CallContext& context, const TensorRef& x, AllReduceMethod method,
                  const IntegerRef& num_sms, int digest);
// (round(residual + sum of x) with every row normalised, the same before that); see device/tp/norm.cuh.
std::pair<Object, Object> all_reduce_norm(CallContext& context, const TensorRef& x,
                                          const TensorRef& residual, const TensorRef& weight,
                                          float eps, const IntegerRef& num_sms);

// On the caller's stream, without order among the calls. word: at the peer; of this rank.
void signal_word(CallContext& context, uintptr_t word, int peer);
void await_word(CallContext& context, uintptr_t word, uintptr_t count, int peer);

// Around matrix products, on the caller's stream; see csrc/device/tp/matmul.cuh. begin and end are calls
// in the order of all calls, what lies between them is not.
void begin_matmul(CallContext& context, const MatmulArgs& args, int digest);
void push(CallContext& context, const PushArgs& args);
void await_push(CallContext& context, const MatmulArgs& args);
void add_slots(CallContext& context, const AddSlotsArgs& args, Dtype dtype);
void end_matmul(CallContext& context, const MatmulArgs& args);

}  // namespace deep_comm
