/* Handles and what they stand for: the driver, its devices, contexts, and sysman's view. */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

World world;
Device devices[MAX_DEVICES];
Object the_driver = {.kind = DRIVER};
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void *make(Kind kind, size_t size) {
  Object *object = calloc(1, size);
  object->kind = kind;
  object->next = world.objects;
  world.objects = object;
  return object;
}

void *known(const void *handle, Kind kind) {
  if (kind == DRIVER && handle == &the_driver) return &the_driver;
  for (uint32_t i = 0; kind == DEVICE && i < world.n_devices; i++)
    if (handle == &devices[i]) return &devices[i];
  for (Object *object = world.objects; object; object = object->next)
    if (object == handle && object->kind == kind) return object;
  violate(UNKNOWN_HANDLE);
  return NULL;
}

void forget(void *object) {
  for (Object **at = &world.objects; *at; at = &(*at)->next)
    if (*at == object) {
      *at = (*at)->next;
      free(object);
      return;
    }
}

Device *usable(void *handle, Result *why) {
  Device *device = known(handle, DEVICE);
  *why = !device ? INVALID_ARGUMENT : (Result)device->lost;
  return *why ? NULL : device;
}

/* Answer a count, or so many of them. */
static Result list(uint32_t *count, void **out, uint32_t n, void *first, size_t size) {
  if (*count && out)
    for (uint32_t i = 0; i < *count && i < n; i++) out[i] = (char *)first + i * size;
  if (!*count || *count > n) *count = n;
  return SUCCESS;
}

Result zeInit(uint32_t flags) {
  (void)flags;
  ENTER();
  LEAVE(SUCCESS);
}

Result zeDriverGet(uint32_t *count, void **out) {
  return list(count, out, 1, &the_driver, 0);
}

Result zeInitDrivers(uint32_t *count, void **out, void *desc) {
  (void)desc;
  return zeDriverGet(count, out);
}

Result zeDriverGetApiVersion(void *driver, uint32_t *version) {
  (void)driver;
  *version = 1 << 16 | 4;
  return SUCCESS;
}

Result zeDriverGetProperties(void *driver, void *properties) {
  (void)driver;
  memset((char *)properties + 16, 0x5a, 16); /* uuid */
  *(uint32_t *)((char *)properties + 32) = 0x01030000;
  return SUCCESS;
}

Result zeDriverGetExtensionProperties(void *driver, uint32_t *count, void *out) {
  (void)driver, (void)out;
  *count = 0;
  return SUCCESS;
}

Result zeDeviceGet(void *driver, uint32_t *count, void **out) {
  ENTER();
  if (!known(driver, DRIVER)) LEAVE(INVALID_ARGUMENT);
  LEAVE(list(count, out, world.n_devices, devices, sizeof *devices));
}

Result zeDeviceGetSubDevices(void *device, uint32_t *count, void **out) {
  (void)device, (void)out;
  *count = 0;
  return SUCCESS;
}

Result zeDeviceGetRootDevice(void *device, void **root) {
  (void)device;
  *root = NULL;
  return SUCCESS;
}

typedef struct {
  int stype;
  void *next;
  uint32_t type, vendor, device_id, flags, subdevice, clock;
  uint64_t max_alloc;
  uint32_t contexts, priority, threads, width, eus, subslices, slices;
  uint64_t resolution;
  uint32_t bits, kernel_bits;
  uint8_t uuid[16];
  char name[256];
} DeviceProperties;

static Result describe(Device *device, DeviceProperties *p) {
  p->type = device->type;
  p->vendor = 0x8086;
  p->device_id = 0x0bd5;
  p->flags = p->subdevice = 0;
  p->max_alloc = device->total;
  p->threads = 8, p->width = 16, p->eus = 8, p->subslices = 4, p->slices = 1;
  memset(p->uuid, 0, sizeof p->uuid);
  p->uuid[0] = 0x5a, p->uuid[15] = (uint8_t)device->number;
  snprintf(p->name, sizeof p->name, "simulated device %d (not hardware)", device->number);
  return SUCCESS;
}

Result zeDeviceGetProperties(void *handle, DeviceProperties *p) {
  ENTER();
  Device *device = known(handle, DEVICE);
  LEAVE(device ? describe(device, p) : INVALID_ARGUMENT);
}

