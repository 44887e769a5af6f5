/* Packing: how elements of 2 or 4 bytes are coded in fewer bits, and where everything lies.
 *
 * The host library, the CUDA kernels and the simulated driver of the tests all include this file,
 * so that they cannot disagree. It includes nothing: the compiler of the kernels has no headers.
 * What the format is good for is said in sleepbackends/vmm/packing/layout.py.
 *
 *   header | escapes before each tile | bit planes of the codes | bytes that are not coded | escapes
 */
#ifndef SLEEPBACKENDS_PACKING_H
#define SLEEPBACKENDS_PACKING_H

#ifndef PACKING_INLINE
#define PACKING_INLINE static inline
#endif

#define PACKING_MAGIC 0x4b504253u      /* "SBPK" */
#define PACKING_OVERFLOWED 0x4f504253u /* "SBPO": there was no room for all escapes */
#define PACKING_VERSION 1u
#define PACKING_OCTETS 512u /* in a tile, of 8 elements each */
#define PACKING_MOST_BYTES (1ull << 32)
#define PACKING_MOST_PLANES 7u

typedef unsigned PackingWord;            /* 32 bits wherever this compiles */
typedef unsigned long long PackingSize;  /* 64 bits wherever this compiles */
typedef unsigned long long PackingOctet; /* a byte of each of 8 elements, the first one lowest */

typedef struct {
  PackingWord magic, layout;
  PackingSize size_bytes;   /* of what was packed */
  PackingWord escapes;      /* as many as there are, also where there was no room for all */
  PackingWord tail;         /* the bytes behind the last whole element, the first one lowest */
  PackingWord unused[2];
} PackingHeader;

typedef struct {
  PackingWord element_bytes, planes, base;
  PackingWord escape;             /* the code of a top byte outside of the window */
  PackingSize elements, octets;   /* octets: with empty ones that make all that follows whole 16 bytes */
  PackingSize tiles, entries;     /* entries of the table: one more than tiles, and then up to 16 bytes */
  PackingSize planes_at, rest_at; /* plane p at planes_at + p * octets, byte b at rest_at + b * 8 * octets */
  PackingSize escapes_at;
} PackingPlan;

/* -------------------------------------------------------------------------------- places */

PACKING_INLINE PackingWord packing_layout(PackingWord element_bytes, PackingWord planes, PackingWord base) {
  return PACKING_VERSION | element_bytes << 8 | planes << 16 | base << 24;
}

/* Where everything is in so many bytes packed by a layout; 0 if there is no such layout. */
PACKING_INLINE int packing_plan(PackingWord layout, PackingSize size_bytes, PackingPlan *plan) {
  const PackingWord element_bytes = layout >> 8 & 255, planes = layout >> 16 & 255;
  if ((layout & 255) != PACKING_VERSION || (element_bytes != 2 && element_bytes != 4)) return 0;
  if (planes < 1 || planes > PACKING_MOST_PLANES || size_bytes > PACKING_MOST_BYTES) return 0;
  plan->element_bytes = element_bytes;
  plan->planes = planes;
  plan->base = layout >> 24;
  plan->escape = (1u << planes) - 1;
  plan->elements = size_bytes / element_bytes;
  plan->octets = (plan->elements + 127) / 128 * 16;
  plan->tiles = (plan->octets + PACKING_OCTETS - 1) / PACKING_OCTETS;
  plan->entries = (plan->tiles + 1 + 3) / 4 * 4;
  plan->planes_at = sizeof(PackingHeader) + plan->entries * sizeof(PackingWord);
  plan->rest_at = plan->planes_at + plan->planes * plan->octets;
  plan->escapes_at = plan->rest_at + (plan->element_bytes - 1) * 8 * plan->octets;
  return 1;
}

PACKING_INLINE PackingSize packing_bytes(const PackingPlan *plan, PackingSize escapes) {
  return (plan->escapes_at + escapes + 15) / 16 * 16;
}

