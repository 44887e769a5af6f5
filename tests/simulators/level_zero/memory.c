/* Reserved addresses, physical memory, mappings, and host memory that was imported. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { READ_WRITE = 1, READ_ONLY = 2 };

static const size_t SMALL = 64 << 10, LARGE = 2 << 20;

/* The page size for a size; device NULL: the smallest that any has. */
static size_t page_of(const Device *device, size_t size) {
  if (device && device->unit > 1) return device->unit;
  if (device && device->unit == 1) {
    size_t page = SMALL;
    while (page * 2 <= size) page *= 2;
    return page;
  }
  return size >= LARGE ? LARGE : SMALL;
}

Map *map_at(const char *address) {
  for (Reserved *each = world.reserved; each; each = each->next)
    for (Map *map = each->maps; map; map = map->next)
      if (address >= map->start && address < map->start + map->size) return map;
  return NULL;
}

int is_reserved(const char *address) {
  for (Reserved *each = world.reserved; each; each = each->next)
    if (address >= each->start && address < each->start + each->size) return 1;
  return 0;
}

char *translate(const char *address, size_t size, int write) {
  if (!is_reserved(address)) return (char *)address;
  Map *map = map_at(address);
  if (!map || address + size > map->start + map->size) return NULL;
  if (map->access != READ_WRITE && (write || map->access != READ_ONLY)) return NULL;
  return map->physical->bytes + map->offset + (address - map->start);
}

Result zeVirtualMemQueryPageSize(void *context, void *handle, size_t size, size_t *out) {
  ENTER();
  Result why;
  Device *device = usable(handle, &why);
  if (why) LEAVE(why);
  if (!known(context, CONTEXT)) LEAVE(INVALID_ARGUMENT);
  if (!size) LEAVE(UNSUPPORTED_SIZE);
  *out = page_of(device, size);
  LEAVE(SUCCESS);
}

Result zeVirtualMemReserve(void *context, const void *start, size_t size, void **out) {
  ENTER();
  if (!known(context, CONTEXT)) LEAVE(INVALID_ARGUMENT);
  size_t page = SMALL; /* of no device in particular */
  for (uint32_t i = 0; i < world.n_devices; i++)
    if (devices[i].unit < 2 && page_of(&devices[i], size) > page) page = page_of(&devices[i], size);
  if (!size || size % page) LEAVE(UNSUPPORTED_SIZE);
  char *base = mmap((void *)start, size + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) LEAVE(NO_DEVICE_MEMORY);
  Reserved *new = calloc(1, sizeof *new);
  new->base = base;
  new->base_size = size + page;
  new->start = (char *)(((uintptr_t)base + page - 1) / page * page);
  new->size = size;
  new->context = context;
  new->next = world.reserved;
  world.reserved = new;
  *out = new->start;
  LEAVE(SUCCESS);
}

Result zeVirtualMemFree(void *context, const void *start, size_t size) {
  ENTER();
  for (Reserved **at = &world.reserved; *at; at = &(*at)->next) {
    Reserved *found = *at;
    if (found->start != start) continue;
    if (found->context != context) violate(OTHER_CONTEXT);
    if (found->size != size || found->context != context) LEAVE(INVALID_ARGUMENT);
    if (found->maps) LEAVE(IN_USE);
    munmap(found->base, found->base_size);
    *at = found->next;
    free(found);
    LEAVE(SUCCESS);
  }
  violate(UNKNOWN_HANDLE);
  LEAVE(INVALID_ARGUMENT);
}

typedef struct {
  int stype;
  const void *next;
  uint32_t flags;
  size_t size;
} PhysicalDesc;

