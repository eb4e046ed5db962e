#include "late_loads.hpp"

#include <string>

namespace deep_comm::simt {

uint32_t LateLoads::note(Read read, const void* src, size_t num_bytes) {
  read.time = ++now_;
  for_lines(src, num_bytes, [&](LineKey key, uint16_t bytes) {
    read.key = key;
    read.bytes = bytes;
    of(key) = read;
  });
  return now_;
}

std::string LateLoads::find(const Fiber* writer, const void* dst, size_t num_bytes,
                            uint32_t forgotten) const {
  const Read* found = nullptr;
  for_lines(dst, num_bytes, [&](LineKey key, uint16_t bytes) {
    const Read& read = of(key);
    if (read.key != key || (read.bytes & bytes) == 0 || read.time <= forgotten) [[likely]]
      return;
    const View& view = writer->view;
    const bool is_before = read.time <= (read.thread == kOfNic ? view.nic_loads_of(read.rank)
                                                               : view.loads_of(read.rank));
    const bool is_own = read.rank == grid_of(writer)->grid.rank &&
                        read.block == block_of(writer)->index && read.thread == writer->thread_idx;
    if (!is_before && !is_own) found = &read;
  });
  if (!found) [[likely]]
    return "";
  const Read& read = *found;
  std::string who = "rank " + std::to_string(read.rank);
  if (read.thread == kOfNic) {
    who = "the NIC of " + who;
  } else {
    who += " block " + std::to_string(read.block);
    who += read.thread == kOfBulk ? " (a bulk copy)"
                                  : " warp " + std::to_string(read.thread / kLanes) + " lane " +
                                        std::to_string(read.thread % kLanes);
  }
  return "stores into memory that " + who +
         " has read, and nothing orders the load before the store: the load could be late";
}

void LateLoads::forget(int rank) {
  for (Read& read : reads_) {
    if (read.rank == rank) read = {};
  }
}

}  // namespace deep_comm::simt
