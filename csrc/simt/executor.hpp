// What both machines share: the life of a grid's fibers and the switches between them.
#pragma once

#include <string>
#include <vector>

#include "fiber.hpp"
#include "rail.hpp"

namespace deep_comm::simt {

class Executor {
 public:
  Executor() = default;
  virtual ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // ---- called on the stack of a fiber -------------------------------------------------

  // Runs others until somebody makes `self` ready. Its reason and place in a list are recorded
  // before.
  void suspend(Fiber* self);
  // Lets others run first.
  void yield(Fiber* self);
  // Ends the whole machine: nothing runs after this. The message gets the fiber's location.
  [[noreturn]] void fail(const Fiber* self, const std::string& message);
  // Blocks until the condition in the fiber holds, its deadline passes, or for no reason.
  void park(Fiber* self);

  virtual void make_ready(Fiber* fiber) = 0;
  // Of a warp whose lanes have just met: soon, for their stacks are warm.
  virtual void make_ready_hot(Fiber* fiber) = 0;
  // Ready, but after all others.
  virtual void make_ready_last(Fiber* fiber) = 0;
  // Something at `address` changed that a parked fiber may wait for.
  virtual void notify(const void* address) = 0;
  // The network between nodes takes it; it lands some time later.
  virtual void post_rail(const RailOp& op) = 0;
  virtual uint64_t now_ns() = 0;
  // The word as the fiber sees it.
  virtual uint64_t peek(const Fiber* fiber, const void* word, unsigned num_bytes) = 0;

  bool holds(const Fiber* fiber);
  std::string describe(const GridRun& grid);

 protected:
  // The next fiber to run, or null: back to the context of the scheduler.
  virtual Fiber* pick_next() = 0;
  virtual void on_fiber_start(Fiber*) {}
  virtual void on_block_exit(Block*) {}
  virtual void on_grid_exit(GridRun*) {}
  virtual void on_park(Fiber*) {}
  virtual void on_unpark(Fiber*) {}

  // ---- called on the stack of the scheduler -------------------------------------------
  std::unique_ptr<GridRun> create(const Grid& grid, Body body, const void* args);
  void start(GridRun& grid);
  void release(GridRun& grid);  // stacks and shared memory go back to their pools
  void resume();                // until pick_next() finds nothing

  void unpark(Fiber* fiber);

  std::vector<Fiber*> parked_;
  std::string failure_;
  bool failed_ = false;

 private:
  static void fiber_main();
  [[noreturn]] void exit_fiber(Fiber* self);
  [[noreturn]] void leave_for_ever();
  SharedMemory take_smem(size_t num_bytes);
  void check_smem_canary(const Fiber* self, const Block& block);

  Context scheduler_;
  Context abandoned_;  // where the registers of fibers that never run again are saved
  std::vector<SharedMemory> smem_pool_;
};

// Throws std::invalid_argument with the field, its value and the rule.
void check_grid(const Grid& grid);

}  // namespace deep_comm::simt
