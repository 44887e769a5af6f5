/* The two sums of the content fingerprint over many spans of device memory; see fingerprint.h.
 *
 * Blocks of THREADS threads, `blocks_per_span` of them one after the other for each span. What they
 * add up goes to sums[2 * span] and sums[2 * span + 1], which begin as zeros. Compiled by NVRTC.
 */
#define FINGERPRINT_INLINE static __device__ __forceinline__
#include "carry.h"
#include "fingerprint.h"

#define THREADS 256u
#define LOADS 4u /* under way at once in each thread */
#define TILE (THREADS * LOADS)
#define WARPS (THREADS / 32u)

struct Span {
  unsigned long long address, size_bytes;
};

/* Pairs of words at multiples of 16 bytes: 16 KiB at a time for each block, 4 KiB side by side. */
static __device__ __forceinline__ void add_pairs(const ulonglong2 *pairs, unsigned long long count, unsigned part,
                                                 unsigned parts, FingerprintWord *s1, FingerprintWord *s2) {
  const unsigned long long step = (unsigned long long)parts * TILE;
  unsigned long long at = (unsigned long long)part * TILE + threadIdx.x;
  FingerprintWord place = fingerprint_place(2 * at);
  for (; at + (LOADS - 1) * THREADS < count; at += step, place += 2 * step * FINGERPRINT_PLACE) {
    ulonglong2 loaded[LOADS];
#pragma unroll
    for (unsigned i = 0; i < LOADS; i++) loaded[i] = __ldcs(pairs + at + i * THREADS);
#pragma unroll
    for (unsigned i = 0; i < LOADS; i++) {
      fingerprint_add(loaded[i].x, place + 2 * i * THREADS * FINGERPRINT_PLACE, s1, s2);
      fingerprint_add(loaded[i].y, place + (2 * i * THREADS + 1) * FINGERPRINT_PLACE, s1, s2);
    }
  }
  for (; at < count; at += THREADS, place += 2 * THREADS * FINGERPRINT_PLACE) {
    const ulonglong2 pair = __ldcs(pairs + at);
    fingerprint_add(pair.x, place, s1, s2);
    fingerprint_add(pair.y, place + FINGERPRINT_PLACE, s1, s2);
  }
}

/* Word `number`, at any address, with zeros where the span has ended. */
static __device__ FingerprintWord gather(const unsigned char *bytes, unsigned long long size_bytes,
                                         unsigned long long number) {
  const unsigned long long first = 8 * number, left = size_bytes - first;
  FingerprintWord word = 0;
  for (unsigned i = 0; i < 8 && i < left; i++) word |= (FingerprintWord)bytes[first + i] << 8 * i;
  return word;
}

static __device__ __forceinline__ FingerprintWord sum_of_warp(FingerprintWord sum) {
#pragma unroll
  for (unsigned distance = 16; distance; distance /= 2) sum += __shfl_down_sync(0xffffffffu, sum, distance);
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    fingerprint(const Span *spans, unsigned count, unsigned blocks_per_span, unsigned long long *sums) {
  __shared__ FingerprintWord of_warps[2][WARPS];
  const unsigned number = blockIdx.x / blocks_per_span, part = blockIdx.x % blocks_per_span;
  if (number >= count) return;
  const Span span = spans[number];
  const unsigned char *bytes = (const unsigned char *)span.address;
  const unsigned long long words = span.size_bytes / 8 + (span.size_bytes % 8 != 0);
  unsigned long long at = 0; /* the first word that is not one of a pair */
  FingerprintWord s1 = 0, s2 = 0;
  if (span.address % 16 == 0) {
    const unsigned long long pairs = span.size_bytes / 16;
    add_pairs((const ulonglong2 *)bytes, pairs, part, blocks_per_span, &s1, &s2);
    at = 2 * pairs;
  }
  for (at += (unsigned long long)part * THREADS + threadIdx.x; at < words;
       at += (unsigned long long)blocks_per_span * THREADS)
    fingerprint_add(gather(bytes, span.size_bytes, at), fingerprint_place(at), &s1, &s2);

  s1 = sum_of_warp(s1);
  s2 = sum_of_warp(s2);
  if (threadIdx.x % 32 == 0) {
    of_warps[0][threadIdx.x / 32] = s1;
    of_warps[1][threadIdx.x / 32] = s2;
  }
  __syncthreads();
  if (threadIdx.x < 2) {
    FingerprintWord sum = 0;
    for (unsigned warp = 0; warp < WARPS; warp++) sum += of_warps[threadIdx.x][warp];
    atomicAdd(sums + 2 * number + threadIdx.x, sum);
  }
}
