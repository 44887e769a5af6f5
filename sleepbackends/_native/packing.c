/* Packing in host memory; see packing.h. Addresses may be any. */
#include "packing.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "packed bytes are little-endian"
#endif

#ifndef EXPORT
#define EXPORT __attribute__((visibility("default")))
#endif
#define EACH static inline __attribute__((always_inline))

/* --------------------------------------------------------------------------------- elements */

/* Zeros stand for elements that are not there. */
EACH void load(const unsigned char *data, PackingSize octet, PackingWord present, PackingWord element_bytes,
               PackingOctet memory[4]) {
  memset(memory, 0, 4 * sizeof *memory);
  memcpy(memory, data + 8 * octet * element_bytes, (present == 8 ? 8 : present) * element_bytes);
}

/* ---------------------------------------------------------------------------------- packing */

EACH PackingSize pack_all(const unsigned char *data, const PackingPlan *plan, PackingWord element_bytes,
                          unsigned char *out, PackingSize room) {
  PackingSize escapes = 0;
  for (PackingSize octet = 0; octet < plan->octets; octet++) {
    const PackingWord present = packing_present(plan, octet), before = (PackingWord)escapes;
    PackingWord escaped;
    PackingOctet memory[4], tops, rest[3];
    load(data, octet, present, element_bytes, memory);
    packing_split(memory, element_bytes, &tops, rest);
    const PackingOctet codes = packing_transpose(packing_codes(tops, plan, present, &escaped));
    if (octet % PACKING_OCTETS == 0)
      memcpy(out + sizeof(PackingHeader) + octet / PACKING_OCTETS * sizeof before, &before, sizeof before);
    for (PackingWord plane = 0; plane < plan->planes; plane++)
      out[plan->planes_at + plane * plan->octets + octet] = (unsigned char)(codes >> 8 * plane);
    for (PackingWord byte = 0; byte < element_bytes - 1; byte++)
      memcpy(out + plan->rest_at + 8 * (byte * plan->octets + octet), &rest[byte], sizeof rest[byte]);
    for (unsigned i = 0; escaped >> i; i++) {
      if (!(escaped >> i & 1)) continue;
      if (escapes < room) out[plan->escapes_at + escapes] = (unsigned char)(tops >> 8 * i);
      escapes++;
    }
  }
  return escapes;
}

/* Returns how many bytes it takes, 0 if that cannot be. What does not fit into `capacity` is left out, and the header
 * says so; without room for anything but escapes nothing is written. */
EXPORT uint64_t sb_pack(const void *data, uint64_t size, uint32_t layout, void *packed, uint64_t capacity) {
  PackingHeader header = {0};
  PackingPlan plan;
  unsigned char *out = packed;
  if (!packing_plan(layout, size, &plan) || capacity < plan.escapes_at) return 0;
  const PackingSize room = capacity - plan.escapes_at;
  const PackingSize escapes = plan.element_bytes == 2 ? pack_all(data, &plan, 2, out, room)
                                                      : pack_all(data, &plan, 4, out, room);
  header.magic = packing_bytes(&plan, escapes) <= capacity ? PACKING_MAGIC : PACKING_OVERFLOWED;
  header.layout = layout;
  header.size_bytes = size;
  header.escapes = (PackingWord)escapes;
  const PackingSize whole = plan.elements * plan.element_bytes, end = packing_bytes(&plan, escapes);
  if (size > whole) memcpy(&header.tail, (const unsigned char *)data + whole, size - whole);
  for (PackingSize entry = plan.tiles; entry < plan.entries; entry++)
    memcpy(out + sizeof header + entry * sizeof header.escapes, &header.escapes, sizeof header.escapes);
  for (PackingSize at = plan.escapes_at + escapes; at < end && at < capacity; at++) out[at] = 0;
  memcpy(out, &header, sizeof header);
  return end;
}

EACH PackingSize count_all(const unsigned char *data, const PackingPlan *plan, PackingWord element_bytes) {
  PackingSize escapes = 0;
  for (PackingSize i = 0; i < plan->elements; i++) {
    PackingWord element = 0;
    memcpy(&element, data + i * element_bytes, element_bytes);
    escapes += (PackingSize)packing_escapes(element_bytes == 2 ? packing_even(element) : packing_odd(element), plan);
  }
  return escapes;
}

/* How many elements escape. */
EXPORT uint64_t sb_pack_count(const void *data, uint64_t size, uint32_t layout) {
  PackingPlan plan;
  if (!packing_plan(layout, size, &plan)) return 0;
  return plan.element_bytes == 2 ? count_all(data, &plan, 2) : count_all(data, &plan, 4);
}

