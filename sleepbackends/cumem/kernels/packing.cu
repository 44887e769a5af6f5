/* Packing of device memory; see packing.h. Compiled by NVRTC.
 *
 * Packing takes three launches: `tally` leaves in the table how many escapes each tile has, `prefix` makes of
 * it how many there are before each and writes the header, `pack` writes all else. A block is a tile of 512 octets,
 * and a thread has one octet. What `pack` reads may be other bytes than `tally` read: no tile writes
 * escapes to the place of another.
 */
#define PACKING_INLINE static __device__ __forceinline__
#include "carry.h"
#include "packing.h"

#define THREADS PACKING_OCTETS
#define WARPS (THREADS / 32u)
#define COPIES 8u /* of a histogram: threads that meet the same number seldom wait for each other */
#define LOADS 4u  /* under way at once in each thread */
#define PAIRS (PACKING_PIECE_BYTES / 4 / THREADS)

/* What is surveyed or counted: its size in 40 bits, and above those its layout but for the version. */
struct Span {
  PackingSize address, what;
};

static __device__ __forceinline__ PackingSize size_of(Span span) { return span.what & ((1ull << 40) - 1); }

/* ------------------------------------------------------------------------------- in a block */

static __device__ __forceinline__ unsigned sum_of_warp(unsigned sum) {
#pragma unroll
  for (unsigned distance = 16; distance; distance /= 2) sum += __shfl_down_sync(0xffffffffu, sum, distance);
  return sum;
}

/* The sum over all threads before this one; `sum` becomes that over all. Every thread of the block takes part. */
static __device__ __forceinline__ unsigned sum_before(unsigned number, unsigned *sum) {
  __shared__ unsigned of_warps[WARPS];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned upto = number, before = 0;
#pragma unroll
  for (unsigned distance = 1; distance < 32; distance *= 2) {
    const unsigned other = __shfl_up_sync(0xffffffffu, upto, distance);
    if (lane >= distance) upto += other;
  }
  if (lane == 31) of_warps[warp] = upto;
  __syncthreads();
  *sum = 0;
#pragma unroll
  for (unsigned i = 0; i < WARPS; i++) {
    if (i == warp) before = *sum;
    *sum += of_warps[i];
  }
  __syncthreads(); /* before the next call writes there */
  return before + upto - number;
}

/* ---------------------------------------------------------------------------------- elements */

/* Zeros stand for elements that are not there. */
static __device__ __forceinline__ void load(const unsigned char *data, PackingSize octet, PackingWord present,
                                            PackingWord element_bytes, PackingOctet memory[4]) {
  const unsigned char *from = data + 8 * octet * element_bytes;
  memory[0] = memory[1] = memory[2] = memory[3] = 0;
  if (present == 8) {
#pragma unroll
    for (unsigned i = 0; i < element_bytes / 2; i++) {
      const ulonglong2 pair = __ldcs((const ulonglong2 *)from + i);
      memory[2 * i] = pair.x, memory[2 * i + 1] = pair.y;
    }
    return;
  }
#pragma unroll
  for (unsigned i = 0; i < 8 * element_bytes; i++)
    if (i < present * element_bytes) memory[i / 8] |= (PackingOctet)from[i] << 8 * (i % 8);
}

static __device__ __forceinline__ void store(unsigned char *data, PackingSize octet, PackingWord present,
                                             PackingWord element_bytes, const PackingOctet memory[4]) {
  unsigned char *to = data + 8 * octet * element_bytes;
  if (present == 8) {
#pragma unroll
    for (unsigned i = 0; i < element_bytes / 2; i++) {
      const ulonglong2 pair = {memory[2 * i], memory[2 * i + 1]};
      ((ulonglong2 *)to)[i] = pair;
    }
    return;
  }
#pragma unroll
  for (unsigned i = 0; i < 8 * element_bytes; i++)
    if (i < present * element_bytes) to[i] = (unsigned char)(memory[i / 8] >> 8 * (i % 8));
}

static __device__ __forceinline__ unsigned *table_of(unsigned char *packed) {
  return (unsigned *)(packed + sizeof(PackingHeader));
}

/* --------------------------------------------------------------------------------- packing */

