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

/* Rotated by one bit, the exponent of bf16 and of fp32 is the top byte. */
PACKING_INLINE PackingWord packing_turn(PackingWord element, PackingWord element_bytes) {
  return element_bytes == 2 ? (element << 1 | element >> 15) & 0xffffu : element << 1 | element >> 31;
}

PACKING_INLINE PackingWord packing_turn_back(PackingWord turned, PackingWord element_bytes) {
  return element_bytes == 2 ? (turned >> 1 | turned << 15) & 0xffffu : turned >> 1 | turned << 31;
}

/* Top bytes and the other bytes of 8 elements. */
PACKING_INLINE void packing_split(const PackingWord elements[8], PackingWord element_bytes, PackingOctet *tops,
                                  PackingOctet rest[3]) {
  *tops = rest[0] = rest[1] = rest[2] = 0;
  for (unsigned i = 0; i < 8; i++) {
    const PackingWord turned = packing_turn(elements[i], element_bytes);
    *tops |= (PackingOctet)(turned >> (8 * element_bytes - 8)) << 8 * i;
    rest[0] |= (PackingOctet)(turned & 255) << 8 * i;
    if (element_bytes == 2) continue;
    rest[1] |= (PackingOctet)(turned >> 8 & 255) << 8 * i;
    rest[2] |= (PackingOctet)(turned >> 16 & 255) << 8 * i;
  }
}

PACKING_INLINE void packing_join(PackingOctet tops, const PackingOctet rest[3], PackingWord element_bytes,
                                 PackingWord elements[8]) {
  for (unsigned i = 0; i < 8; i++) {
    PackingWord turned = (PackingWord)(tops >> 8 * i & 255) << (8 * element_bytes - 8);
    turned |= (PackingWord)(rest[0] >> 8 * i & 255);
    if (element_bytes == 4)
      turned |= (PackingWord)(rest[1] >> 8 * i & 255) << 8 | (PackingWord)(rest[2] >> 8 * i & 255) << 16;
    elements[i] = packing_turn_back(turned, element_bytes);
  }
}

/* ----------------------------------------------------------------------------------- codes */

PACKING_INLINE PackingWord packing_code(PackingWord top, PackingWord base, PackingWord escape) {
  const PackingWord offset = (top - base) & 255;
  return offset < escape ? offset : escape;
}

/* The codes of the first `present` elements, zeros for the others; bit i of `escaped`: element i's is an escape. */
PACKING_INLINE PackingOctet packing_codes(PackingOctet tops, const PackingPlan *plan, PackingWord present,
                                          PackingWord *escaped) {
  PackingOctet codes = 0;
  *escaped = 0;
  for (unsigned i = 0; i < 8; i++) {
    const PackingWord code = packing_code((PackingWord)(tops >> 8 * i & 255), plan->base, plan->escape);
    codes |= (PackingOctet)(i < present ? code : 0) << 8 * i;
    *escaped |= (PackingWord)(i < present && code == plan->escape) << i;
  }
  return codes;
}

/* The same top bytes, but for those that escaped. */
PACKING_INLINE PackingOctet packing_tops(PackingOctet codes, const PackingPlan *plan, PackingWord present,
                                         PackingWord *escaped) {
  PackingOctet tops = 0;
  *escaped = 0;
  for (unsigned i = 0; i < 8; i++) {
    const PackingWord code = (PackingWord)(codes >> 8 * i & 255);
    tops |= (PackingOctet)((code + plan->base) & 255) << 8 * i;
    *escaped |= (PackingWord)(i < present && code == plan->escape) << i;
  }
  return tops;
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

/* The layout of a rank, and how many escapes the bytes that were sampled let expect; 0 if they do not shrink by 10 %. */
PACKING_INLINE PackingWord packing_choice(PackingSize best, PackingSize pairs, PackingSize size_bytes,
                                          PackingSize *escapes) {
  const PackingWord element_bytes = (PackingWord)(best >> 16 & 255), planes = (PackingWord)(best >> 8 & 255);
  const PackingSize bits = best >> 24, elements = 4 / element_bytes * pairs;
  const PackingSize met = (bits - elements * (8 * (element_bytes - 1) + planes)) / 8;
  *escapes = 0;
  if (!pairs || 10 * bits > 9 * 32 * pairs) return 0;
  *escapes = (met * (size_bytes / element_bytes) + elements - 1) / elements;
  return packing_layout(element_bytes, planes, (PackingWord)(best & 255));
}

#endif
