/* Device address space: allocation by tag, in plain C, for callers that must not wait for Python.
 *
 * torch calls its pluggable allocator with its own mutex held. A callback that needs the GIL
 * deadlocks with any thread that holds the GIL and asks torch for memory statistics, so
 * nothing here calls into Python. Python reads the table and asks for map and unmap through
 * ctypes, which gives the GIL up first. No headers of torch, Python or a driver. The driver is behind
 * driver.h; each makes a library of its own.
 *
 * An extent is one reserved address range with one physical handle. Small requests of a tag
 * share an extent, because handles of 2 MiB cost 30 ms per GiB; a large request has its own.
 * All of an extent belongs to one tag of one space (one backend) and sleeps and wakes as a whole.
 *
 * What fails while memory is given back stays in the table and is tried again at the end of the
 * next transition, so that nothing is ever forgotten.
 *
 * Build: cc -std=c11 -D_GNU_SOURCE -O2 -shared -fPIC -pthread -o libsleepbackends_cuda.so \
 *          address_space.c driver_cuda.c -ldl
 */
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SHARED = 256 << 20 };

typedef struct { size_t offset, size; } Piece; /* the size is what was asked for */

enum { UNMAPPED, NO_ACCESS, USABLE };

typedef struct {
  Address address;
  size_t size;
  Handle handle; /* 0: no physical memory */
  int device, space, tag, state;
  uint64_t id, generation; /* the generation changes with every piece that comes or goes */
  uint64_t born;           /* how many transitions its space had begun */
  Piece *pieces;           /* in order of offset */
  size_t n_pieces, room;
} Extent;

typedef struct {
  size_t share_below; /* smaller requests share extents */
  size_t keep_free;   /* what allocations leave of a device to others */
  uint64_t begun;     /* transitions so far */
  int busy;           /* one is going on and may hold extents back */
} Space;

/* What Python reads of an extent. */
typedef struct {
  uint64_t id, generation;
  Address address;
  size_t size, live;
  int device, tag;
} ExtentInfo;

/* One lock for the table. It is held across driver calls, but not while waiting for kernels: those
 * may wait for work that another thread of this process has yet to queue. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Extent **extents; /* in order of address */
static size_t n_extents, room;
static uint64_t last_id;
static uint64_t changes; /* of the extents there are and of their pieces */
static Space *spaces; /* the first is for what is allocated outside of any tag */
static size_t n_spaces, spaces_room;

static _Thread_local int current_space, current_tag;
static _Thread_local Result last_error;

/* Return an array, moved if need be, with room for one more; NULL if there is no host memory, and
 * then the old one still holds. */
static void *grown(void *array, size_t size, size_t used, size_t *capacity) {
  if (used < *capacity) return array;
  size_t more = *capacity ? *capacity * 2 : 16;
  void *moved = realloc(array, more * size);
  if (moved) *capacity = more;
  return moved;
}

static int add_space(size_t share_below) {
  Space *moved = grown(spaces, sizeof *spaces, n_spaces, &spaces_room);
  if (!moved) return 0;
  spaces = moved;
  spaces[n_spaces++] = (Space){.share_below = share_below};
  return 1;
}

static size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

/* ---- the driver ---- */

/* A fork must not copy the lock while somebody holds it. The child has no driver. */
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }

Result find_symbols(const char *library, const Wanted *wanted, size_t count) {
  void *lib = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
  if (!lib) return ERR_NO_LIBRARY;
  for (size_t i = 0; i < count; i++) {
    void *found = dlsym(lib, wanted[i].name);
    if (!found) return ERR_NO_SYMBOL;
    memcpy(wanted[i].to, &found, sizeof found);
  }
  return 0;
}

int sb_init(const char *library) {
  static int ready;
  pthread_mutex_lock(&lock);
  Result r = 0;
  if (!ready) {
    r = driver_load(library);
    if (!r && (!add_space(0) || pthread_atfork(before_fork, after_fork, after_fork))) r = ERR_NO_HOST_MEMORY;
    ready = !r;
  }
  pthread_mutex_unlock(&lock);
  return r;
}

/* ---- extents: the only places that create, map, unmap and release ---- */

static Result create_handle(Extent *e) {
  return e->handle ? 0 : driver_create(e->device, &e->handle, e->size);
}