static __device__ __forceinline__ void tally_tile(const unsigned char *data, const PackingPlan &plan,
                                                  PackingWord element_bytes, unsigned char *packed) {
  const PackingSize octet = (PackingSize)blockIdx.x * THREADS + threadIdx.x;
  const PackingWord present = packing_present(&plan, octet);
  PackingOctet memory[4], tops, rest[3];
  PackingWord escaped;
  unsigned sum;
  load(data, octet, present, element_bytes, memory);
  packing_split(memory, element_bytes, &tops, rest);
  packing_codes(tops, &plan, present, &escaped);
  sum_before(__popc(escaped), &sum);
  if (threadIdx.x == 0) table_of(packed)[blockIdx.x] = sum;
}

/* A block for each tile. */
extern "C" __global__ void __launch_bounds__(THREADS)
    tally(const unsigned char *data, PackingSize size_bytes, unsigned layout, unsigned char *packed) {
  PackingPlan plan;
  if (!packing_plan(layout, size_bytes, &plan) || blockIdx.x >= plan.tiles) return;
  if (plan.element_bytes == 2) tally_tile(data, plan, 2, packed);
  else tally_tile(data, plan, 4, packed);
}

/* One block. */
extern "C" __global__ void __launch_bounds__(THREADS)
    prefix(const unsigned char *data, PackingSize size_bytes, unsigned layout, unsigned char *packed,
           PackingSize capacity) {
  PackingPlan plan;
  unsigned *table = table_of(packed), escapes = 0, sum;
  if (!packing_plan(layout, size_bytes, &plan) || capacity < plan.escapes_at) return;
  for (PackingSize first = 0; first < plan.tiles; first += THREADS) {
    const PackingSize tile = first + threadIdx.x;
    const unsigned before = sum_before(tile < plan.tiles ? table[tile] : 0, &sum);
    if (tile < plan.tiles) table[tile] = escapes + before;
    escapes += sum;
  }
  if (threadIdx.x < plan.entries - plan.tiles) table[plan.tiles + threadIdx.x] = escapes;
  const PackingSize end = packing_bytes(&plan, escapes), at = plan.escapes_at + escapes + threadIdx.x;
  if (at < end && at < capacity) packed[at] = 0;
  if (threadIdx.x) return;
  PackingHeader header = {end <= capacity ? PACKING_MAGIC : PACKING_OVERFLOWED, layout, size_bytes, escapes, 0, {0, 0}};
  for (PackingSize i = plan.elements * plan.element_bytes; i < size_bytes; i++)
    header.tail |= (PackingWord)data[i] << 8 * (i % plan.element_bytes);
  *(PackingHeader *)packed = header;
}

static __device__ __forceinline__ void pack_tile(const unsigned char *data, const PackingPlan &plan,
                                                 PackingWord element_bytes, unsigned char *packed, PackingSize room) {
  const PackingSize octet = (PackingSize)blockIdx.x * THREADS + threadIdx.x;
  const PackingWord present = packing_present(&plan, octet);
  const unsigned *table = table_of(packed);
  PackingOctet memory[4], tops, rest[3];
  PackingWord escaped;
  unsigned sum;
  load(data, octet, present, element_bytes, memory);
  packing_split(memory, element_bytes, &tops, rest);
  const PackingOctet codes = packing_transpose(packing_codes(tops, &plan, present, &escaped));
  PackingSize escape = (PackingSize)table[blockIdx.x] + sum_before(__popc(escaped), &sum);
  if (octet >= plan.octets) return;
  for (PackingWord plane = 0; plane < plan.planes; plane++)
    packed[plan.planes_at + plane * plan.octets + octet] = (unsigned char)(codes >> 8 * plane);
#pragma unroll
  for (PackingWord byte = 0; byte < element_bytes - 1; byte++)
    *(PackingOctet *)(packed + plan.rest_at + 8 * (byte * plan.octets + octet)) = rest[byte];
  const PackingSize end = table[blockIdx.x + 1] < room ? table[blockIdx.x + 1] : room;
  for (; escaped && escape < end; escaped &= escaped - 1, escape++)
    packed[plan.escapes_at + escape] = (unsigned char)(tops >> 8 * (__ffs((int)escaped) - 1));
}

