// dispatch for decoding in a group of several nodes: every token is sent once to every rank that
// holds one of its experts, directly over the rail, or over NVLink inside the node. Arguments and
// outputs are those of low_latency_dispatch, except for recv_rows and recv_weights, which are by slot;
// and num_rows, return_addresses for combine.
//
// grid   B blocks; the last one counts, if there are two. Tokens, and rows that arrive, are
//        distributed over the blocks
// smem   RailBlockMemory
// phases as low_latency_dispatch
//
//   word       owner     written by             read by         order                      reset
//   slots      receiver  a NIC, or the source   one block       relaxed; not zero          reader
//   announced, counts
//              receiver  a NIC, or the source   every block     relaxed; number in word    never
//   consumed   source    block 0 of the         senders, two    acquire; the launch that   never
//                        receiver's next launch operations      has read the buffer
//                        of this kind           later           has ended
//   staging    source    a block                its NIC         fence, then the put        not
//   Words that are never reset hold numbers that only grow. Staging may be overwritten after
//   credit has arrived.
//
// before slots of this buffer are zero, and nothing of the operation two before is in flight:
//        credit is awaited here
// after  outputs complete on this stream; the buffer is zero again at this rank
// waits  as low_latency_dispatch; with masks each wait also ends when its peer is given up: see
//        rail_mask.cuh
// needs  of the rail: every word of 8 bytes of a put, at a multiple of 8, arrives whole and is
//        written once. No order.
// not promised: rows past recv_count
#pragma once

#include "device/low_latency/rail_dispatch_receive.cuh"
#include "device/low_latency/rail_dispatch_send.cuh"

namespace deep_comm {

template <PayloadFormat kFormat>
DC_DEVICE void low_latency_rail_dispatch(const LowLatencyRailDispatchArgs& args) {
  const RailReach& reach = args.reach;
  LowLatencyRailBuffer buffer{
      args.world, reach.group, reach.words, reach.region, args.shape, LowLatencyKind::kDispatch, 0};
  const RailContext context = rail_context(args.world, reach, Kernel::kLowLatencyDispatch,
                                           operation_of(buffer, args.phases), args.can_shrink);
  buffer.buffer_idx = static_cast<int>(context.generation & 1u);
  const RailBlockMemory memory = RailBlockMemory::make(args.shape, reach.group.num_ranks);
  const uint32_t previous = begin_block(context, buffer, memory);
  arch::sync_block();
  begin_operation(context, buffer, memory, args.phases);
  bool ok = true;
  if (args.phases.send) ok = dispatch_send<kFormat>(context, args, buffer, memory, previous);
  if (args.phases.receive && ok) dispatch_receive<kFormat>(context, args, buffer, memory);
}

}  // namespace deep_comm