static Result unmap_extent(Extent *e) {
  Result r = e->state == UNMAPPED ? 0 : driver_unmap(e->device, e->address, e->size);
  if (!r) e->state = UNMAPPED;
  return r;
}

static Result release_handle(Extent *e) {
  Result r = e->handle ? driver_release(e->device, e->handle, e->size) : 0;
  if (!r) e->handle = 0;
  return r;
}

/* What is mapped and not usable is a leftover, or is finished by the next try. */
static Result map_extent(Extent *e) {
  Result r = e->state == UNMAPPED ? driver_map(e->device, e->address, e->size, e->handle) : 0;
  if (r) return r;
  e->state = NO_ACCESS;
  r = driver_allow(e->device, e->address, e->size);
  if (!r) e->state = USABLE;
  return r;
}

/* The first extent whose end is past the address. */
static size_t position(Address address) {
  size_t low = 0, high = n_extents;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (extents[middle]->address + extents[middle]->size > address) high = middle;
    else low = middle + 1;
  }
  return low;
}

static Extent *containing(Address address) {
  size_t at = position(address);
  return at < n_extents && extents[at]->address <= address ? extents[at] : NULL;
}

/* Whoever asks goes through the table more often than not, so the search begins where the last ended. */
static Extent *by_id(uint64_t id) {
  static size_t at;
  for (size_t i = 0; i < n_extents; i++, at++) {
    if (at >= n_extents) at = 0;
    if (extents[at]->id == id) return extents[at];
  }
  return NULL;
}

static void remove_extent(Extent *e) {
  size_t at = position(e->address);
  memmove(extents + at, extents + at + 1, (--n_extents - at) * sizeof *extents);
  changes++;
  free(e->pieces);
  free(e);
}

/* Give back all that an extent without pieces holds, its place in the table last. */
static void dismantle(Extent *e) {
  if (unmap_extent(e) || release_handle(e) || driver_release_range(e->device, e->address, e->size)) return;
  remove_extent(e);
}

/* Whether the device can give so much and keep free what the space leaves to others. */
static Result check_left_free(int device, size_t size) {
  size_t keep = spaces[current_space].keep_free, available = 0;
  Result r = keep ? driver_free_bytes(device, &available) : 0;
  if (r || !keep) return r;
  return available < keep || available - keep < size ? DRIVER_NO_ROOM : 0;
}

static Result new_extent(size_t size, int device, Extent **out) {
  Extent **moved = grown(extents, sizeof *extents, n_extents, &room), *e;
  if (!moved) return ERR_NO_HOST_MEMORY;
  extents = moved;
  Result r = check_left_free(device, size);
  if (r) return r;
  if (!(e = calloc(1, sizeof *e))) return ERR_NO_HOST_MEMORY;
  e->size = size;
  e->device = device;
  e->space = current_space;
  e->tag = current_tag;
  e->born = spaces[current_space].begun;
  r = driver_reserve(device, &e->address, size);
  if (r) {
    free(e);
    return r;
  }
  e->id = ++last_id;
  size_t at = position(e->address);
  memmove(extents + at + 1, extents + at, (n_extents - at) * sizeof *extents);
  extents[at] = e;
  n_extents++;
  changes++;
  r = create_handle(e);
  if (!r) r = map_extent(e);
  if (r) dismantle(e);
  *out = e;
  return r;
}

/* Delete an extent if it has no pieces and no transition holds it back. Gives the lock up while
 * kernels that were launched before the free may still run. */
static void delete_if_empty(uint64_t id) {
  void *before;
  Extent *e = by_id(id);
  if (!e || e->n_pieces || spaces[e->space].busy || driver_enter(e->device, &before)) return;
  int device = e->device;
  uint64_t generation = e->generation;
  Result r = 0;
  if (e->state == USABLE) {
    pthread_mutex_unlock(&lock);
    r = driver_wait(device);
    pthread_mutex_lock(&lock);
    e = by_id(id);
  }
  if (!r && e && e->generation == generation && !spaces[e->space].busy) dismantle(e);
  driver_leave(device, before);
}

/* ---- pieces: what torch gets ---- */

