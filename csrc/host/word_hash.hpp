// FNV-1a of 64-bit words: tells apart what two modules, or two ranks, must have alike.
#pragma once

#include <cstdint>

namespace deep_comm {

class WordHash {
 public:
  void add(uint64_t word) { hash_ = (hash_ ^ word) * 0x100000001b3u; }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
};

}  // namespace deep_comm