/* One group for everything, the main copy engine, and two engines that copy to other devices. */
typedef struct {
  int stype;
  void *next;
  uint32_t flags;
  size_t pattern;
  uint32_t queues;
} GroupProperties;

const uint32_t QUEUES[GROUPS] = {1, 1, 2};

Result zeDeviceGetCommandQueueGroupProperties(void *handle, uint32_t *count, GroupProperties *out) {
  ENTER();
  if (!known(handle, DEVICE)) LEAVE(INVALID_ARGUMENT);
  for (uint32_t i = 0; *count && out && i < *count && i < GROUPS; i++) {
    out[i].flags = i ? 2 : 3;
    out[i].pattern = 16;
    out[i].queues = QUEUES[i];
  }
  if (!*count || *count > GROUPS) *count = GROUPS;
  LEAVE(SUCCESS);
}

/* What runtimes ask of a device that has no kernels: nothing, in structs that they have zeroed. */
Result nothing_to_say(void) { return SUCCESS; }

Result zeDeviceGetCacheProperties(void *device, uint32_t *count, void *out) {
  (void)device, (void)out;
  *count = 0;
  return SUCCESS;
}

Result zeDeviceCanAccessPeer(void *device, void *other, uint8_t *out) {
  *out = device == other;
  return SUCCESS;
}

typedef struct {
  int stype;
  void *next;
  uint32_t flags, clock, width;
  uint64_t total;
  char name[256];
} MemoryProperties;

Result zeDeviceGetMemoryProperties(void *handle, uint32_t *count, MemoryProperties *out) {
  ENTER();
  Device *device = known(handle, DEVICE);
  if (!device) LEAVE(INVALID_ARGUMENT);
  if (*count && out) out->total = device->total;
  *count = 1;
  LEAVE(SUCCESS);
}

Result zeContextCreate(void *driver, const int *desc, void **out) {
  ENTER();
  if (!known(driver, DRIVER) || *desc != 0xd) LEAVE(INVALID_ARGUMENT);
  *out = make(CONTEXT, sizeof(Object));
  LEAVE(SUCCESS);
}

Result zeContextCreateEx(void *driver, const int *desc, uint32_t n, void **of, void **out) {
  (void)n, (void)of;
  return zeContextCreate(driver, desc, out);
}

Result zeContextDestroy(void *context) {
  ENTER();
  if (!known(context, CONTEXT)) LEAVE(INVALID_ARGUMENT);
  for (Reserved *each = world.reserved; each; each = each->next)
    if (each->context == context) LEAVE(IN_USE);
  forget(context);
  LEAVE(SUCCESS);
}

/* ---- sysman ---- */

Result zesInit(uint32_t flags) {
  (void)flags;
  ENTER();
  LEAVE(world.sysman ? SUCCESS : UNSUPPORTED_FEATURE);
}

Result zesDriverGet(uint32_t *count, void **out) { return zeDriverGet(count, out); }

Result zesDeviceGet(void *driver, uint32_t *count, void **out) { return zeDeviceGet(driver, count, out); }

typedef struct {
  int stype;
  void *next;
  DeviceProperties core;
} SysmanProperties;

Result zesDeviceGetProperties(void *handle, SysmanProperties *p) {
  return zeDeviceGetProperties(handle, &p->core);
}

Result zesDeviceEnumMemoryModules(void *handle, uint32_t *count, void **out) {
  ENTER();
  Device *device = known(handle, DEVICE);
  if (!device) LEAVE(INVALID_ARGUMENT);
  if (!world.sysman) LEAVE(UNSUPPORTED_FEATURE);
  LEAVE(list(count, out, 1, device, 0));
}

typedef struct {
  int stype;
  const void *next;
  int health;
  uint64_t free, size;
} MemoryState;

Result zesMemoryGetState(void *handle, MemoryState *state) {
  ENTER();
  Device *device = known(handle, DEVICE);
  if (!device || state->stype != 0x1e) LEAVE(INVALID_ARGUMENT);
  state->size = device->total;
  state->free = world.frozen ? device->total : device->total - device->committed - device->taken;
  LEAVE(SUCCESS);
}
