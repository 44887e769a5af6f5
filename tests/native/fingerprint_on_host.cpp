// The CUDA kernel of the fingerprint as a function of the host.
#include "kernel_on_host.h"

#include "fingerprint.cu"

static struct {
  const Span *spans;
  unsigned count, blocks_per_span;
  unsigned long long *sums;
} arguments;

static void run() { fingerprint(arguments.spans, arguments.count, arguments.blocks_per_span, arguments.sums); }

extern "C" void run_fingerprint(const Span *spans, unsigned count, unsigned blocks_per_span, unsigned blocks,
                                unsigned long long *sums) {
  arguments = {spans, count, blocks_per_span, sums};
  run_grid(blocks, THREADS, run);
}
