/* Rows of 16 bytes from one table to another, either of them in pinned host memory: where the copies of a transition
 * fill the link's queue, a copy of a few bytes would wait for all of them. One thread a row. */
#define CARRY_THREADS 256u

extern "C" __global__ void __launch_bounds__(CARRY_THREADS)
    carry(const ulonglong2 *from, unsigned count, ulonglong2 *to) {
  const unsigned row = blockIdx.x * CARRY_THREADS + threadIdx.x;
  if (row < count) to[row] = from[row];
}
