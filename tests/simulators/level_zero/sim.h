/* A simulated Level Zero driver, loaded by Intel's real loader through ZE_ENABLE_ALT_DRIVERS.
 *
 * No Level Zero headers: structs, codes and table slots are written down here as documented, so
 * that tests need the loader and a C compiler and nothing else. Device memory is host memory
 * at an address of its own; the address that the driver gives out is reserved without access, so
 * that a host that touches it faults as with a discrete card. Copies run as late as they may, and
 * those that nothing orders run in the opposite order. It is stricter than Intel's driver in places
 * and encodes one reading of the specification; it proves nothing about hardware.
 */
#ifndef SIM_H
#define SIM_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

enum { MAX_DEVICES = 8, GROUPS = 3 };

typedef uint32_t Result;
enum {
  SUCCESS = 0,
  NOT_READY = 1,
  DEVICE_LOST = 0x70000001,
  NO_HOST_MEMORY = 0x70000002,
  NO_DEVICE_MEMORY = 0x70000003,
  UNSUPPORTED_FEATURE = 0x78000003,
  INVALID_ARGUMENT = 0x78000004,
  INVALID_NULL_HANDLE = 0x78000005,
  IN_USE = 0x78000006,
  INVALID_NULL_POINTER = 0x78000007,
  UNSUPPORTED_SIZE = 0x78000009,
  UNSUPPORTED_ALIGNMENT = 0x7800000a,
  INVALID_ENUMERATION = 0x7800000c,
};

/* ---- objects: every handle is one, found in a list and never trusted ---- */

typedef enum { DRIVER = 1, DEVICE, CONTEXT, PHYSICAL, LIST, POOL, EVENT } Kind;

typedef struct Object {
  void *loaders; /* the first word of a handle is the loader's */
  Kind kind;
  struct Object *next;
} Object;

typedef struct {
  Object object;
  int number;
  uint32_t type; /* 1: GPU */
  size_t total, committed, taken; /* by others */
  size_t unit; /* 0: 64 KiB, or 2 MiB for what is as large; 1: powers of two, as older drivers have */
  int lost;    /* the code of the fault that broke it */
} Device;

typedef struct {
  Object object;
  Device *device;
  size_t size;
  char *bytes;
  int maps;
} Physical;

typedef struct Map {
  struct Map *next;
  char *start;
  size_t size, offset;
  Physical *physical;
  uint32_t access;
} Map;

typedef struct Reserved {
  struct Reserved *next;
  char *start, *base;
  size_t size, base_size;
  Object *context;
  Map *maps;
} Reserved;

typedef struct {
  Object object;
  uint32_t count;
  Object *context;
} Pool;

typedef struct Event {
  Object object;
  Pool *pool;
  uint32_t index;
  int signalled;
  struct List *pending; /* whose work will signal it */
} Event;

typedef struct Work {
  struct Work *next;
  enum { COPY, FILL, BARRIER } what;
  char *target;
  const char *source;
  size_t size;
  unsigned char pattern[16];
  size_t pattern_size;
  Event *signal;
} Work;

typedef struct List {
  Object object;
  Device *device;
  int synchronous;
  Work *work;
} List;

typedef struct Import {
  struct Import *next;
  char *start;
  size_t size;
} Import;

typedef struct {
  Object *objects;
  Reserved *reserved;
  Import *imports;
  List *engines[MAX_DEVICES]; /* work of somebody else */
  size_t imported, import_limit;
  uint32_t n_devices;
  int stale_byte, eager, frozen, pointer_type, imports_exist, sysman;
} World;

extern const uint32_t QUEUES[GROUPS]; /* engines of each group */
extern World world;
extern Device devices[MAX_DEVICES];
extern Object the_driver;
extern pthread_mutex_t lock;

/* ---- control.c ---- */

typedef enum {
  UNKNOWN_HANDLE,
  UNMAP_IN_USE,      /* queued work needs the range */
  UNMAP_NOTHING,
  DESTROY_MAPPED,
  WORK_FAULTED,      /* the device memory was gone when it ran */
  HOST_RELEASED_IN_USE,
  DESTROYED_IN_USE,  /* a list or an event with work */
  WAIT_FOR_NOTHING,  /* for ever, on a real device */
  OTHER_CONTEXT,
  VIOLATIONS
} Violation;

void violate(Violation what);
Result record_call(const char *name);
void set_up(void);

/* Take the lock, count the call, and return early where a fault waits for it. */
#define ENTER()                                 \
  do {                                          \
    pthread_mutex_lock(&lock);                  \
    Result fault_ = record_call(__func__);      \
    if (fault_) {                               \
      pthread_mutex_unlock(&lock);              \
      return fault_;                            \
    }                                           \
  } while (0)

#define LEAVE(result)                           \
  do {                                          \
    Result result_ = (result);                  \
    pthread_mutex_unlock(&lock);                \
    return result_;                             \
  } while (0)

/* ---- objects.c ---- */

void *make(Kind kind, size_t size);
void *known(const void *handle, Kind kind); /* the object, or NULL and a violation */
void forget(void *object);
Device *usable(void *handle, Result *why);  /* a device that is not lost */

/* ---- memory.c ---- */

Map *map_at(const char *address);
int is_reserved(const char *address);
char *translate(const char *address, size_t size, int write); /* NULL: a fault on the device */
void free_memory(void);

/* ---- queues.c ---- */

void run(List *list, const Event *until);
int needs(const char *start, size_t size);  /* whether queued work does */
void free_queues(void);

#endif
