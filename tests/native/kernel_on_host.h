// CUDA kernels as functions of the host: the same source, run thread by thread.
//
// The threads of a block are contexts of one thread of the host. Where they meet on a device, each gives
// way to the next here, so that all have arrived before any goes on.
#include <cstdint>
#include <cstring>
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

struct uint4 {
  unsigned x, y, z, w;
};

static struct {
  unsigned x;
} threadIdx, blockIdx;

enum { MOST_THREADS = 512, STACK_BYTES = 64 << 10 };

static ucontext_t turns, contexts[MOST_THREADS];
static bool has_ended[MOST_THREADS];
static unsigned long long exchanged[MOST_THREADS];

static void __syncthreads() {
  const unsigned me = threadIdx.x;
  swapcontext(&contexts[me], &turns);
  threadIdx.x = me;
}

template <typename Number>
static Number from_thread(Number value, unsigned from) {
  exchanged[threadIdx.x] = value;
  __syncthreads();
  const Number found = static_cast<Number>(exchanged[from]);
  __syncthreads();
  return found;
}

template <typename Number>
static Number __shfl_down_sync(unsigned, Number value, unsigned distance) {
  return from_thread(value, threadIdx.x % 32 + distance < 32 ? threadIdx.x + distance : threadIdx.x);
}

template <typename Number>
static Number __shfl_up_sync(unsigned, Number value, unsigned distance) {
  return from_thread(value, threadIdx.x % 32 >= distance ? threadIdx.x - distance : threadIdx.x);
}

// Loads of 16 bytes fault on a device where they are not aligned, and here do so silently otherwise.
template <typename Vector>
static Vector __ldcs(const Vector *at) {
  if (reinterpret_cast<std::uintptr_t>(at) % sizeof *at) __builtin_trap();
  return *at;
}

template <typename Number>
static void atomicAdd(Number *at, Number value) {
  *at += value;
}

[[maybe_unused]] static int __popc(unsigned bits) { return __builtin_popcount(bits); }
[[maybe_unused]] static int __ffs(int bits) { return __builtin_ffs(bits); }

static void (*body)();

static void run_thread(int number) {
  threadIdx.x = static_cast<unsigned>(number);
  body();
  has_ended[number] = true;
}

static void run_block(int threads, char *stacks) {
  for (int i = 0; i < threads; i++) {
    has_ended[i] = false;
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = stacks + i * STACK_BYTES;
    contexts[i].uc_stack.ss_size = STACK_BYTES;
    contexts[i].uc_link = &turns;
    makecontext(&contexts[i], reinterpret_cast<void (*)()>(run_thread), 1, i);
  }
  for (bool going = true; going;) {
    going = false;
    for (int i = 0; i < threads; i++) {
      if (has_ended[i]) continue;
      swapcontext(&turns, &contexts[i]);
      going |= !has_ended[i];
    }
  }
}

// Runs some blocks of a kernel, which finds its arguments itself.
static void run_grid(unsigned blocks, int threads, void (*kernel)(), unsigned first = 0) {
  static std::vector<char> stacks(static_cast<std::size_t>(MOST_THREADS) * STACK_BYTES);
  body = kernel;
  for (blockIdx.x = first; blockIdx.x < first + blocks; blockIdx.x++) run_block(threads, stacks.data());
}
