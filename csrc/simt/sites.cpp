#include "sites.hpp"

#include <algorithm>
#include <stdexcept>
#include <string_view>

namespace deep_comm::simt {
namespace {

// The same name wherever the checkout lies.
std::string name_of(const char* file, int line, const char* op) {
  std::string_view path = file;
  constexpr std::string_view kRoots[] = {"/csrc/", "/tests/"};
  for (const std::string_view root : kRoots) {
    const size_t place = path.rfind(root);
    if (place == std::string_view::npos) continue;
    path.remove_prefix(place + root.size());
    break;
  }
  return std::string(path) + ":" + std::to_string(line) + ":" + op;
}

}  // namespace

Sites::Sites(const std::string& weakened) {
  if (weakened.empty()) return;
  const size_t colon = weakened.rfind(':');
  const std::string how = colon == std::string::npos ? "" : weakened.substr(colon + 1);
  if (how != "relaxed" && how != "narrow") {
    throw std::invalid_argument("weaken = '" + weakened +
                                "', but it is file:line:op:relaxed or file:line:op:narrow");
  }
  weakened_ = weakened.substr(0, colon);
  how_ = how == "relaxed" ? Weakening::kRelaxed : Weakening::kNarrow;
}

Weakening Sites::visit(const char* op, CallSite site) {
  const auto [place, is_new] = visited_.try_emplace({site.file, site.line, op}, Weakening::kNone);
  if (is_new && how_ != Weakening::kNone && name_of(site.file, site.line, op) == weakened_) {
    place->second = how_;
  }
  return place->second;
}

std::vector<std::string> Sites::visited() const {
  std::vector<std::string> names;
  for (const auto& [place, how] : visited_) {
    const auto& [file, line, op] = place;
    names.push_back(name_of(file, line, op));
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

}  // namespace deep_comm::simt
