/* First touch of host memory, by page faults.
 *
 * Linux resolves faults in one mapping side by side (since 6.4), while madvise(MADV_POPULATE_WRITE)
 * holds the lock of the whole address space, which a driver needs in order to register memory.
 */
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

/* Pages that nobody has touched hold zeros, so writing zeros changes nothing. */
EXPORT void sb_touch(void *memory, size_t size, size_t page) {
  volatile char *bytes = memory;
  for (size_t at = 0; at < size; at += page) bytes[at] = 0;
}
