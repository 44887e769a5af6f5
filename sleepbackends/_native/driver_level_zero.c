/* Device memory of address_space.c over Level Zero's loader, found with dlopen: no Level Zero headers.
 *
 * Python says which context and device handles belong to a device, because they must be those of
 * whoever launches kernels: memory of one context is not to be used in another
 * (https://oneapi-src.github.io/level-zero-spec/level-zero/latest/core/PROG.html, Contexts).
 */
#include "driver.h"

#include <stdatomic.h>
#include <stdint.h>

enum {
  INIT_GPU_ONLY = 1,
  PHYSICAL_MEM_DESC = 0x20,
  MEM_STATE = 0x1e,
  READ_WRITE = 1,
  MAX_MODULES = 16
};

/* Structs of the interface, by their documented layout since version 1.0. */
typedef struct { int type; const void *next; uint32_t flags; size_t size; } PhysicalMemDesc;
typedef struct { int type; const void *next; int health; uint64_t free, size; } MemState;

static struct {
  Result (*init)(uint32_t);
  Result (*page_size)(void *, void *, size_t, size_t *);
  Result (*reserve)(void *, const void *, size_t, void **);
  Result (*release_range)(void *, const void *, size_t);
  Result (*create)(void *, void *, PhysicalMemDesc *, void **);
  Result (*destroy)(void *, void *);
  Result (*map)(void *, const void *, size_t, void *, size_t, int);
  Result (*unmap)(void *, const void *, size_t);
  Result (*memory_state)(void *, MemState *);
} ze;

/* What Python knows of a device. */
typedef struct {
  void *context, *handle;
  void (*wait)(signed char device); /* for what others queued; NULL: there are no others */
  size_t total;
  void *modules[MAX_MODULES]; /* of sysman, which says what is free; none: nobody does */
  unsigned n_modules;
} Device;

static Device devices[MAX_DEVICES];
static size_t granules[MAX_DEVICES];
static atomic_size_t committed[MAX_DEVICES]; /* our own books, as what the device says may stand still */
static atomic_size_t reserved[MAX_DEVICES];

const Result DRIVER_NO_ROOM = 0x70000003; /* ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY */

static void *pointer(unsigned long long number) { return (void *)(uintptr_t)number; }

Result driver_load(const char *library) {
  const Wanted wanted[] = {
      {&ze.init, "zeInit"},
      {&ze.page_size, "zeVirtualMemQueryPageSize"},
      {&ze.reserve, "zeVirtualMemReserve"},
      {&ze.release_range, "zeVirtualMemFree"},
      {&ze.create, "zePhysicalMemCreate"},
      {&ze.destroy, "zePhysicalMemDestroy"},
      {&ze.map, "zeVirtualMemMap"},
      {&ze.unmap, "zeVirtualMemUnmap"},
      {&ze.memory_state, "zesMemoryGetState"},
  };
  Result r = find_symbols(library, wanted, sizeof wanted / sizeof *wanted);
  return r ? r : ze.init(INIT_GPU_ONLY);
}

/* Tell of a device. Other handles than before are an error while anything is reserved with those. One
 * caller at a time. */
int sb_use_device(int device, const Device *told) {
  if (device < 0 || device >= MAX_DEVICES || told->n_modules > MAX_MODULES) return ERR_NO_DEVICE;
  Device *known = &devices[device];
  if (known->context == told->context && known->handle == told->handle) return 0;
  if (reserved[device]) return ERR_STATE;
  size_t granule = 0;
  Result r = ze.page_size(told->context, told->handle, 1, &granule);
  if (r) return r;
  if (!granule) return ERR_NO_DEVICE;
  granules[device] = granule;
  *known = *told;
  return 0;
}

/* What was told of a device; nothing but zeros if it was not. */
void sb_known_device(int device, Device *out) {
  if (device >= 0 && device < MAX_DEVICES) *out = devices[device];
}

/* How much physical memory this library holds of a device. */
size_t sb_committed_bytes(int device) { return committed[device]; }

Result driver_enter(int device, void **before) {
  *before = NULL;
  return device < 0 || device >= MAX_DEVICES || !devices[device].context ? ERR_NO_DEVICE : 0;
}

void driver_leave(int device, void *before) { (void)device, (void)before; }

size_t driver_granule(int device) { return granules[device]; }

/* Pages are larger for larger sizes, on some drivers up to half the size, so that the size that was
 * rounded up may have larger ones again. */
size_t driver_extent_size(int device, size_t size) {
  for (;;) {
    size_t page = 0;
    if (ze.page_size(devices[device].context, devices[device].handle, size, &page) || !page) return 0;
    if (size % page == 0) return size;
    size_t rounded = (size / page + 1) * page;
    if (rounded < size) return 0;
    size = rounded;
  }
}

Result driver_reserve(int device, Address *address, size_t size) {
  void *start = NULL;
  Result r = ze.reserve(devices[device].context, NULL, size, &start);
  if (r) return r;
  *address = (Address)(uintptr_t)start;
  reserved[device] += size;
  return 0;
}

Result driver_release_range(int device, Address address, size_t size) {
  Result r = ze.release_range(devices[device].context, pointer(address), size);
  if (!r) reserved[device] -= size;
  return r;
}

Result driver_create(int device, Handle *handle, size_t size) {
  PhysicalMemDesc desc = {PHYSICAL_MEM_DESC, NULL, 0, size};
  void *created = NULL;
  Result r = ze.create(devices[device].context, devices[device].handle, &desc, &created);
  if (r) return r;
  *handle = (Handle)(uintptr_t)created;
  committed[device] += size;
  return 0;
}

Result driver_release(int device, Handle handle, size_t size) {
  Result r = ze.destroy(devices[device].context, pointer(handle));
  if (!r) committed[device] -= size;
  return r;
}

Result driver_map(int device, Address address, size_t size, Handle handle) {
  return ze.map(devices[device].context, pointer(address), size, pointer(handle), 0, READ_WRITE);
}

Result driver_allow(int device, Address address, size_t size) {
  (void)device, (void)address, (void)size;
  return 0; /* said when it was mapped */
}

Result driver_unmap(int device, Address address, size_t size) {
  return ze.unmap(devices[device].context, pointer(address), size);
}

Result driver_wait(int device) {
  if (devices[device].wait) devices[device].wait((signed char)device);
  return 0;
}

/* The least of what our books leave and of what the device says. */
Result driver_free_bytes(int device, size_t *available) {
  const Device *d = &devices[device];
  size_t mine = committed[device];
  uint64_t said = 0;
  *available = mine < d->total ? d->total - mine : 0;
  for (unsigned i = 0; i < d->n_modules; i++) {
    MemState state = {.type = MEM_STATE};
    if (ze.memory_state(d->modules[i], &state)) return 0;
    said += state.free;
  }
  if (d->n_modules && said < *available) *available = (size_t)said;
  return 0;
}

/* The same for Python. */
int sb_free_bytes(int device, size_t *available) {
  void *before;
  Result r = driver_enter(device, &before);
  return r ? r : driver_free_bytes(device, available);
}