/* A block for each tile. */
extern "C" __global__ void __launch_bounds__(THREADS)
    pack(const unsigned char *data, PackingSize size_bytes, unsigned layout, unsigned char *packed,
         PackingSize capacity) {
  PackingPlan plan;
  if (!packing_plan(layout, size_bytes, &plan) || capacity < plan.escapes_at || blockIdx.x >= plan.tiles) return;
  if (plan.element_bytes == 2) pack_tile(data, plan, 2, packed, capacity - plan.escapes_at);
  else pack_tile(data, plan, 4, packed, capacity - plan.escapes_at);
}

/* -------------------------------------------------------------------------------- unpacking */

static __device__ __forceinline__ void unpack_tile(const unsigned char *packed, const PackingPlan &plan,
                                                   PackingWord escapes, PackingWord element_bytes,
                                                   unsigned char *data) {
  const PackingSize octet = (PackingSize)blockIdx.x * THREADS + threadIdx.x;
  const PackingWord present = packing_present(&plan, octet);
  const bool is_there = octet < plan.octets;
  PackingOctet codes = 0, memory[4], rest[3] = {0, 0, 0};
  PackingWord escaped;
  unsigned sum;
  if (is_there) {
    for (PackingWord plane = 0; plane < plan.planes; plane++)
      codes |= (PackingOctet)packed[plan.planes_at + plane * plan.octets + octet] << 8 * plane;
#pragma unroll
    for (PackingWord byte = 0; byte < element_bytes - 1; byte++)
      rest[byte] = *(const PackingOctet *)(packed + plan.rest_at + 8 * (byte * plan.octets + octet));
  }
  PackingOctet tops = packing_tops(packing_transpose(codes), &plan, present, &escaped);
  unsigned escape = sum_before(__popc(escaped), &sum);
  escape += ((const unsigned *)(packed + sizeof(PackingHeader)))[blockIdx.x];
  for (; escaped; escaped &= escaped - 1, escape++)
    tops = packing_with(tops, (unsigned)__ffs((int)escaped) - 1,
                        escape < escapes ? packed[plan.escapes_at + escape] : 0);
  packing_join(tops, rest, element_bytes, memory);
  store(data, octet, present, element_bytes, memory);
}

/* A block for each tile that there would be of elements of 2 bytes, and one for nothing. */
extern "C" __global__ void __launch_bounds__(THREADS)
    unpack(const unsigned char *packed, PackingSize packed_bytes, unsigned char *data, PackingSize size_bytes) {
  __shared__ PackingHeader header;
  PackingPlan plan;
  if (threadIdx.x == 0) header = *(const PackingHeader *)packed;
  __syncthreads();
  if (!packing_open(&header, packed_bytes, &plan) || header.size_bytes != size_bytes) return;
  const PackingSize at = plan.elements * plan.element_bytes + threadIdx.x;
  if (blockIdx.x == 0 && at < size_bytes) data[at] = (unsigned char)(header.tail >> 8 * threadIdx.x);
  if (blockIdx.x >= plan.tiles) return;
  if (plan.element_bytes == 2) unpack_tile(packed, plan, header.escapes, 2, data);
  else unpack_tile(packed, plan, header.escapes, 4, data);
}

/* --------------------------------------------------------------------------------- choosing */