/* The layout that is best for what is sampled, and the escapes to expect; 0 if none is worth it. */
EXPORT uint32_t sb_pack_survey(const void *data, uint64_t size, uint64_t *escapes) {
  PackingWord even[256] = {0}, odd[256] = {0}, stride, pairs, pair;
  PackingSize all = 0, best = ~0ull, expected = 0;
  if (size > PACKING_MOST_BYTES) return 0;
  const PackingWord samples = packing_samples(size, &stride);
  for (PackingWord number = 0; number < samples; number++) {
    const unsigned char *piece = (const unsigned char *)data + packing_sample_at(size, stride, number, &pairs);
    for (PackingWord i = 0; i < pairs; i++) {
      memcpy(&pair, piece + i * sizeof pair, sizeof pair);
      even[packing_even(pair)]++;
      odd[packing_odd(pair)]++;
    }
    all += pairs;
  }
  for (PackingWord base = 0; base < 256; base++) {
    const PackingSize rank = packing_best(even, odd, all, base);
    best = rank < best ? rank : best;
  }
  const PackingWord layout = packing_choice(best, all, size, &expected);
  *escapes = expected;
  return layout;
}

/* -------------------------------------------------------------------------------- unpacking */

/* Bytes `start` to `end` of the whole elements. Each tile finds its own escapes: what is damaged stays near by. */
EACH void unpack_some(const unsigned char *packed, const PackingHeader *header, const PackingPlan *plan,
                      PackingWord element_bytes, PackingSize start, PackingSize end, unsigned char *out) {
  const PackingSize octet_bytes = 8 * element_bytes;
  PackingSize octet = start / octet_bytes / PACKING_OCTETS * PACKING_OCTETS;
  PackingWord escape = 0;
  for (; octet * octet_bytes < end; octet++) {
    const PackingSize first = octet * octet_bytes, last = first + octet_bytes;
    PackingOctet codes = 0, memory[4], rest[3] = {0};
    PackingWord escaped;
    if (octet % PACKING_OCTETS == 0)
      memcpy(&escape, packed + sizeof *header + octet / PACKING_OCTETS * sizeof escape, sizeof escape);
    for (PackingWord plane = 0; plane < plan->planes; plane++)
      codes |= (PackingOctet)packed[plan->planes_at + plane * plan->octets + octet] << 8 * plane;
    PackingOctet tops = packing_tops(packing_transpose(codes), plan, packing_present(plan, octet), &escaped);
    for (unsigned i = 0; escaped >> i; i++) {
      if (!(escaped >> i & 1)) continue;
      tops = packing_with(tops, i, escape < header->escapes ? packed[plan->escapes_at + escape] : 0);
      escape++;
    }
    if (last <= start) continue;
    for (PackingWord byte = 0; byte < element_bytes - 1; byte++)
      memcpy(&rest[byte], packed + plan->rest_at + 8 * (byte * plan->octets + octet), sizeof rest[byte]);
    packing_join(tops, rest, element_bytes, memory);
    if (first >= start && last <= end) memcpy(out + (first - start), memory, (size_t)octet_bytes);
    else
      for (PackingSize at = first; at < last; at++)
        if (at >= start && at < end) out[at - start] = ((unsigned char *)memory)[at - first];
  }
}

/* Unpack `size` bytes from `offset` of what was packed; 0, and nothing is written, if that cannot be. */
EXPORT int sb_unpack(const void *packed, uint64_t packed_size, uint64_t offset, void *out, uint64_t size) {
  PackingHeader header;
  PackingPlan plan;
  if (packed_size < sizeof header) return 0;
  memcpy(&header, packed, sizeof header);
  if (!packing_open(&header, packed_size, &plan)) return 0;
  if (offset > header.size_bytes || size > header.size_bytes - offset) return 0;
  const PackingSize whole = plan.elements * plan.element_bytes, end = offset + size;
  const PackingSize end_of_elements = end < whole ? end : whole;
  if (offset < end_of_elements) {
    if (plan.element_bytes == 2) unpack_some(packed, &header, &plan, 2, offset, end_of_elements, out);
    else unpack_some(packed, &header, &plan, 4, offset, end_of_elements, out);
  }
  for (PackingSize at = offset > whole ? offset : whole; at < end; at++)
    ((unsigned char *)out)[at - offset] = (unsigned char)(header.tail >> 8 * (at - whole));
  return 1;
}
