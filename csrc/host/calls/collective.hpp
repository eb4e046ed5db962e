// Collectives of tensor parallelism, and the words of symmetric memory; see csrc/device/tp.
#pragma once

#include "host/calls/call_context.hpp"

namespace deep_comm {

enum class AllReduceMethod : int { kAuto, kOneShot, kTwoShot };

// Each returns its output, a tensor of the framework's, and runs on the caller's stream. num_sms: the
// most blocks. Throw CallError: kArgument, kBufferTooSmall; kRecorded.
Object all_gather(CallContext& context, const TensorRef& x, const IntegerRef& num_sms);
Object reduce_scatter(CallContext& context, const TensorRef& x, const IntegerRef& num_sms);
Object all_reduce(CallContext& context, const TensorRef& x, AllReduceMethod method,
                  const IntegerRef& num_sms);

// On the caller's stream, without order among the calls. word: at the peer; of this rank.
void signal_word(CallContext& context, uintptr_t word, int peer);
void await_word(CallContext& context, uintptr_t word, uintptr_t count, int peer);

}  // namespace deep_comm