/* A block for each span: the layout that is best for what is sampled, and the escapes to expect. */
extern "C" __global__ void __launch_bounds__(THREADS) survey(const Span *spans, unsigned count, ulonglong2 *found) {
  __shared__ unsigned counters[512 * COPIES], sums[512];
  __shared__ PackingSize ranks[256];
  if (blockIdx.x >= count) return;
  const Span span = spans[blockIdx.x];
  const PackingSize size_bytes = size_of(span);
  PackingWord stride, pairs;
  PackingSize all = 0, escapes = 0;
  for (unsigned i = threadIdx.x; i < 512 * COPIES; i += THREADS) counters[i] = 0;
  __syncthreads();
  unsigned *even = counters + threadIdx.x % COPIES, *odd = even + 256 * COPIES;
  const PackingWord samples = packing_samples(size_bytes, &stride);
  for (PackingWord number = 0; number < samples; number++) {
    const PackingSize at = packing_sample_at(size_bytes, stride, number, &pairs);
    const unsigned *piece = (const unsigned *)(span.address + at);
    unsigned loaded[PAIRS];
    all += pairs;
#pragma unroll
    for (unsigned i = 0; i < PAIRS; i++)
      if (i * THREADS + threadIdx.x < pairs) loaded[i] = __ldcs(piece + i * THREADS + threadIdx.x);
#pragma unroll
    for (unsigned i = 0; i < PAIRS; i++) {
      if (i * THREADS + threadIdx.x >= pairs) continue;
      atomicAdd(even + packing_even(loaded[i]) * COPIES, 1u);
      atomicAdd(odd + packing_odd(loaded[i]) * COPIES, 1u);
    }
  }
  __syncthreads();
  sums[threadIdx.x] = 0;
  for (unsigned i = 0; i < COPIES; i++) sums[threadIdx.x] += counters[threadIdx.x * COPIES + i];
  __syncthreads();
  if (threadIdx.x < 256) ranks[threadIdx.x] = packing_best(sums, sums + 256, all, threadIdx.x);
  __syncthreads();
  if (threadIdx.x) return;
  PackingSize best = ranks[0];
  for (unsigned i = 1; i < 256; i++) best = ranks[i] < best ? ranks[i] : best;
  const PackingWord layout = packing_choice(best, all, size_bytes, &escapes);
  const ulonglong2 row = {layout, escapes};
  found[blockIdx.x] = row;
}

/* Escapes among the elements in 4 bytes. */
static __device__ __forceinline__ unsigned escapes_in(unsigned pair, const PackingPlan &plan) {
  const unsigned odd = (unsigned)packing_escapes(packing_odd(pair), &plan);
  return plan.element_bytes == 2 ? odd + (unsigned)packing_escapes(packing_even(pair), &plan) : odd;
}

static __device__ __forceinline__ unsigned escapes_in_four(uint4 four, const PackingPlan &plan) {
  return escapes_in(four.x, plan) + escapes_in(four.y, plan) + escapes_in(four.z, plan) + escapes_in(four.w, plan);
}

/* Blocks of THREADS threads, `blocks_per_span` of them one after the other for each span. What they find is added to
 * found[2 * span], which begins as zero. */
extern "C" __global__ void __launch_bounds__(THREADS)
    count(const Span *spans, unsigned count, unsigned blocks_per_span, unsigned long long *found) {
  const unsigned number = blockIdx.x / blocks_per_span, part = blockIdx.x % blocks_per_span;
  PackingPlan plan;
  if (number >= count) return;
  const Span span = spans[number];
  const PackingWord layout = PACKING_VERSION | (PackingWord)(span.what >> 40) << 8;
  if (!packing_plan(layout, size_of(span), &plan)) return;
  const PackingSize bytes = plan.elements * plan.element_bytes, fours = bytes / 16;
  const PackingSize step = (PackingSize)blocks_per_span * THREADS * LOADS;
  const uint4 *from = (const uint4 *)span.address;
  PackingSize at = (PackingSize)part * THREADS * LOADS + threadIdx.x;
  unsigned escapes = 0;
  for (; at + (LOADS - 1) * THREADS < fours; at += step) {
    uint4 loaded[LOADS];
#pragma unroll
    for (unsigned i = 0; i < LOADS; i++) loaded[i] = __ldcs(from + at + i * THREADS);
#pragma unroll
    for (unsigned i = 0; i < LOADS; i++) escapes += escapes_in_four(loaded[i], plan);
  }
  for (; at < fours; at += THREADS) escapes += escapes_in_four(__ldcs(from + at), plan);
  /* Up to 7 elements are not in whole 16 bytes. */
  const PackingSize last = 16 * fours + threadIdx.x * plan.element_bytes;
  if (part == 0 && last < bytes) {
    const unsigned char *element = (const unsigned char *)span.address + last;
    const unsigned top = plan.element_bytes == 2 ? packing_even(*(const unsigned short *)element)
                                                 : packing_odd(*(const unsigned *)element);
    escapes += (unsigned)packing_escapes(top, &plan);
  }
  escapes = sum_of_warp(escapes);
  __shared__ unsigned of_warps[WARPS];
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = escapes;
  __syncthreads();
  if (threadIdx.x) return;
  unsigned long long sum = 0;
  for (unsigned warp = 0; warp < WARPS; warp++) sum += of_warps[warp];
  if (sum) atomicAdd(found + 2 * number, sum);
}