/* How many of the 8 elements of an octet there are. */
PACKING_INLINE PackingWord packing_present(const PackingPlan *plan, PackingSize octet) {
  const PackingSize first = 8 * octet;
  if (first >= plan->elements) return 0;
  return plan->elements - first < 8 ? (PackingWord)(plan->elements - first) : 8u;
}

/* Whether so many packed bytes can be unpacked, by what their header says. */
PACKING_INLINE int packing_open(const PackingHeader *header, PackingSize packed_bytes, PackingPlan *plan) {
  return header->magic == PACKING_MAGIC && packing_plan(header->layout, header->size_bytes, plan) &&
         packing_bytes(plan, header->escapes) <= packed_bytes;
}

/* -------------------------------------------------------------------------------- elements */

#define PACKING_EACH(byte) (0x0101010101010101ull * (byte)) /* the same byte 8 times */

/* Bytes 0, 2, 4 and 6. */
PACKING_INLINE PackingOctet packing_even_bytes(PackingOctet x) {
  x &= 0x00ff00ff00ff00ffull;
  x = (x | x >> 8) & 0x0000ffff0000ffffull;
  return (x | x >> 16) & 0x00000000ffffffffull;
}

/* Bytes 0 to 3 to those places. */
PACKING_INLINE PackingOctet packing_spread(PackingOctet x) {
  x &= 0x00000000ffffffffull;
  x = (x | x << 16) & 0x0000ffff0000ffffull;
  return (x | x << 8) & 0x00ff00ff00ff00ffull;
}

/* Top bytes and the other bytes of 8 elements, of which each of `memory` has 8 bytes. Rotated by one bit to
 * the left, the exponent of bf16 and of fp32 is the top byte. */
PACKING_INLINE void packing_split(const PackingOctet memory[4], PackingWord element_bytes, PackingOctet *tops,
                                  PackingOctet rest[3]) {
  PackingOctet turned[4], low[2], high[2];
  if (element_bytes == 2) {
    for (unsigned i = 0; i < 2; i++)
      turned[i] = (memory[i] << 1 & 0xfffefffefffefffeull) | (memory[i] >> 15 & 0x0001000100010001ull);
    rest[0] = packing_even_bytes(turned[0]) | packing_even_bytes(turned[1]) << 32;
    *tops = packing_even_bytes(turned[0] >> 8) | packing_even_bytes(turned[1] >> 8) << 32;
    return;
  }
  for (unsigned i = 0; i < 4; i++)
    turned[i] = (memory[i] << 1 & 0xfffffffefffffffeull) | (memory[i] >> 31 & 0x0000000100000001ull);
  for (unsigned i = 0; i < 2; i++) { /* bytes 0 and 2, and bytes 1 and 3, of 4 elements */
    low[i] = packing_even_bytes(turned[2 * i]) | packing_even_bytes(turned[2 * i + 1]) << 32;
    high[i] = packing_even_bytes(turned[2 * i] >> 8) | packing_even_bytes(turned[2 * i + 1] >> 8) << 32;
  }
  rest[0] = packing_even_bytes(low[0]) | packing_even_bytes(low[1]) << 32;
  rest[1] = packing_even_bytes(high[0]) | packing_even_bytes(high[1]) << 32;
  rest[2] = packing_even_bytes(low[0] >> 8) | packing_even_bytes(low[1] >> 8) << 32;
  *tops = packing_even_bytes(high[0] >> 8) | packing_even_bytes(high[1] >> 8) << 32;
}

