// Memory of the host target: POSIX shared memory between the processes of one user, and plain
// memory between the threads of one process.
//
// A segment is named /deep_comm.<uid>.<pid>.<start>.<random>: who made it, and when that process
// started (a pid alone may have been given to another process since), so that a later run can tell
// a crashed run's segment from a living one's; and 128 random bits, so that nobody can guess it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace deep_comm {

class Segment {
 public:
  // Zeroed, mode 0600, with all its pages reserved. Throws std::system_error when the system
  // refuses, std::runtime_error when shared memory has too little room.
  static Segment create(size_t num_bytes);
  // Throws std::system_error, or std::runtime_error when the segment has another size or owner.
  static Segment attach(const std::string& name, size_t num_bytes);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  Segment(const Segment&) = delete;
  // Closes. The creating process also removes the name; a forked child of it does not.
  ~Segment();

  const std::string& name() const { return name_; }
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(memory_); }  // 0 once closed
  size_t num_bytes() const { return num_bytes_; }

  // Removes the name, when every rank has attached; the memory lives until the last close.
  void unlink();
  void close();

 private:
  Segment(std::string name, void* memory, size_t num_bytes, pid_t creator, int lock_fd);

  std::string name_;
  void* memory_;
  size_t num_bytes_;
  pid_t creator_;  // whose destructor unlinks; 0: nobody's
  int lock_fd_;    // holds the creator's lock on the segment; -1: not the creator
};

// Removes the segments of this user whose creating process is gone; returns their names.
std::vector<std::string> remove_stale_segments();

// Zeroed, page-aligned memory of this process: the heap of ranks that are threads.
uintptr_t host_allocate(size_t num_bytes);
// `address` comes from host_allocate and is freed once; 0 does nothing.
void host_free(uintptr_t address);

}  // namespace deep_comm
