/* What address_space.c asks of a device driver: implemented once for each, linked into one library.
 *
 * Every function but driver_load is called between driver_enter and driver_leave of its device.
 * Results are 0, the driver's own positive code, or one of ours.
 */
#ifndef SLEEPBACKENDS_DRIVER_H
#define SLEEPBACKENDS_DRIVER_H

#include <stddef.h>

enum { MAX_DEVICES = 64 };

/* Our own answers, beside the driver's positive ones. */
enum {
  ERR_NO_LIBRARY = -1,
  ERR_NO_SYMBOL = -2,
  ERR_NO_HOST_MEMORY = -3,
  ERR_UNKNOWN = -4,
  ERR_STATE = -5,
  ERR_NO_DEVICE = -6
};

typedef int Result;
typedef unsigned long long Address;
typedef unsigned long long Handle; /* 0: none */

#pragma GCC visibility push(hidden)

/* The code that says that a device is full. */
extern const Result DRIVER_NO_ROOM;

/* Find and initialise the driver; once, with nobody else in here. */
Result driver_load(const char *library);

/* Make a device usable in this thread; `before` is what driver_leave puts back. */
Result driver_enter(int device, void **before);
void driver_leave(int device, void *before);

/* The unit of pieces of an extent. */
size_t driver_granule(int device);

/* The size of an extent that has room for so much; 0 if there are not so many addresses. */
size_t driver_extent_size(int device, size_t size);

Result driver_reserve(int device, Address *address, size_t size);
Result driver_release_range(int device, Address address, size_t size);
Result driver_create(int device, Handle *handle, size_t size);
Result driver_release(int device, Handle handle, size_t size);
Result driver_map(int device, Address address, size_t size, Handle handle);
Result driver_allow(int device, Address address, size_t size); /* reading and writing, once mapped */
Result driver_unmap(int device, Address address, size_t size);

/* Wait for what was queued on the device before. Called without the lock. */
Result driver_wait(int device);

/* What the device has left; other processes move it. */
Result driver_free_bytes(int device, size_t *available);

#pragma GCC visibility pop

/* Fill a table of functions from a library; ERR_NO_LIBRARY or ERR_NO_SYMBOL if that cannot be. */
typedef struct { void *to; const char *name; } Wanted;
Result find_symbols(const char *library, const Wanted *wanted, size_t count) __attribute__((visibility("hidden")));

#endif
