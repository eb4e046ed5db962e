// How dispatch sends rows: staged in shared memory and copied in bulk, or by stores of threads
// (DispatchRows). Before the routes go strips of rows, or else a first part to one peer, which gives
// its link work.
#pragma once

#include "device/low_latency/block.cuh"

namespace deep_comm {

// The token of the block, and the column, of one of its pieces, of which each token has num_pieces.
template <DispatchRows kRows>
DC_DEVICE Position position_of_piece(int idx, int num_pieces) {
  if constexpr (kRows != DispatchRows::kMany) return {0, idx};
  return Position::of(idx, Divisor::make(num_pieces), num_pieces);
}

// ---- staged rows: bulk copies from shared memory ------------------------------------------------

// A block with at most one token encodes the token's columns into shared memory. The bulk-copy
// engine sends them from there, so no later load of the block waits behind stores to busy links.
// The caller follows it with a barrier of the block.
// `first`: as SendInputs has loaded it.
template <PayloadFormat kFormat>
DC_DEVICE void stage_row(const LowLatencyDispatchArgs& args, const LowLatencyShare& share,
                         const BlockMemory& memory, const Piece<kFormat>& first) {
  using PieceType = Piece<kFormat>;
  const int first_piece = share.column_begin / PieceType::kElements;
  const int num_pieces = share.num_tokens() * share.num_columns() / PieceType::kElements;
  PieceType loaded = first;
  // The bounds are those of whole warps: encoding needs all lanes.
  DC_NO_UNROLL
  for (int base = arch::warp_idx() * kWarpSize; base < num_pieces; base += arch::num_threads()) {
    const int idx = base + arch::lane_idx();
    const bool has_piece = idx < num_pieces;
    const int piece = first_piece + (has_piece ? idx : 0);
    if (base >= arch::num_threads()) {
      loaded.load(args.x + static_cast<size_t>(share.begin) * args.shape.hidden * sizeof(Bf16),
                  piece);
    }
    loaded.encode(args.round_scale, args.global_scale);
    if (has_piece) loaded.put(memory.stage, args.shape.row_bytes, piece);
  }
  // Before the bulk copies that read them.
  arch::fence_proxy_async_shared();
}

// One lane copies the stage to a peer, while other lanes copy it to others. The kernel waits for
// the copies at its end.
DC_DEVICE void copy_stage(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                          const LowLatencyShare& share, const BlockMemory& memory, int peer) {
  const World& world = args.world;
  const LowLatencyShape& shape = args.shape;
  if (((memory.masks[0] & memory.active) >> peer & 1u) == 0) return;
  uint8_t* slot = buffer.slot(peer, world.rank, share.begin);
  // pairs with: await_arrivals in expand_rows, take_arrival in expand_scales — nothing but the words
  // themselves. Between nodes these are staged, and the put says whom it pairs with.
  const auto copy = [&](uint32_t offset, uint32_t num_bytes) {
    arch::bulk_store(slot + offset, memory.stage + offset, num_bytes);
  };
  const bool has_scales = shape.num_scales > 0;
  const uint32_t element_bytes = has_scales ? 1 : sizeof(Bf16);
  copy(share.column_begin * element_bytes, share.num_columns() * element_bytes);
  if (has_scales) {
    copy(shape.row_bytes + share.column_begin / kScaleBlock * sizeof(float),
         share.num_columns() / kScaleBlock * sizeof(float));
  }
  arch::bulk_commit();
}

// The last warp. Strips are copied to all peers. Whole rows go to the first peer only: more of them
// would delay the routes.
template <DispatchRows kRows>
DC_DEVICE void send_stage(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                          const LowLatencyShare& share, const BlockMemory& memory) {
  const World& world = args.world;
  const int peer_order = arch::lane_idx();
  if (arch::warp_idx() != arch::num_warps() - 1 || share.num_tokens() == 0) return;
  if constexpr (kRows == DispatchRows::kWhole) {
    if (peer_order == 0)
      copy_stage(args, buffer, share, memory, peer_at(world, memory.rotation, 0));
  } else if (peer_order < world.num_ranks) {
    const int peer = peer_at(world, block_rotation(world), peer_order);
    copy_stage(args, buffer, share, memory, peer);
  }
}

// Whole rows, the warp that has sent the routes: copies for the other peers.
DC_DEVICE void send_rest_of_stage(const LowLatencyDispatchArgs& args,
                                  const LowLatencyBuffer& buffer, const LowLatencyShare& share,
                                  const BlockMemory& memory) {
  const int peer_order = arch::lane_idx() + 1;
  if (peer_order >= args.world.num_ranks) return;
  copy_stage(args, buffer, share, memory, peer_at(args.world, memory.rotation, peer_order));
}

// ---- other rows: stores of threads --------------------------------------------------------------

// Every thread encodes its first piece and sends it to the first peer, before the routes, to give
// the link work. More pieces would delay the routes.
template <PayloadFormat kFormat, DispatchRows kRows>
DC_DEVICE void send_first_pieces(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                                 const LowLatencyShare& share, const BlockMemory& memory,
                                 Piece<kFormat>& first) {
  const World& world = args.world;
  const int num_pieces = share.num_columns() / Piece<kFormat>::kElements;
  const int num_total = min_of(share.num_tokens(), arch::num_warps()) * num_pieces;
  // As in send_rows: encoding needs all lanes.
  if (arch::warp_idx() * kWarpSize >= num_total) return;
  first.encode(args.round_scale, args.global_scale);
  const int idx = arch::thread_idx(), peer = peer_at(world, memory.rotation, 0);
  if (idx >= num_total) return;
  const Position position = position_of_piece<kRows>(idx, num_pieces);
  if (((memory.masks[position.row] & memory.active) >> peer & 1u) == 0) return;
  first.send(buffer.slot(peer, world.rank, share.begin + position.row), args.shape.row_bytes,
             share.column_begin / Piece<kFormat>::kElements + position.column);
}

// The block sends its columns of tokens [begin, end), one piece per thread at a time. With
// has_first this thread has loaded and encoded its first piece (`first`) and sent it to the first
// peer.
template <PayloadFormat kFormat, DispatchRows kRows>
DC_DEVICE void send_rows(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                         const LowLatencyShare& share, const BlockMemory& memory, int begin,
                         int end, const Piece<kFormat>& first, bool has_first) {
  using PieceType = Piece<kFormat>;
  const World& world = args.world;
  const int num_pieces = share.num_columns() / PieceType::kElements;
  const int first_piece = share.column_begin / PieceType::kElements;
  const int num_total = (end - begin) * num_pieces;
  // The bounds are those of whole warps: encoding needs all lanes.
  DC_NO_UNROLL
  for (int base = arch::warp_idx() * kWarpSize; base < num_total; base += arch::num_threads()) {
    const int idx = base + arch::lane_idx();
    const bool has_piece = idx < num_total;
    const Position position = position_of_piece<kRows>(has_piece ? idx : 0, num_pieces);
    const int token = begin + position.row, piece = first_piece + position.column;
    PieceType loaded = first;
    const int first_peer = has_first ? 1 : 0;
    if (!has_first) {
      loaded.load(args.x + static_cast<size_t>(token) * args.shape.hidden * sizeof(Bf16), piece);
      loaded.encode(args.round_scale, args.global_scale);
    }
    has_first = false;
    if (!has_piece) continue;
    const uint32_t mask = memory.masks[position.row] & memory.active;
    DC_NO_UNROLL
    for (int peer_order = first_peer; peer_order < world.num_ranks; ++peer_order) {
      const int peer = peer_at(world, memory.rotation, peer_order);
      if ((mask >> peer & 1u) == 0) continue;
      loaded.send(buffer.slot(peer, world.rank, token), args.shape.row_bytes, piece);
    }
  }
}

}  // namespace deep_comm
