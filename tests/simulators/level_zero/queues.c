/* Immediate command lists and events. Work waits in its list until somebody waits for an event. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

static int touches(const char *start, size_t size, const char *other, size_t other_size) {
  return start < other + other_size && other < start + size;
}

static int needs_of(const List *list, const char *start, size_t size) {
  for (const Work *work = list->work; work; work = work->next) {
    if (work->what == BARRIER) continue;
    if (touches(start, size, work->target, work->size)) return 1;
    if (work->what == COPY && touches(start, size, work->source, work->size)) return 1;
  }
  return 0;
}

int needs(const char *start, size_t size) {
  for (const Object *object = world.objects; object; object = object->next)
    if (object->kind == LIST && needs_of((const List *)object, start, size)) return 1;
  return 0;
}

static void do_one(List *list, const Work *work) {
  Device *device = list->device;
  if (device->lost || work->what == BARRIER) return;
  device->lost = (int)record_call("queuedCopy");
  if (device->lost) return;
  char *target = translate(work->target, work->size, 1);
  const char *source = work->what == COPY ? translate(work->source, work->size, 0) : "";
  if (!target || !source) {
    violate(WORK_FAULTED);
    device->lost = DEVICE_LOST;
  } else if (work->what == COPY) {
    memmove(target, source, work->size);
  } else {
    for (size_t i = 0; i < work->size; i += work->pattern_size)
      memcpy(target + i, work->pattern, work->size - i < work->pattern_size ? work->size - i : work->pattern_size);
  }
}

static void finish(Work *work) {
  if (work->signal) {
    work->signal->signalled = 1;
    work->signal->pending = NULL;
  }
  free(work);
}

/* Do what stands before the next barrier, last things first, and then the barrier. */
static void run_up_to_barrier(List *list) {
  Work *reversed = NULL, *work;
  while ((work = list->work) && work->what != BARRIER) {
    list->work = work->next;
    work->next = reversed;
    reversed = work;
  }
  while ((work = reversed)) {
    reversed = work->next;
    do_one(list, work);
    finish(work);
  }
  if ((work = list->work)) {
    list->work = work->next;
    finish(work);
  }
}

void run(List *list, const Event *until) {
  while (list->work && (!until || until->pending == list)) run_up_to_barrier(list);
}

static void drop_work(List *list) {
  for (Work *work; (work = list->work);) {
    list->work = work->next;
    if (work->signal) work->signal->pending = NULL;
    free(work);
  }
}

void free_queues(void) {
  for (Object *object = world.objects; object; object = object->next)
    if (object->kind == LIST) drop_work((List *)object);
  memset(world.engines, 0, sizeof world.engines);
}

typedef struct {
  int stype;
  const void *next;
  uint32_t ordinal, index, flags, mode, priority;
} QueueDesc;

Result zeCommandListCreateImmediate(void *context, void *handle, const QueueDesc *desc, void **out) {
  ENTER();
  Result why;
  Device *device = usable(handle, &why);
  if (why) LEAVE(why);
  if (!known(context, CONTEXT) || desc->stype != 0xe) LEAVE(INVALID_ARGUMENT);
  if (desc->ordinal >= GROUPS || desc->index >= QUEUES[desc->ordinal]) LEAVE(INVALID_ARGUMENT);
  List *list = make(LIST, sizeof *list);
  list->device = device;
  list->synchronous = desc->mode == 1;
  *out = list;
  LEAVE(SUCCESS);
}

Result zeCommandListDestroy(void *handle) {
  ENTER();
  List *list = known(handle, LIST);
  if (!list) LEAVE(INVALID_ARGUMENT);
  if (list->work && !list->device->lost) violate(DESTROYED_IN_USE);
  drop_work(list);
  forget(list);
  LEAVE(SUCCESS);
}

/* Queue a copy of the work. */
static Result append(void *handle, const Work *what, void *signal, uint32_t n_waits) {
  List *list = known(handle, LIST);
  Event *event = signal ? known(signal, EVENT) : NULL;
  if (!list || (signal && !event) || n_waits) return INVALID_ARGUMENT;
  if (list->device->lost) return (Result)list->device->lost;
  if (event && event->pending) violate(DESTROYED_IN_USE);
  Work *work = malloc(sizeof *work), **at = &list->work;
  *work = *what;
  work->signal = event;
  if (event) event->pending = list;
  while (*at) at = &(*at)->next;
  *at = work;
  if (list->synchronous) run(list, NULL);
  return list->synchronous ? (Result)list->device->lost : SUCCESS;
}

Result zeCommandListAppendMemoryCopy(void *list, void *target, const void *source, size_t size, void *signal,
                                     uint32_t n_waits, void **waits) {
  (void)waits;
  ENTER();
  if (!target || !source) LEAVE(INVALID_NULL_POINTER);
  LEAVE(append(list, &(Work){.what = COPY, .target = target, .source = source, .size = size}, signal, n_waits));
}

