// The names by which a test asks for a fault; the bits are those of deep_comm::Fault, whose header
// is above this layer (device/arch/host_site.cuh asserts that they agree).
#pragma once

#include <cstdint>

namespace deep_comm::simt {

struct FaultName {
  const char* name;
  uint32_t bit;
};

inline constexpr FaultName kFaultNames[] = {
    {"weaken_release", 1u << 0},      {"weaken_fence", 1u << 1},
    {"skip_credit", 1u << 2},         {"skip_bulk_wait", 1u << 3},
    {"skip_bulk_wait_read", 1u << 4}, {"skip_entry_barrier", 1u << 5},
    {"skip_arrival", 1u << 6},        {"skip_clear", 1u << 7},
    {"reorder_rail", 1u << 8},        {"skip_rail_credit", 1u << 9},
    {"early_rail_credit", 1u << 10},  {"skip_rail_fence", 1u << 11},
    {"plain_words", 1u << 12},        {"skip_launch_wait", 1u << 13},
    {"skip_vote", 1u << 14},          {"skip_agreement", 1u << 15},
    {"shared_rows", 1u << 16},        {"skip_alive", 1u << 17},
    {"packed_sources", 1u << 18},     {"early_rail_done", 1u << 19},
    {"await_absent", 1u << 20},       {"ignore_generation", 1u << 21},
    {"early_generation", 1u << 22},   {"skip_exit_barrier", 1u << 23},
    {"early_credit", 1u << 24},       {"keep_proposal", 1u << 25},
    {"skip_blame", 1u << 26},         {"skip_sums", 1u << 27},
    {"early_sums", 1u << 28},         {"lost_sums", 1u << 29},
    {"early_landed", 1u << 30},       {"reverse_sums", 1u << 31},
};

}  // namespace deep_comm::simt
