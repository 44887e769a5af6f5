/* The content fingerprint: what one word adds to its two sums, and how they end.
 *
 * The host library, the CUDA kernel and the simulated driver of the tests all include this file,
 * so that they cannot disagree. It includes nothing: the compiler of the kernel has no headers.
 * What the function promises is said in sleepbackends/vmm/fingerprint.py.
 */
#ifndef SLEEPBACKENDS_FINGERPRINT_H
#define SLEEPBACKENDS_FINGERPRINT_H

#ifndef FINGERPRINT_INLINE
#define FINGERPRINT_INLINE static inline
#endif

#define FINGERPRINT_PLACE 0x9e3779b97f4a7c15ull
#define FINGERPRINT_START 0xd1b54a32d192ed03ull
#define FINGERPRINT_MIX_1 0xbf58476d1ce4e5b9ull
#define FINGERPRINT_MIX_2 0x94d049bb133111ebull
#define FINGERPRINT_SIZE 0xd6e8feb86659fd93ull

typedef unsigned long long FingerprintWord; /* 64 bits wherever this compiles */

/* What a word is combined with at place `number`; the next one's is FINGERPRINT_PLACE more. */
FINGERPRINT_INLINE FingerprintWord fingerprint_place(FingerprintWord number) {
  return number * FINGERPRINT_PLACE + FINGERPRINT_START;
}

/* Add one word. Each step of `u` can be undone, so two words never add the same to `s1`. */
FINGERPRINT_INLINE void fingerprint_add(FingerprintWord word, FingerprintWord place,
                                        FingerprintWord *s1, FingerprintWord *s2) {
  FingerprintWord u = (word ^ place) * FINGERPRINT_MIX_1;
  u ^= u >> 32;
  u *= FINGERPRINT_MIX_2;
  *s1 += u;
  *s2 += (FingerprintWord)(unsigned)u * (unsigned)(u >> 32); /* halves of 32 bits */
}

/* The low half of the fingerprint; the high half is `s2` as it is. */
FINGERPRINT_INLINE FingerprintWord fingerprint_finish(FingerprintWord s1, FingerprintWord size_bytes) {
  return s1 + size_bytes * FINGERPRINT_SIZE;
}

#endif