Result zeCommandListAppendMemoryFill(void *list, void *target, const void *pattern, size_t pattern_size, size_t size,
                                     void *signal, uint32_t n_waits, void **waits) {
  (void)waits;
  ENTER();
  if (!target || !pattern) LEAVE(INVALID_NULL_POINTER);
  if (!pattern_size || pattern_size > 16 || pattern_size & (pattern_size - 1)) LEAVE(UNSUPPORTED_SIZE);
  Work work = {.what = FILL, .target = target, .size = size, .pattern_size = pattern_size};
  memcpy(work.pattern, pattern, pattern_size);
  LEAVE(append(list, &work, signal, n_waits));
}

Result zeCommandListAppendBarrier(void *list, void *signal, uint32_t n_waits, void **waits) {
  (void)waits;
  ENTER();
  LEAVE(append(list, &(Work){.what = BARRIER}, signal, n_waits));
}

/* ---- events ---- */

typedef struct {
  int stype;
  const void *next;
  uint32_t flags, count;
} PoolDesc;

Result zeEventPoolCreate(void *context, const PoolDesc *desc, uint32_t n, void **of, void **out) {
  (void)n, (void)of;
  ENTER();
  if (!known(context, CONTEXT) || desc->stype != 0x10 || !desc->count) LEAVE(INVALID_ARGUMENT);
  if (!(desc->flags & 1)) LEAVE(INVALID_ARGUMENT); /* the host could not look at its events */
  Pool *pool = make(POOL, sizeof *pool);
  pool->count = desc->count;
  *out = pool;
  LEAVE(SUCCESS);
}

Result zeEventPoolDestroy(void *handle) {
  ENTER();
  Pool *pool = known(handle, POOL);
  if (!pool) LEAVE(INVALID_ARGUMENT);
  for (Object *object = world.objects; object; object = object->next)
    if (object->kind == EVENT && ((Event *)object)->pool == pool) LEAVE(IN_USE);
  forget(pool);
  LEAVE(SUCCESS);
}

typedef struct {
  int stype;
  const void *next;
  uint32_t index, signal, wait;
} EventDesc;

Result zeEventCreate(void *handle, const EventDesc *desc, void **out) {
  ENTER();
  Pool *pool = known(handle, POOL);
  if (!pool || desc->stype != 0x11 || desc->index >= pool->count) LEAVE(INVALID_ARGUMENT);
  if (!(desc->signal & 4)) LEAVE(INVALID_ARGUMENT); /* the host might see it before the bytes */
  for (Object *object = world.objects; object; object = object->next)
    if (object->kind == EVENT && ((Event *)object)->pool == pool && ((Event *)object)->index == desc->index)
      LEAVE(INVALID_ARGUMENT);
  Event *event = make(EVENT, sizeof *event);
  event->pool = pool;
  event->index = desc->index;
  *out = event;
  LEAVE(SUCCESS);
}

Result zeEventDestroy(void *handle) {
  ENTER();
  Event *event = known(handle, EVENT);
  if (!event) LEAVE(INVALID_ARGUMENT);
  if (event->pending && !event->pending->device->lost) violate(DESTROYED_IN_USE);
  for (Work *work = event->pending ? event->pending->work : NULL; work; work = work->next)
    if (work->signal == event) work->signal = NULL;
  forget(event);
  LEAVE(SUCCESS);
}

Result zeEventHostReset(void *handle) {
  ENTER();
  Event *event = known(handle, EVENT);
  if (!event) LEAVE(INVALID_ARGUMENT);
  if (event->pending) violate(DESTROYED_IN_USE);
  event->signalled = 0;
  LEAVE(SUCCESS);
}

Result zeEventHostSignal(void *handle) {
  ENTER();
  Event *event = known(handle, EVENT);
  if (!event) LEAVE(INVALID_ARGUMENT);
  event->signalled = 1;
  LEAVE(SUCCESS);
}

static Result told(const Event *event, const List *list) {
  if (list && list->device->lost) return (Result)list->device->lost;
  return event->signalled ? SUCCESS : NOT_READY;
}

Result zeEventQueryStatus(void *handle) {
  ENTER();
  Event *event = known(handle, EVENT);
  if (!event) LEAVE(INVALID_ARGUMENT);
  List *list = event->pending;
  if (list && world.eager) run_up_to_barrier(list);
  LEAVE(told(event, list));
}

Result zeEventHostSynchronize(void *handle, uint64_t timeout) {
  (void)timeout;
  ENTER();
  Event *event = known(handle, EVENT);
  if (!event) LEAVE(INVALID_ARGUMENT);
  List *list = event->pending;
  if (list) run(list, event);
  else if (!event->signalled) violate(WAIT_FOR_NOTHING);
  LEAVE(told(event, list));
}
