// The face of the host executor: run a grid at once, or launch it on a simulated machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "rail.hpp"

namespace deep_comm::simt {

// When a launch begins. The launch before it in its stream allows the next one when all of its
// blocks have called allow_later_launch, or have ended.
enum class Begin : uint8_t {
  kBehind,  // when the launch before it has ended
  kEarly,   // when that one allows it; every thread awaits its end before it touches memory
  kBeside,  // when that one allows it; every thread awaits its end before it ends itself
};

// What a launch needs to know. `kernel` is a literal; blocks and grids are one-dimensional.
struct Grid {
  const char* kernel;
  int rank;
  int num_blocks;
  int num_threads;  // of one block
  size_t smem_bytes;
  Begin begin = Begin::kBehind;  // direct mode, where grids run in turn: kBehind
};

using Body = void (*)(const void* args);

// A kernel broke a rule of the machine: the message says which and where.
struct MachineError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Nothing can make progress: the message lists every waiting fiber and how to replay the run.
struct SimulationStuck : MachineError {
  using MachineError::MachineError;
};

// Direct mode: runs one grid to completion on the calling OS thread. Any number of OS threads and
// processes may do so at once; memory is the real one. `args` stays alive during the call.
// `on_idle` is called again and again while no fiber can go on; it may throw, which ends the grid
// where it is.
void run(const Grid& grid, Body body, const void* args, void (*on_idle)(void*) = nullptr,
         void* idle_state = nullptr);

// Fibers of `rank` do not run from step `after_step` on for `num_steps` steps (0: for ever).
struct Stall {
  int rank;
  uint64_t after_step;
  uint64_t num_steps;
};

struct SimulationOptions {
  int num_ranks = 1;
  uint64_t seed = 0;
  std::string policy = "random";  // random | fifo | lifo | starve | priority | any
  bool weak_memory = true;        // hold stores that are not releases; read what was there before
  bool delay_bulk = true;         // complete bulk copies late
  // Shuffles and votes order memory as sync_warp does. GPUs do this, PTX does not promise it.
  bool collectives_order_memory = false;
  // Without it a store to global memory that an earlier load could see is an error.
  bool allow_late_loads = false;
  // An access to shared memory that nothing orders is an error. Needs DEEP_COMM_FIND_RACES=ON.
  bool find_races = false;
  std::vector<std::string> faults;
  std::string weaken;       // one site of the kernels, and how: see sites.hpp
  bool note_sites = false;  // for Simulation::visited_sites
  std::vector<Stall> stalls;
  std::string on_stuck = "report";     // report | clock
  uint64_t max_steps = 2'000'000'000;  // of the whole simulation
  // Since memory or a barrier last changed: more are a livelock. For each fiber, and besides.
  uint64_t max_idle_steps_per_fiber = 2'000;
  uint64_t max_idle_steps = 500'000;
};

class SimulationState;

// All ranks of a job in one process under one seeded scheduler. Each rank is one OS thread; the
// scheduler's thread and the rank threads never act at the same time, so that a seed replays a run.
class Simulation {
 public:
  explicit Simulation(const SimulationOptions& options);
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  // Copies the arguments; asynchronous; first in, first out per (rank, stream).
  void launch(int rank, uint64_t stream, const Grid& grid, Body body, const void* args,
              size_t args_bytes);
  // Blocks the rank's OS thread until the stream is empty.
  void synchronize(int rank, uint64_t stream);
  // All-gather between the rank threads.
  std::vector<std::string> exchange(int rank, std::string payload);
  // The rank's thread ends; it takes part in nothing any more. Its grids go on.
  void leave(int rank);
  // The rank's fibers never run again and its stores that nobody has seen are lost.
  void kill(int rank);
  // The rank's NIC delivers nothing any more: not what is posted, nor what will be.
  void stall_rail(int rank);
  // It delivers again, and all that it holds at once. While no kernel of the rank runs.
  void flush_rail(int rank);
  // What the ranks have posted on the network so far, by queue.
  std::vector<RailTraffic> rail_traffic() const;
  // Where the kernels have come to an operation that orders something: "file:line:op".
  std::vector<std::string> visited_sites() const;
  // Every fiber that waits, and for what.
  std::string describe() const;
  uint64_t num_steps() const;
  uint64_t time_ns() const;
  int num_ranks() const;

 private:
  std::unique_ptr<SimulationState> state_;
};

}  // namespace deep_comm::simt
