/* What tests set, count and look at. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

enum { NAMES = 128, FAULTS = 32 };

static struct { char name[64]; uint64_t calls; } counts[NAMES];
static struct { char name[64]; uint64_t nth, times; Result code; } faults[FAULTS];
static uint64_t violations[VIOLATIONS];

void violate(Violation what) { violations[what]++; }

Result record_call(const char *name) {
  Result code = SUCCESS;
  for (size_t i = 0; i < NAMES; i++) {
    if (!*counts[i].name) strncpy(counts[i].name, name, sizeof counts[i].name - 1);
    if (strcmp(counts[i].name, name)) continue;
    counts[i].calls++;
    break;
  }
  for (size_t i = 0; i < FAULTS; i++) {
    if (!faults[i].times || strcmp(faults[i].name, name)) continue;
    if (faults[i].nth > 1) {
      faults[i].nth--;
    } else {
      if (faults[i].times != UINT64_MAX) faults[i].times--;
      if (!code) code = faults[i].code;
    }
  }
  return code;
}

static uint64_t from_environment(const char *name, uint64_t otherwise) {
  const char *text = getenv(name);
  return text ? strtoull(text, NULL, 0) : otherwise;
}

static void defaults(void) {
  for (int i = 0; i < MAX_DEVICES; i++) {
    devices[i] = (Device){.object = {devices[i].object.loaders, DEVICE, NULL}, .number = i, .type = 1};
    devices[i].total = (size_t)from_environment("SIMULATED_ZE_TOTAL_BYTES", (uint64_t)8 << 30);
  }
  world.stale_byte = 0xd7;
  world.import_limit = SIZE_MAX;
  world.eager = world.frozen = 0;
  world.pointer_type = -1;
  world.imports_exist = world.sysman = 1;
}

/* The loader asks for devices as soon as it has the driver. */
__attribute__((constructor)) void set_up(void) {
  defaults();
  world.n_devices = (uint32_t)from_environment("SIMULATED_ZE_DEVICES", 1);
  if (world.n_devices > MAX_DEVICES) world.n_devices = MAX_DEVICES;
}

/* Free everything, and have no devices. */
EXPORT void ze_sim_reset(void) {
  pthread_mutex_lock(&lock);
  free_queues();
  free_memory();
  while (world.objects) forget(world.objects);
  memset(counts, 0, sizeof counts);
  memset(faults, 0, sizeof faults);
  memset(violations, 0, sizeof violations);
  defaults();
  world.n_devices = 0;
  pthread_mutex_unlock(&lock);
}

/* Change a setting, of a device or of all; returns 0 if there is none of the name. */
EXPORT int ze_sim_set(const char *name, int device, uint64_t value) {
  pthread_mutex_lock(&lock);
  int known_name = 1;
  if (device < 0 || device >= MAX_DEVICES) known_name = 0;
  else if (!strcmp(name, "devices")) world.n_devices = (uint32_t)value;
  else if (!strcmp(name, "total_bytes")) devices[device].total = value;
  else if (!strcmp(name, "taken_bytes")) devices[device].taken = value;
  else if (!strcmp(name, "page_bytes")) devices[device].unit = value;
  else if (!strcmp(name, "device_type")) devices[device].type = (uint32_t)value;
  else if (!strcmp(name, "stale_byte")) world.stale_byte = (int)value;
  else if (!strcmp(name, "import_limit_bytes")) world.import_limit = value;
  else if (!strcmp(name, "eager")) world.eager = (int)value;
  else if (!strcmp(name, "frozen")) world.frozen = (int)value;
  else if (!strcmp(name, "pointer_type")) world.pointer_type = (int)value;
  else if (!strcmp(name, "imports_exist")) world.imports_exist = (int)value;
  else if (!strcmp(name, "sysman")) world.sysman = (int)value;
  else known_name = 0;
  pthread_mutex_unlock(&lock);
  return known_name;
}

/* Let calls fail without doing anything; "queuedCopy" is the moment in which queued work runs, and
 * then breaks the device. Returns 0 if there is no room for another. */
EXPORT int ze_sim_fail(const char *name, uint64_t nth, uint64_t times, Result code) {
  pthread_mutex_lock(&lock);
  int placed = 0;
  for (size_t i = 0; i < FAULTS && !placed; i++) {
    if (faults[i].times) continue;
    memset(faults[i].name, 0, sizeof faults[i].name);
    strncpy(faults[i].name, name, sizeof faults[i].name - 1);
    faults[i].nth = nth, faults[i].times = times, faults[i].code = code;
    placed = 1;
  }
  pthread_mutex_unlock(&lock);
  return placed;
}