/* Take a gap of the extent; the address, or 0. */
static Address take(Extent *e, size_t size) {
  size_t unit = driver_granule(e->device), bytes = round_up(size, unit), offset = 0, i = 0;
  for (; i < e->n_pieces && e->pieces[i].offset - offset < bytes; i++)
    offset = e->pieces[i].offset + round_up(e->pieces[i].size, unit);
  if (offset + bytes > e->size) return 0;
  Piece *moved = grown(e->pieces, sizeof *e->pieces, e->n_pieces, &e->room);
  if (!moved) return 0;
  e->pieces = moved;
  memmove(e->pieces + i + 1, e->pieces + i, (e->n_pieces - i) * sizeof *e->pieces);
  e->pieces[i] = (Piece){offset, size};
  e->n_pieces++;
  e->generation++;
  changes++;
  return e->address + offset;
}

/* Whether this thread's next piece may go there. What a transition moves must not gain a piece that
 * the transition does not know of. */
static int may_share(const Extent *e, int device) {
  const Space *space = &spaces[current_space];
  return e->space == current_space && e->tag == current_tag && e->device == device &&
         e->state == USABLE && (!space->busy || e->born == space->begun);
}

/* An extent for small pieces grows with what its tag holds, by a quarter of that. What stands empty does not
 * count: an extent made during every transition, of which little is left, would be a quarter larger each time. */
static size_t shared_size(size_t size, int device) {
  size_t live = 0;
  for (size_t i = 0; i < n_extents; i++) {
    const Extent *e = extents[i];
    if (e->space != current_space || e->tag != current_tag || e->device != device) continue;
    for (size_t p = 0; p < e->n_pieces; p++) live += e->pieces[p].size;
  }
  size_t want = live / 4 < MAX_SHARED ? live / 4 : MAX_SHARED;
  return driver_extent_size(device, want > size ? want : size);
}

static Result allocate(size_t size, int device, Address *out) {
  size_t bytes = driver_extent_size(device, size);
  int shares = bytes < spaces[current_space].share_below;
  Extent *e;
  *out = 0;
  if (!bytes) return DRIVER_NO_ROOM; /* more than there are addresses */
  for (size_t i = 0; shares && i < n_extents && !*out; i++)
    if (may_share(extents[i], device)) *out = take(extents[i], size);
  if (*out) return 0;
  Result r = new_extent(shares ? shared_size(bytes, device) : bytes, device, &e);
  if (r && shares) r = new_extent(bytes, device, &e); /* no room to be generous */
  if (r) return r;
  *out = take(e, size);
  if (*out) return 0;
  dismantle(e);
  return ERR_NO_HOST_MEMORY;
}

/* torch's alloc and free. NULL makes torch raise its own out-of-memory error. */
void *sb_alloc(ptrdiff_t size, int device, void *stream) {
  (void)stream;
  void *before;
  Address address = 0;
  if (size <= 0) return NULL;
  pthread_mutex_lock(&lock);
  last_error = driver_enter(device, &before);
  if (!last_error) {
    last_error = allocate((size_t)size, device, &address);
    driver_leave(device, before);
  }
  pthread_mutex_unlock(&lock);
  return (void *)(uintptr_t)address;
}

void sb_free(void *pointer, ptrdiff_t size, int device, void *stream) {
  (void)size, (void)device, (void)stream;
  Address address = (Address)(uintptr_t)pointer;
  pthread_mutex_lock(&lock);
  Extent *e = containing(address);
  for (size_t i = 0; e && i < e->n_pieces; i++)
    if (e->address + e->pieces[i].offset == address) {
      memmove(e->pieces + i, e->pieces + i + 1, (--e->n_pieces - i) * sizeof *e->pieces);
      e->generation++;
      changes++;
      /* Its bytes may be on their way: then the end of the transition deletes it. */
      delete_if_empty(e->id);
      break;
    }
  pthread_mutex_unlock(&lock);
}

/* ---- what Python asks ---- */

/* Make a space and return its number, or an error. */
int sb_new_space(size_t share_below) {
  pthread_mutex_lock(&lock);
  int space = add_space(share_below) ? (int)n_spaces - 1 : ERR_NO_HOST_MEMORY;
  pthread_mutex_unlock(&lock);
  return space;
}

/* Have allocations in a space fail where they would leave less of a device free; 0 asks for nothing.
 * Waking up takes what it needs. */
void sb_keep_free(int space, size_t size) {
  pthread_mutex_lock(&lock);
  spaces[space].keep_free = size;
  pthread_mutex_unlock(&lock);
}

