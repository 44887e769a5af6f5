// The CUDA kernel of the fingerprint as a function of the host: the same source, run thread by thread.
//
// The threads of a block are contexts of one thread of the host. Where they meet on a device, each gives
// way to the next here, so that all have arrived before any goes on.
#include <cstdint>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct ulonglong2 {
  unsigned long long x, y;
};

static struct {
  unsigned x;
} threadIdx, blockIdx;

enum { BLOCK_THREADS = 256, STACK_BYTES = 64 << 10 };

static ucontext_t turns, contexts[BLOCK_THREADS];
static unsigned long long exchanged[BLOCK_THREADS];

static void __syncthreads() {
  const unsigned me = threadIdx.x;
  swapcontext(&contexts[me], &turns);
  threadIdx.x = me;
}

static unsigned long long __shfl_down_sync(unsigned, unsigned long long value, unsigned distance) {
  const unsigned from = threadIdx.x % 32 + distance < 32 ? threadIdx.x + distance : threadIdx.x;
  exchanged[threadIdx.x] = value;
  __syncthreads();
  const unsigned long long found = exchanged[from];
  __syncthreads();
  return found;
}

// Loads of 16 bytes fault on a device where they are not aligned, and here do so silently otherwise.
static ulonglong2 __ldcs(const ulonglong2 *at) {
  if (reinterpret_cast<std::uintptr_t>(at) % sizeof *at) __builtin_trap();
  return *at;
}

static void atomicAdd(unsigned long long *at, unsigned long long value) { *at += value; }

#include "fingerprint.cu"

static struct {
  const Span *spans;
  unsigned count, blocks_per_span;
  unsigned long long *sums;
} arguments;

static bool has_ended[BLOCK_THREADS];

static void run_thread(int number) {
  threadIdx.x = static_cast<unsigned>(number);
  fingerprint(arguments.spans, arguments.count, arguments.blocks_per_span, arguments.sums);
  has_ended[number] = true;
}

static void run_block(char *stacks) {
  for (int i = 0; i < BLOCK_THREADS; i++) {
    has_ended[i] = false;
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = stacks + i * STACK_BYTES;
    contexts[i].uc_stack.ss_size = STACK_BYTES;
    contexts[i].uc_link = &turns;
    makecontext(&contexts[i], reinterpret_cast<void (*)()>(run_thread), 1, i);
  }
  for (bool going = true; going;) {
    going = false;
    for (int i = 0; i < BLOCK_THREADS; i++) {
      if (has_ended[i]) continue;
      swapcontext(&turns, &contexts[i]);
      going |= !has_ended[i];
    }
  }
}

extern "C" void run_grid(const Span *spans, unsigned count, unsigned blocks_per_span, unsigned blocks,
                         unsigned long long *sums) {
  std::vector<char> stacks(static_cast<std::size_t>(BLOCK_THREADS) * STACK_BYTES);
  arguments = {spans, count, blocks_per_span, sums};
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) run_block(stacks.data());
}
