// The CUDA kernels of packing as functions of the host.
#include "kernel_on_host.h"

#include "packing.cu"

static struct {
  const Span *spans;
  unsigned count, blocks_per_span;
  void *found;
} rows;

static struct {
  unsigned char *data, *packed;
  PackingSize size_bytes, room_bytes;
  unsigned layout;
} memory;

static void run_survey() { survey(rows.spans, rows.count, static_cast<ulonglong2 *>(rows.found)); }

static void run_count() {
  count(rows.spans, rows.count, rows.blocks_per_span, static_cast<unsigned long long *>(rows.found));
}

static void run_tally() { tally(memory.data, memory.size_bytes, memory.layout, memory.packed); }

static void run_prefix() {
  prefix(memory.data, memory.size_bytes, memory.layout, memory.packed, memory.room_bytes);
}

static void run_pack() { pack(memory.data, memory.size_bytes, memory.layout, memory.packed, memory.room_bytes); }

static void run_unpack() { unpack(memory.packed, memory.room_bytes, memory.data, memory.size_bytes); }

extern "C" {

void survey_on_host(const Span *spans, unsigned count, void *found) {
  rows = {spans, count, 0, found};
  run_grid(count, THREADS, run_survey);
}

void count_on_host(const Span *spans, unsigned count, unsigned blocks_per_span, void *found) {
  rows = {spans, count, blocks_per_span, found};
  run_grid(count * blocks_per_span, THREADS, run_count);
}

void tally_on_host(unsigned char *data, PackingSize size_bytes, unsigned layout, unsigned char *packed, unsigned first,
                   unsigned blocks) {
  memory = {data, packed, size_bytes, 0, layout};
  run_grid(blocks, THREADS, run_tally, first);
}

void prefix_on_host(unsigned char *data, PackingSize size_bytes, unsigned layout, unsigned char *packed,
                    PackingSize capacity) {
  memory = {data, packed, size_bytes, capacity, layout};
  run_grid(1, THREADS, run_prefix);
}

void pack_on_host(unsigned char *data, PackingSize size_bytes, unsigned layout, unsigned char *packed,
                  PackingSize capacity, unsigned first, unsigned blocks) {
  memory = {data, packed, size_bytes, capacity, layout};
  run_grid(blocks, THREADS, run_pack, first);
}

void unpack_on_host(unsigned char *packed, PackingSize packed_bytes, unsigned char *data, PackingSize size_bytes,
                    unsigned first, unsigned blocks) {
  memory = {data, packed, size_bytes, packed_bytes, 0};
  run_grid(blocks, THREADS, run_unpack, first);
}
}