/* The space and tag of what this thread allocates from now on; 0, 0 for none of ours. */
void sb_enter_tag(int space, int tag) { current_space = space, current_tag = tag; }
void sb_current_tag(int *space, int *tag) { *space = current_space, *tag = current_tag; }

/* What the last failed allocation of this thread failed with. */
int sb_last_error(void) { return last_error; }

/* While a space is busy its extents are not deleted, and those it had get no new pieces. */
void sb_begin(int space) {
  pthread_mutex_lock(&lock);
  spaces[space].busy = 1;
  spaces[space].begun++;
  pthread_mutex_unlock(&lock);
}

/* The next extent of a space, by id, that holds something it should not. */
static Extent *next_leftover(int space, uint64_t after) {
  Extent *next = NULL;
  for (size_t i = 0; i < n_extents; i++) {
    Extent *e = extents[i];
    int leftover = e->space == space && e->id > after && (!e->n_pieces || (e->handle && e->state != USABLE));
    if (leftover && (!next || e->id < next->id)) next = e;
  }
  return next;
}

void sb_end(int space) {
  void *before;
  pthread_mutex_lock(&lock);
  spaces[space].busy = 0;
  uint64_t id = 0;
  for (Extent *e; (e = next_leftover(space, id));) {
    id = e->id;
    if (!e->n_pieces) delete_if_empty(id);
    else if (!driver_enter(e->device, &before)) {
      int device = e->device;
      if (!unmap_extent(e)) release_handle(e);
      driver_leave(device, before);
    }
  }
  pthread_mutex_unlock(&lock);
}

/* A number that is another one whenever `sb_extents` would answer otherwise than before. */
uint64_t sb_changes(void) {
  pthread_mutex_lock(&lock);
  uint64_t n = changes;
  pthread_mutex_unlock(&lock);
  return n;
}

/* Copy out up to `most` extents of a space; returns how many there are. */
size_t sb_extents(int space, ExtentInfo *out, size_t most) {
  size_t n = 0;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < n_extents; i++) {
    Extent *e = extents[i];
    if (e->space != space) continue;
    if (n < most) {
      size_t live = 0;
      for (size_t p = 0; p < e->n_pieces; p++) live += e->pieces[p].size;
      out[n] = (ExtentInfo){e->id, e->generation, e->address, e->size, live, e->device, e->tag};
    }
    n++;
  }
  pthread_mutex_unlock(&lock);
  return n;
}

/* Copy out up to `most` live pieces of an extent, neighbours merged; returns how many, or an error. */
long sb_pieces(uint64_t id, Piece *out, size_t most) {
  pthread_mutex_lock(&lock);
  Extent *e = by_id(id);
  long n = e ? 0 : ERR_UNKNOWN;
  for (size_t i = 0; e && i < e->n_pieces; i++) {
    Piece piece = e->pieces[i];
    if (n && (size_t)n <= most && out[n - 1].offset + out[n - 1].size == piece.offset) {
      out[n - 1].size += piece.size;
      continue;
    }
    if ((size_t)n < most) out[n] = piece;
    n++;
  }
  pthread_mutex_unlock(&lock);
  return n;
}

enum { CREATE, RELEASE, MAP, UNMAP };

static Result step_once(uint64_t id, int step) {
  void *before;
  pthread_mutex_lock(&lock);
  Extent *e = by_id(id);
  Result r = e ? driver_enter(e->device, &before) : ERR_UNKNOWN;
  if (!r) {
    int usable = e->state == USABLE;
    if (step == CREATE) r = usable ? ERR_STATE : create_handle(e);
    else if (step == MAP) r = usable || !e->handle ? ERR_STATE : map_extent(e);
    else if (step == UNMAP || step == RELEASE) {
      r = usable == (step == UNMAP) ? unmap_extent(e) : ERR_STATE;
      /* A handle that cannot be released now is a leftover for the end of the transition. */
      if (!r) release_handle(e);
    } else r = ERR_STATE;
    driver_leave(e->device, before);
  }
  pthread_mutex_unlock(&lock);
  return r;
}

/* Do one step of a busy space to some extents, until one fails: with a driver error, or one of ours.
 * `done` follows how many it was done to. Others get their turn between two of them. */
int sb_steps(const uint64_t *ids, size_t count, int step, size_t *done) {
  Result r = 0;
  for (*done = 0; *done < count && !(r = step_once(ids[*done], step));) ++*done;
  return r;
}