EXPORT void ze_sim_clear_faults(void) {
  pthread_mutex_lock(&lock);
  memset(faults, 0, sizeof faults);
  pthread_mutex_unlock(&lock);
}

EXPORT uint64_t ze_sim_calls(const char *name) {
  uint64_t found = 0;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < NAMES; i++)
    if (!strcmp(counts[i].name, name)) found = counts[i].calls;
  pthread_mutex_unlock(&lock);
  return found;
}

EXPORT uint64_t ze_sim_violations(int kind) {
  pthread_mutex_lock(&lock);
  uint64_t found = kind >= 0 && kind < VIOLATIONS ? violations[kind] : UINT64_MAX;
  pthread_mutex_unlock(&lock);
  return found;
}

static uint64_t count_objects(Kind kind) {
  uint64_t n = 0;
  for (Object *object = world.objects; object; object = object->next) n += object->kind == kind;
  return n;
}

static uint64_t count_engines(void) {
  uint64_t n = 0;
  for (int i = 0; i < MAX_DEVICES; i++) n += world.engines[i] != NULL;
  return n;
}

/* A figure by its name; all ones if there is none. */
EXPORT uint64_t ze_sim_usage(const char *name, int device) {
  uint64_t found = 0;
  pthread_mutex_lock(&lock);
  if (!strcmp(name, "used_bytes")) found = devices[device].committed;
  else if (!strcmp(name, "handles")) found = count_objects(PHYSICAL);
  else if (!strcmp(name, "lists")) found = count_objects(LIST) - count_engines();
  else if (!strcmp(name, "pools")) found = count_objects(POOL);
  else if (!strcmp(name, "events")) found = count_objects(EVENT);
  else if (!strcmp(name, "contexts")) found = count_objects(CONTEXT);
  else if (!strcmp(name, "imported_bytes")) found = world.imported;
  else if (!strcmp(name, "reserved_bytes")) {
    for (Reserved *each = world.reserved; each; each = each->next) found += each->size;
  } else if (!strcmp(name, "queued")) {
    for (Object *object = world.objects; object; object = object->next)
      for (Work *work = object->kind == LIST ? ((List *)object)->work : NULL; work; work = work->next) found++;
  } else found = UINT64_MAX;
  pthread_mutex_unlock(&lock);
  return found;
}

/* The start of the nth mapping; NULL after the last. */
EXPORT void *ze_sim_mapping(size_t n) {
  char *found = NULL;
  pthread_mutex_lock(&lock);
  for (Reserved *each = world.reserved; each && !found; each = each->next)
    for (Map *map = each->maps; map && !found; map = map->next)
      if (!n--) found = map->start;
  pthread_mutex_unlock(&lock);
  return found;
}

/* ---- somebody else's kernels, as those of torch ---- */

/* Queue a kernel that writes a byte everywhere in a range. */
EXPORT void ze_sim_engine_write(int device, void *address, size_t size, int byte) {
  pthread_mutex_lock(&lock);
  if (!world.engines[device]) {
    world.engines[device] = make(LIST, sizeof(List));
    world.engines[device]->device = &devices[device];
  }
  Work **at = &world.engines[device]->work;
  while (*at) at = &(*at)->next;
  *at = calloc(1, sizeof **at);
  **at = (Work){.what = FILL, .target = address, .size = size, .pattern = {(unsigned char)byte}, .pattern_size = 1};
  pthread_mutex_unlock(&lock);
}

/* Wait for all of them on a device. */
EXPORT void ze_sim_engine_wait(int device) {
  pthread_mutex_lock(&lock);
  record_call("engineWait");
  if (world.engines[device]) run(world.engines[device], NULL);
  pthread_mutex_unlock(&lock);
}

/* Read device memory behind the driver's back; returns 0 if it is not there. */
EXPORT int ze_sim_read(void *target, const void *address, size_t size) {
  pthread_mutex_lock(&lock);
  const char *bytes = is_reserved(address) ? translate(address, size, 0) : NULL;
  if (bytes) memcpy(target, bytes, size);
  pthread_mutex_unlock(&lock);
  return bytes != NULL;
}
