// The places in the kernels where an access, fence or barrier orders something, and the one of them
// that a test weakens.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace deep_comm::simt {

// Where in a kernel a thread stands; an empty file: anywhere.
struct CallSite {
  const char* file = "";
  int line = 0;

  // As a default argument: the call of the function that has it.
  static constexpr CallSite here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

enum class Weakening : uint8_t {
  kNone,
  kRelaxed,  // accesses order nothing; fences, barriers and waits are left out
  kNarrow,   // the next smaller scope
};

class Sites {
 public:
  // `weakened`: "file:line:op:relaxed" or "…:narrow", the file from csrc/ on; empty: none. Throws
  // std::invalid_argument for anything else.
  explicit Sites(const std::string& weakened);

  // A thread comes to an operation. `op` and the file are literals.
  Weakening visit(const char* op, CallSite site);
  // All that were visited: "file:line:op".
  std::vector<std::string> visited() const;

 private:
  std::string weakened_;  // "file:line:op"
  Weakening how_ = Weakening::kNone;
  std::map<std::tuple<const char*, int, const char*>, Weakening> visited_;
};

}  // namespace deep_comm::simt
