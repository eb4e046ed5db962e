#include "test_kernel.hpp"

namespace deep_comm::test {
namespace {

using namespace deep_comm::arch;

void wait_parity(Mbarrier* barrier, uint32_t parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// Results of try_wait through two phases of a barrier with two arrivals, then bytes.
void mbarrier_phases(const Args& args) {
  auto* barrier = reinterpret_cast<Mbarrier*>(dynamic_smem());
  uint64_t* out = args.memory;
  if (thread_idx() != 0) return;
  mbarrier_init(barrier, 2);
  fence_mbarrier_init();
  *out++ = mbarrier_try_wait_parity(barrier, 1);  // the phase before the first: complete
  *out++ = mbarrier_try_wait_parity(barrier, 0);
  mbarrier_arrive(barrier);
  *out++ = mbarrier_try_wait_parity(barrier, 0);
  mbarrier_arrive(barrier);
  *out++ = mbarrier_try_wait_parity(barrier, 0);
  *out++ = mbarrier_try_wait_parity(barrier, 1);  // now the phase under way
  bulk_load(dynamic_smem() + 64, args.memory + 64, 32, barrier);
  *out++ = mbarrier_try_wait_parity(barrier, 1);  // whether or not the bytes have landed
  mbarrier_arrive(barrier);
  wait_parity(barrier, 1);
  *out++ = mbarrier_try_wait_parity(barrier, 1);
  *out++ = mbarrier_try_wait_parity(barrier, 0);
}

// Thread 0 issues, all threads wait on the mbarrier. params: bytes, rounds.
// memory: 64 words of results, then the source, then the destination.
void bulk_round_trip(const Args& args) {
  auto* barrier = reinterpret_cast<Mbarrier*>(dynamic_smem());
  uint8_t* staging = dynamic_smem() + 128;
  const auto num_bytes = static_cast<uint32_t>(args.params[0]);
  auto* source = reinterpret_cast<uint8_t*>(args.memory + 64);
  uint8_t* target = source + num_bytes * args.params[1];
  if (thread_idx() == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  sync_block();
  for (int round = 0; round < args.params[1]; ++round) {
    if (thread_idx() == 0) {
      bulk_load(staging, source + num_bytes * static_cast<uint32_t>(round), num_bytes, barrier);
    }
    wait_parity(barrier, static_cast<uint32_t>(round) & 1);
    for (uint32_t i = static_cast<uint32_t>(thread_idx()); i < num_bytes;
         i += static_cast<uint32_t>(num_threads())) {
      staging[i] = static_cast<uint8_t>(staging[i] + 1);
    }
    fence_proxy_async();
    sync_block();
    if (thread_idx() == 0) {
      bulk_store(target + num_bytes * static_cast<uint32_t>(round), staging, num_bytes);
      bulk_commit();
      bulk_wait_read<0>();
    }
    sync_block();
  }
}

// params[0]: whether to wait for the load before its destination is read.
void bulk_load_unwaited(const Args& args) {
  auto* barrier = reinterpret_cast<Mbarrier*>(dynamic_smem());
  auto* landed = reinterpret_cast<volatile uint64_t*>(dynamic_smem() + 64);
  if (thread_idx() != 0) return;
  mbarrier_init(barrier, 1);
  bulk_load(dynamic_smem() + 64, args.memory + 64, 64, barrier);
  if (args.params[0]) wait_parity(barrier, 0);
  args.memory[0] = landed[7];
  wait_parity(barrier, 0);
}

// Overwrites the shared memory of a bulk store. params[0]: after bulk_wait_read or not.
void bulk_store_reuse(const Args& args) {
  auto* staging = reinterpret_cast<volatile uint64_t*>(dynamic_smem());
  if (thread_idx() != 0) return;
  for (uint64_t item = 0; item < 8; ++item) {
    if (args.params[0] && item >= 1) bulk_wait_read<0>();
    for (int i = 0; i < 8; ++i) staging[i] = 1000 + item;
    fence_proxy_async_shared();
    bulk_store(args.memory + 8 * item, const_cast<uint64_t*>(staging), 64);
    bulk_commit();
  }
  bulk_wait<0>();
}

// Three groups in flight, two staging slots that may be reused while the newest group still reads.
void bulk_groups(const Args& args) {
  auto* staging = reinterpret_cast<volatile uint64_t*>(dynamic_smem());
  if (thread_idx() != 0) return;
  for (uint64_t item = 0; item < 16; ++item) {
    volatile uint64_t* slot = staging + 8 * (item % 2);
    bulk_wait_read<1>();
    for (int i = 0; i < 8; ++i) slot[i] = 1000 + item;
    fence_proxy_async_shared();
    bulk_store(args.memory + 8 * item, const_cast<uint64_t*>(slot), 32);
    bulk_store(args.memory + 8 * item + 4, const_cast<uint64_t*>(slot + 4), 32);
    bulk_commit();
  }
  bulk_wait<0>();
}

// Rank 0 sends 64 words by a bulk copy, then raises a flag; rank 1 counts the old words it finds.
// params: wait for the copy?, release the flag?
void bulk_message(const Args& args) {
  uint64_t* flag = args.memory;
  uint64_t* data = args.memory + 64;
  if (thread_idx() != 0) return;
  if (args.rank == 0) {
    auto* staging = reinterpret_cast<volatile uint64_t*>(dynamic_smem());
    for (uint64_t i = 0; i < 64; ++i) staging[i] = 1000 + i;
    fence_proxy_async();
    bulk_store(data, const_cast<uint64_t*>(staging), 512);
    bulk_commit();
    if (args.params[0]) bulk_wait<0>();
    if (args.params[1]) {
      st_release_sys(flag, uint64_t{1});
    } else {
      st_relaxed_sys(flag, uint64_t{1});
    }
    bulk_wait<0>();
  } else {
    while (ld_acquire_sys(flag) == 0) wait_hint<uint64_t>(flag, 0, nullptr, ~uint64_t{0});
    uint64_t stale = 0;
    for (uint64_t i = 0; i < 64; ++i) stale += ld_weak(data + i) != 1000 + i;
    st_weak(args.memory + 8, stale);
  }
}

// params[0]: which rule to break.
void bulk_errors(const Args& args) {
  auto* barrier = reinterpret_cast<Mbarrier*>(dynamic_smem());
  uint8_t* smem = dynamic_smem();
  if (thread_idx() != 0) return;
  mbarrier_init(barrier, 1);
  auto* global = reinterpret_cast<uint8_t*>(args.memory);
  switch (args.params[0]) {
    case 0:
      bulk_store(global, smem + 64, 24);
      break;
    case 1:
      bulk_store(global + 8, smem + 64, 32);
      break;
    case 2:
      bulk_store(global, smem + 72, 32);
      break;
    case 3:
      bulk_store(global, smem + args.params[1], 32);
      break;
    case 4:
      bulk_load(smem + args.params[1] - 16, global, 32, barrier);
      break;
    case 5:
      bulk_store(global, smem - 16, 32);
      break;
    case 6:
      bulk_load(smem + 64, global, 32, reinterpret_cast<Mbarrier*>(global));
      break;
    case 7:
      mbarrier_init(reinterpret_cast<Mbarrier*>(smem + 4), 1);
      break;
    case 8:
      mbarrier_init(barrier, 0);
      break;
    case 9:
      mbarrier_arrive(reinterpret_cast<Mbarrier*>(smem + 8));
      break;
    case 10:
      bulk_store(global, smem + 64, 32);
      break;  // neither committed nor waited for
    case 11:
      bulk_store(global, smem + 64, 32);
      bulk_commit();
      bulk_store(global, smem + 64, 32);
      bulk_commit();
      bulk_wait_read<1>();
      break;
    default:
      break;
  }
}

constexpr Kernel kKernels[] = {
    kernel<mbarrier_phases>("mbarrier_phases"),
    kernel<bulk_round_trip>("bulk_round_trip"),
    kernel<bulk_load_unwaited>("bulk_load_unwaited"),
    kernel<bulk_store_reuse>("bulk_store_reuse"),
    kernel<bulk_groups>("bulk_groups"),
    kernel<bulk_message>("bulk_message"),
    kernel<bulk_errors>("bulk_errors"),
};

}  // namespace

std::span<const Kernel> bulk_kernels() { return kKernels; }

}  // namespace deep_comm::test