PACKING_INLINE void packing_join(PackingOctet tops, const PackingOctet rest[3], PackingWord element_bytes,
                                 PackingOctet memory[4]) {
  for (unsigned i = 0; i < 2; i++) { /* 4 elements each */
    const PackingOctet top = packing_spread(tops >> 32 * i) << 8;
    if (element_bytes == 2) {
      const PackingOctet turned = top | packing_spread(rest[0] >> 32 * i);
      memory[i] = (turned >> 1 & 0x7fff7fff7fff7fffull) | (turned & 0x0001000100010001ull) << 15;
      continue;
    }
    const PackingOctet high = top | packing_spread(rest[2] >> 32 * i);
    const PackingOctet low = packing_spread(rest[1] >> 32 * i) << 8 | packing_spread(rest[0] >> 32 * i);
    for (unsigned j = 0; j < 2; j++) { /* 2 elements each */
      const PackingOctet up = (high >> 32 * j & 0xffffull) << 16 | (high >> (32 * j + 16) & 0xffffull) << 48;
      const PackingOctet down = (low >> 32 * j & 0xffffull) | (low >> (32 * j + 16) & 0xffffull) << 32;
      const PackingOctet turned = up | down;
      memory[2 * i + j] = (turned >> 1 & 0x7fffffff7fffffffull) | (turned & 0x0000000100000001ull) << 31;
    }
  }
}

/* ----------------------------------------------------------------------------------- codes */

/* Codes of 8 top bytes, of which the first `present` count and the others have code 0. Bit i of `escaped`: that of
 * element i is an escape. */
PACKING_INLINE PackingOctet packing_codes(PackingOctet tops, const PackingPlan *plan, PackingWord present,
                                          PackingWord *escaped) {
  const PackingOctet signs = PACKING_EACH(0x80), base = PACKING_EACH(plan->base);
  const PackingOctet there = present == 8 ? ~0ull : (1ull << 8 * present) - 1;
  const PackingOctet offsets = ((tops | signs) - (base & ~signs)) ^ ((tops ^ ~base) & signs);
  const PackingOctet outside = ((offsets & ~signs) + PACKING_EACH(128 - plan->escape)) | offsets;
  const PackingOctet is_escape = (outside & signs & there) >> 7, all_bits = is_escape * 255;
  *escaped = (PackingWord)(is_escape * 0x0102040810204080ull >> 56);
  return ((offsets & ~all_bits) | (PACKING_EACH(plan->escape) & all_bits)) & there;
}

/* The same top bytes, but for those that escaped. */
PACKING_INLINE PackingOctet packing_tops(PackingOctet codes, const PackingPlan *plan, PackingWord present,
                                         PackingWord *escaped) {
  const PackingOctet signs = PACKING_EACH(0x80), base = PACKING_EACH(plan->base);
  const PackingOctet there = present == 8 ? ~0ull : (1ull << 8 * present) - 1;
  const PackingOctet is_escape = (codes + PACKING_EACH(1)) >> plan->planes & PACKING_EACH(1) & there;
  *escaped = (PackingWord)(is_escape * 0x0102040810204080ull >> 56);
  return ((codes & ~signs) + (base & ~signs)) ^ ((codes ^ base) & signs);
}

PACKING_INLINE PackingOctet packing_with(PackingOctet tops, unsigned i, PackingWord top) {
  return (tops & ~(255ull << 8 * i)) | (PackingOctet)top << 8 * i;
}

/* Bit b of byte a to bit a of byte b: byte p of the result is plane p of 8 codes, and back. */
PACKING_INLINE PackingOctet packing_transpose(PackingOctet x) {
  PackingOctet swap = (x ^ x >> 7) & 0x00aa00aa00aa00aaull;
  x ^= swap ^ swap << 7;
  swap = (x ^ x >> 14) & 0x0000cccc0000ccccull;
  x ^= swap ^ swap << 14;
  swap = (x ^ x >> 28) & 0x00000000f0f0f0f0ull;
  return x ^ swap ^ swap << 28;
}

/* -------------------------------------------------------------------------------- choosing */

#define PACKING_PIECE_BYTES 8192u
#define PACKING_MOST_PIECES 256u /* that are sampled: 2 MiB */
#define PACKING_SAMPLED 16u      /* one piece of so many, or of more */

/* How many pieces are looked at, each somewhere in a group of `stride`. */
PACKING_INLINE PackingWord packing_samples(PackingSize size_bytes, PackingWord *stride) {
  const PackingSize pieces = (size_bytes + PACKING_PIECE_BYTES - 1) / PACKING_PIECE_BYTES;
  const PackingSize wide = (pieces + PACKING_MOST_PIECES - 1) / PACKING_MOST_PIECES;
  *stride = wide < PACKING_SAMPLED ? PACKING_SAMPLED : (PackingWord)wide;
  return (PackingWord)((pieces + *stride - 1) / *stride);
}

