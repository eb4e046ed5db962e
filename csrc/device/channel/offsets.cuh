// The range of rows that a channel will carry, announced before the rows. Each word holds its value
// and its generation, so the words need no order between them, nor towards the rows.
#pragma once

#include "device/sync/await.cuh"

namespace deep_comm {

struct ChannelOffsets {
  uint32_t start;  // rows of lower channels, same source and destination
  uint32_t end;
};

// One lane of the sender.
DC_DEVICE void publish_offsets(const Context& context, int channel, int peer,
                               const ChannelOffsets& offsets) {
  RecvLine* line = context.world.recv_line(peer, channel, context.world.rank);
  // pairs with: await_offsets at the peer — nothing but the words themselves
  arch::st_relaxed_sys(&line->start_offset, Tagged::pack(context.generation, offsets.start));
  arch::st_relaxed_sys(&line->end_offset, Tagged::pack(context.generation, offsets.end));
}

// One lane of the receiver.
DC_DEVICE bool await_offsets(const Context& context, int channel, int peer,
                             ChannelOffsets* offsets) {
  const RecvLine* line = context.world.recv_line(context.world.rank, channel, peer);
  return await_tagged(context, &line->start_offset,
                      {Stage::kChannelOffsets, Word::kStartOffset, peer, channel}, 0,
                      &offsets->start) &&
         await_tagged(context, &line->end_offset,
                      {Stage::kChannelOffsets, Word::kEndOffset, peer, channel}, 0, &offsets->end);
}

}  // namespace deep_comm