Result zePhysicalMemCreate(void *context, void *handle, PhysicalDesc *desc, void **out) {
  ENTER();
  Result why;
  Device *device = usable(handle, &why);
  if (why) LEAVE(why);
  if (!known(context, CONTEXT)) LEAVE(INVALID_ARGUMENT);
  if (desc->stype != 0x20) LEAVE(INVALID_ARGUMENT); /* no layer of the loader checks it */
  if (!desc->size || desc->size % page_of(device, desc->size)) LEAVE(UNSUPPORTED_SIZE);
  if (device->committed + device->taken + desc->size > device->total) LEAVE(NO_DEVICE_MEMORY);
  char *bytes = mmap(NULL, desc->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (bytes == MAP_FAILED) LEAVE(NO_HOST_MEMORY);
  if (world.stale_byte) memset(bytes, world.stale_byte, desc->size);
  Physical *new = make(PHYSICAL, sizeof *new);
  new->device = device;
  new->size = desc->size;
  new->bytes = bytes;
  device->committed += desc->size;
  *out = new;
  LEAVE(SUCCESS);
}

static void free_physical(Physical *physical) {
  munmap(physical->bytes, physical->size);
  physical->device->committed -= physical->size;
  forget(physical);
}

Result zePhysicalMemDestroy(void *context, void *handle) {
  ENTER();
  Physical *physical = known(handle, PHYSICAL);
  if (!physical || !known(context, CONTEXT)) LEAVE(INVALID_ARGUMENT);
  if (physical->maps) {
    violate(DESTROY_MAPPED);
    LEAVE(IN_USE);
  }
  free_physical(physical);
  LEAVE(SUCCESS);
}

Result zeVirtualMemMap(void *context, const void *start, size_t size, void *handle, size_t offset, uint32_t access) {
  ENTER();
  Physical *physical = known(handle, PHYSICAL);
  if (!physical) LEAVE(INVALID_ARGUMENT);
  if (physical->device->lost) LEAVE((Result)physical->device->lost);
  if (access > READ_ONLY) LEAVE(INVALID_ENUMERATION);
  size_t page = page_of(physical->device, size);
  if (!size || size % page || (uintptr_t)start % page || offset % page) LEAVE(UNSUPPORTED_ALIGNMENT);
  if (offset + size > physical->size || physical->maps) LEAVE(INVALID_ARGUMENT); /* aliases misbehave */
  for (Reserved *each = world.reserved; each; each = each->next) {
    const char *first = start;
    if (first < each->start || first + size > each->start + each->size) continue;
    if (each->context != context) violate(OTHER_CONTEXT);
    if (each->context != context) LEAVE(INVALID_ARGUMENT);
    for (Map *map = each->maps; map; map = map->next)
      if (first < map->start + map->size && map->start < first + size) LEAVE(INVALID_ARGUMENT);
    Map *new = calloc(1, sizeof *new);
    *new = (Map){each->maps, (char *)start, size, offset, physical, access};
    each->maps = new;
    physical->maps++;
    LEAVE(SUCCESS);
  }
  LEAVE(INVALID_ARGUMENT);
}

Result zeVirtualMemUnmap(void *context, const void *start, size_t size) {
  ENTER();
  (void)context;
  for (Reserved *each = world.reserved; each; each = each->next)
    for (Map **at = &each->maps; *at; at = &(*at)->next) {
      Map *map = *at;
      if (map->start != start) continue;
      if (map->size != size) LEAVE(INVALID_ARGUMENT);
      if (needs(map->start, map->size)) violate(UNMAP_IN_USE);
      map->physical->maps--;
      *at = map->next;
      free(map);
      LEAVE(SUCCESS);
    }
  violate(UNMAP_NOTHING); /* Intel's driver says success */
  LEAVE(INVALID_ARGUMENT);
}

Result zeVirtualMemSetAccessAttribute(void *context, const void *start, size_t size, uint32_t access) {
  ENTER();
  (void)context;
  Map *map = map_at(start);
  if (access > READ_ONLY) LEAVE(INVALID_ENUMERATION);
  if (!map || map->start != start || map->size != size) LEAVE(INVALID_ARGUMENT);
  map->access = access;
  LEAVE(SUCCESS);
}

typedef struct {
  int stype;
  void *next;
  uint32_t type;
  uint64_t id, page;
} AllocProperties;

Result zeMemGetAllocProperties(void *context, const void *address, AllocProperties *out, void **device) {
  ENTER();
  if (!known(context, CONTEXT)) LEAVE(INVALID_ARGUMENT);
  Map *map = map_at(address);
  out->type = !map ? 0 : world.pointer_type >= 0 ? (uint32_t)world.pointer_type : 2; /* 2: of a device */
  out->id = map ? 1 : 0;
  if (device) *device = map ? map->physical->device : NULL;
  LEAVE(SUCCESS);
}

/* ---- host memory ---- */

static Result zexDriverImportExternalPointer(void *driver, void *start, size_t size) {
  ENTER();
  if (!known(driver, DRIVER) || !start || !size) LEAVE(INVALID_ARGUMENT);
  if (size > world.import_limit - world.imported) LEAVE(NO_HOST_MEMORY);
  for (Import *each = world.imports; each; each = each->next)
    if ((char *)start < each->start + each->size && each->start < (char *)start + size) LEAVE(INVALID_ARGUMENT);
  Import *new = calloc(1, sizeof *new);
  *new = (Import){world.imports, start, size};
  world.imports = new;
  world.imported += size;
  LEAVE(SUCCESS);
}

static Result zexDriverReleaseImportedPointer(void *driver, void *start) {
  ENTER();
  if (!known(driver, DRIVER)) LEAVE(INVALID_ARGUMENT);
  for (Import **at = &world.imports; *at; at = &(*at)->next) {
    Import *found = *at;
    if (found->start != start) continue;
    if (needs(found->start, found->size)) violate(HOST_RELEASED_IN_USE);
    world.imported -= found->size;
    *at = found->next;
    free(found);
    LEAVE(SUCCESS);
  }
  violate(UNKNOWN_HANDLE);
  LEAVE(INVALID_ARGUMENT);
}

Result zeDriverGetExtensionFunctionAddress(void *driver, const char *name, void **out) {
  (void)driver;
  static const struct { const char *name; Result (*two)(void *, void *); Result (*three)(void *, void *, size_t); } all[] = {
      {"zexDriverImportExternalPointer", NULL, zexDriverImportExternalPointer},
      {"zexDriverReleaseImportedPointer", zexDriverReleaseImportedPointer, NULL},
  };
  for (size_t i = 0; world.imports_exist && i < 2; i++)
    if (!strcmp(name, all[i].name)) {
      if (all[i].two) memcpy(out, &all[i].two, sizeof *out);
      else memcpy(out, &all[i].three, sizeof *out);
      return SUCCESS;
    }
  *out = NULL;
  return INVALID_ARGUMENT;
}

void free_memory(void) {
  while (world.reserved) {
    Reserved *each = world.reserved;
    world.reserved = each->next;
    while (each->maps) {
      Map *map = each->maps;
      each->maps = map->next;
      free(map);
    }
    munmap(each->base, each->base_size);
    free(each);
  }
  for (Object *object = world.objects, *next; object; object = next) {
    next = object->next;
    if (object->kind == PHYSICAL) free_physical((Physical *)object);
  }
  while (world.imports) {
    Import *each = world.imports;
    world.imports = each->next;
    free(each);
  }
  world.imported = 0;
}