/* Where sample `number` is. Its place in the group is as good as random: contents may repeat. */
PACKING_INLINE PackingSize packing_sample_at(PackingSize size_bytes, PackingWord stride, PackingWord number,
                                             PackingWord *pairs) {
  const PackingSize pieces = (size_bytes + PACKING_PIECE_BYTES - 1) / PACKING_PIECE_BYTES;
  const PackingSize first = (PackingSize)number * stride, left = pieces - first;
  const PackingWord random = (number + 1) * 0x9e3779b9u >> 8;
  const PackingSize at = (first + random % (left < stride ? (PackingWord)left : stride)) * PACKING_PIECE_BYTES;
  const PackingSize behind = size_bytes - at;
  *pairs = (behind < PACKING_PIECE_BYTES ? (PackingWord)behind : PACKING_PIECE_BYTES) / 4;
  return at;
}

/* The top bytes that 4 bytes have as one element (`odd`), or as two (`even` and `odd`). */
PACKING_INLINE PackingWord packing_even(PackingWord pair) { return pair >> 7 & 255; }
PACKING_INLINE PackingWord packing_odd(PackingWord pair) { return pair >> 23 & 255; }

PACKING_INLINE int packing_escapes(PackingWord top, const PackingPlan *plan) {
  return ((top - plan->base) & 255) >= plan->escape;
}

/* Bits that sampled elements take: smaller is better, and of equals the narrower layout. */
PACKING_INLINE PackingSize packing_rank(PackingSize elements, PackingSize escapes, PackingWord element_bytes,
                                        PackingWord planes, PackingWord base) {
  const PackingSize bits = elements * (8 * (element_bytes - 1) + planes) + 8 * escapes;
  return bits << 24 | (PackingSize)element_bytes << 16 | (PackingSize)planes << 8 | base;
}

/* The best rank of windows from one base, by how often each top byte was met in so many pairs. */
PACKING_INLINE PackingSize packing_best(const PackingWord *even, const PackingWord *odd, PackingSize pairs,
                                        PackingWord base) {
  PackingSize best = ~0ull, in_odd = 0, in_both = 0;
  PackingWord width = 0;
  for (PackingWord planes = 1; planes <= PACKING_MOST_PLANES; planes++) {
    for (; width < (1u << planes) - 1; width++) {
      const PackingWord top = (base + width) & 255;
      in_odd += odd[top];
      in_both += even[top];
    }
    const PackingSize by_two = packing_rank(2 * pairs, 2 * pairs - in_odd - in_both, 2, planes, base);
    const PackingSize by_four = packing_rank(pairs, pairs - in_odd, 4, planes, base);
    best = by_two < best ? by_two : best;
    best = by_four < best ? by_four : best;
  }
  return best;
}

/* The layout of a rank, and how many escapes to expect of all when so many pairs were sampled; 0 if that does not
 * save 10 %. */
PACKING_INLINE PackingWord packing_choice(PackingSize best, PackingSize pairs, PackingSize size_bytes,
                                          PackingSize *escapes) {
  const PackingWord element_bytes = (PackingWord)(best >> 16 & 255), planes = (PackingWord)(best >> 8 & 255);
  const PackingWord layout = packing_layout(element_bytes, planes, (PackingWord)(best & 255));
  const PackingSize elements = 4 / element_bytes * pairs;
  const PackingSize met = ((best >> 24) - elements * (8 * (element_bytes - 1) + planes)) / 8;
  PackingPlan plan;
  *escapes = 0;
  if (!pairs || !packing_plan(layout, size_bytes, &plan)) return 0;
  const PackingSize expected = (met * plan.elements + elements - 1) / elements;
  if (10 * packing_bytes(&plan, expected) > 9 * size_bytes) return 0;
  *escapes = expected;
  return layout;
}

#endif
