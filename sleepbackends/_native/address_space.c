/* Device address space: allocation by tag, in plain C, for callers that must not wait for Python.
 *
 * torch calls its pluggable allocator with its own mutex held. A callback that needs the GIL
 * deadlocks with any thread that holds the GIL and asks torch for memory statistics, so
 * nothing here calls into Python. Python reads the table and asks for map and unmap through
 * ctypes, which gives the GIL up first. No torch, CUDA or Python headers: the driver is found
 * with dlopen.
 *
 * An extent is one reserved address range with one physical handle. Small requests of a tag
 * share an extent, because handles of 2 MiB cost 30 ms per GiB; a large request has its own.
 * All of an extent belongs to one tag and sleeps and wakes as a whole.
 *
 * Build: cc -O2 -Wall -Wextra -shared -fPIC -pthread -o libsleepbackends_cuda.so address_space.c -ldl
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DEVICES = 64, SMALL = 64 << 20, MIN_EXTENT = 2 << 20, MAX_EXTENT = 256 << 20 };

/* Our own answers, beside the driver's non-negative ones. */
enum { ERR_NO_LIBRARY = -1, ERR_NO_SYMBOL = -2, ERR_NO_HOST_MEMORY = -3, ERR_UNKNOWN = -4, ERR_STATE = -5 };

typedef int CUresult;
typedef void *CUcontext;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUhandle;

/* The driver's structs, by their documented layout in CUDA 12 and 13. */
typedef struct { int type, id; } Location;
typedef struct {
  int type, requested_handle_types;
  Location location;
  void *win32;
  struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
} AllocationProp;
typedef struct { Location location; int flags; } AccessDesc;

static struct {
  CUresult (*init)(unsigned);
  CUresult (*ctx_get)(CUcontext *);
  CUresult (*ctx_set)(CUcontext);
  CUresult (*ctx_sync)(void);
  CUresult (*primary_retain)(CUcontext *, int);
  CUresult (*attribute)(int *, int, int);
  CUresult (*granularity)(size_t *, const AllocationProp *, int);
  CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
  CUresult (*release_range)(CUdeviceptr, size_t);
  CUresult (*create)(CUhandle *, size_t, const AllocationProp *, unsigned long long);
  CUresult (*release)(CUhandle);
  CUresult (*map)(CUdeviceptr, size_t, size_t, CUhandle, unsigned long long);
  CUresult (*unmap)(CUdeviceptr, size_t);
  CUresult (*set_access)(CUdeviceptr, size_t, const AccessDesc *, size_t);
} cu;

typedef struct { size_t offset, size; } Piece;

typedef struct Extent {
  CUdeviceptr address;
  size_t size;
  CUhandle handle; /* 0: no physical memory */
  int device, space, tag, mapped;
  uint64_t id, generation; /* the generation changes with every piece that comes or goes */
  Piece *pieces;           /* in order of offset */
  size_t n_pieces, room;
} Extent;

/* What Python reads of an extent. */
typedef struct {
  uint64_t id, generation;
  CUdeviceptr address;
  size_t size, live;
  int device, tag, mapped, reserved;
} ExtentInfo;

/* One lock for the table. It is held across driver calls, which wait for no thread of this
 * process that could want it: the driver never calls back. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Extent **extents; /* in order of address */
static size_t n_extents, room;
static uint64_t last_id;
static int last_space;
static int *busy_spaces; /* spaces with a transition going on, which may hold extents back */
static size_t n_busy;

static struct { CUcontext context; AllocationProp prop; size_t granularity; } devices[MAX_DEVICES];

static _Thread_local int current_space, current_tag;
static _Thread_local CUresult last_error;

/* ---- the driver ---- */

int sb_init(const char *libcuda) {
  static int ready;
  pthread_mutex_lock(&lock);
  int r = 0;
  if (!ready) {
    void *lib = dlopen(libcuda, RTLD_NOW | RTLD_GLOBAL);
    struct { void **to; const char *name; } want[] = {
        {(void **)&cu.init, "cuInit"},
        {(void **)&cu.ctx_get, "cuCtxGetCurrent"},
        {(void **)&cu.ctx_set, "cuCtxSetCurrent"},
        {(void **)&cu.ctx_sync, "cuCtxSynchronize"},
        {(void **)&cu.primary_retain, "cuDevicePrimaryCtxRetain"},
        {(void **)&cu.attribute, "cuDeviceGetAttribute"},
        {(void **)&cu.granularity, "cuMemGetAllocationGranularity"},
        {(void **)&cu.reserve, "cuMemAddressReserve"},
        {(void **)&cu.release_range, "cuMemAddressFree"},
        {(void **)&cu.create, "cuMemCreate"},
        {(void **)&cu.release, "cuMemRelease"},
        {(void **)&cu.map, "cuMemMap"},
        {(void **)&cu.unmap, "cuMemUnmap"},
        {(void **)&cu.set_access, "cuMemSetAccess"},
    };
    if (!lib) r = ERR_NO_LIBRARY;
    for (size_t i = 0; !r && i < sizeof want / sizeof *want; i++)
      if (!(*want[i].to = dlsym(lib, want[i].name))) r = ERR_NO_SYMBOL;
    if (!r) r = cu.init(0);
    ready = !r;
  }
  pthread_mutex_unlock(&lock);
  return r;
}

/* Learn a device once: its primary context, whether GPUDirect RDMA wants a flag, the granularity. */
static CUresult learn(int device) {
  if (devices[device].context) return 0;
  AllocationProp prop;
  memset(&prop, 0, sizeof prop);
  prop.type = 1;          /* CU_MEM_ALLOCATION_TYPE_PINNED */
  prop.location.type = 1; /* CU_MEM_LOCATION_TYPE_DEVICE */
  prop.location.id = device;
  int rdma = 0; /* CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED; absent is no failure */
  if (!cu.attribute(&rdma, 110, device) && rdma) prop.flags.rdma = 1;
  size_t granularity = 0;
  CUresult r = cu.granularity(&granularity, &prop, 0 /* minimum */);
  CUcontext context;
  if (!r) r = cu.primary_retain(&context, device);
  if (r) return r;
  devices[device].prop = prop;
  devices[device].granularity = granularity > MIN_EXTENT ? granularity : MIN_EXTENT;
  devices[device].context = context;
  return 0;
}

/* Make the device's primary context current in this thread; `before` is what `leave` puts back. */
static CUresult enter(int device, CUcontext *before) {
  if (device < 0 || device >= MAX_DEVICES) return 101; /* CUDA_ERROR_INVALID_DEVICE */
  CUresult r = learn(device);
  if (!r) r = cu.ctx_get(before);
  return r || *before == devices[device].context ? r : cu.ctx_set(devices[device].context);
}

static void leave(int device, CUcontext before) {
  if (before != devices[device].context) cu.ctx_set(before);
}

/* ---- extents: the only places that create, map, unmap and release ---- */

static CUresult create_handle(Extent *e) {
  return e->handle ? 0 : cu.create(&e->handle, e->size, &devices[e->device].prop, 0);
}

static void release_handle(Extent *e) {
  CUhandle handle = e->handle;
  e->handle = 0;
  if (handle) cu.release(handle);
}

static CUresult map_extent(Extent *e) {
  AccessDesc access = {devices[e->device].prop.location, 3 /* read and write */};
  CUresult r = cu.map(e->address, e->size, 0, e->handle, 0);
  if (!r && (r = cu.set_access(e->address, e->size, &access, 1))) cu.unmap(e->address, e->size);
  e->mapped = !r;
  return r;
}

static CUresult unmap_extent(Extent *e) {
  CUresult r = cu.unmap(e->address, e->size);
  if (r) return r;
  e->mapped = 0;
  release_handle(e);
  return 0;
}

/* The first extent whose end is past the address. */
static size_t position(CUdeviceptr address) {
  size_t low = 0, high = n_extents;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (extents[middle]->address + extents[middle]->size > address) high = middle;
    else low = middle + 1;
  }
  return low;
}

static Extent *containing(CUdeviceptr address) {
  size_t at = position(address);
  return at < n_extents && extents[at]->address <= address ? extents[at] : NULL;
}

static Extent *by_id(uint64_t id) {
  for (size_t i = 0; i < n_extents; i++)
    if (extents[i]->id == id) return extents[i];
  return NULL;
}

static int is_busy(int space) {
  for (size_t i = 0; i < n_busy; i++)
    if (busy_spaces[i] == space) return 1;
  return 0;
}

/* Grow an array to hold one more; 0 if there is no host memory, and then nothing changed. */
static int grow(void *array, size_t size, size_t used, size_t *capacity) {
  if (used < *capacity) return 1;
  size_t more = *capacity ? *capacity * 2 : 16;
  void **slot = array, *grown = realloc(*slot, more * size);
  if (!grown) return 0;
  *slot = grown;
  *capacity = more;
  return 1;
}

static CUresult new_extent(size_t size, int device, Extent **out) {
  Extent *e = calloc(1, sizeof *e);
  if (!e || !grow(&extents, sizeof *extents, n_extents, &room) ||
      !grow(&e->pieces, sizeof *e->pieces, 0, &e->room)) {
    free(e);
    return ERR_NO_HOST_MEMORY;
  }
  e->size = size;
  e->device = device;
  e->space = current_space;
  e->tag = current_tag;
  CUresult r = cu.reserve(&e->address, size, 0, 0, 0);
  if (!r && (r = create_handle(e))) cu.release_range(e->address, size);
  else if (!r && (r = map_extent(e))) {
    release_handle(e);
    cu.release_range(e->address, size);
  }
  if (r) {
    free(e->pieces);
    free(e);
    return r;
  }
  e->id = ++last_id;
  size_t at = position(e->address);
  memmove(extents + at + 1, extents + at, (n_extents - at) * sizeof *extents);
  extents[at] = e;
  n_extents++;
  *out = e;
  return 0;
}

static void delete_extent(Extent *e) {
  CUcontext before;
  if (enter(e->device, &before)) return; /* a leak is better than a dangling pointer */
  /* Kernels that were launched before the free may still run. */
  if (e->mapped && (cu.ctx_sync() || unmap_extent(e))) {
    leave(e->device, before);
    return;
  }
  release_handle(e);
  cu.release_range(e->address, e->size);
  leave(e->device, before);
  size_t at = position(e->address);
  memmove(extents + at, extents + at + 1, (--n_extents - at) * sizeof *extents);
  free(e->pieces);
  free(e);
}

/* ---- pieces: what torch gets ---- */

/* Take a gap of the extent; the address, or 0. */
static CUdeviceptr take(Extent *e, size_t size) {
  size_t offset = 0, i = 0;
  for (; i < e->n_pieces && e->pieces[i].offset - offset < size; i++)
    offset = e->pieces[i].offset + e->pieces[i].size;
  if (offset + size > e->size || !grow(&e->pieces, sizeof *e->pieces, e->n_pieces, &e->room)) return 0;
  memmove(e->pieces + i + 1, e->pieces + i, (e->n_pieces - i) * sizeof *e->pieces);
  e->pieces[i] = (Piece){offset, size};
  e->n_pieces++;
  e->generation++;
  return e->address + offset;
}

/* An extent for small pieces grows with its tag, so that at most a quarter stands empty. */
static size_t shared_size(size_t size, int device) {
  size_t tag_bytes = 0, granularity = devices[device].granularity;
  for (size_t i = 0; i < n_extents; i++)
    if (extents[i]->space == current_space && extents[i]->tag == current_tag && extents[i]->device == device)
      tag_bytes += extents[i]->size;
  size_t want = tag_bytes / 4 < MAX_EXTENT ? tag_bytes / 4 : MAX_EXTENT;
  want = want > size ? want : size;
  return (want + granularity - 1) / granularity * granularity;
}

static CUresult allocate(size_t size, int device, CUdeviceptr *out) {
  size_t granularity = devices[device].granularity;
  size_t bytes = (size + granularity - 1) / granularity * granularity;
  Extent *e;
  *out = 0;
  /* While a transition goes on, what it moves must not gain a piece it does not know of. */
  if (bytes < SMALL && !is_busy(current_space))
    for (size_t i = 0; i < n_extents && !*out; i++) {
      e = extents[i];
      if (e->space == current_space && e->tag == current_tag && e->device == device && e->mapped)
        *out = take(e, bytes);
    }
  if (*out) return 0;
  CUresult r = new_extent(bytes < SMALL ? shared_size(bytes, device) : bytes, device, &e);
  if (r && bytes < SMALL) r = new_extent(bytes, device, &e); /* no room to be generous */
  if (!r) *out = take(e, bytes);
  return r;
}

/* torch's alloc and free. NULL makes torch raise its own out-of-memory error. */
void *sb_alloc(ptrdiff_t size, int device, void *stream) {
  (void)stream;
  CUcontext before;
  CUdeviceptr address = 0;
  if (size <= 0) return NULL;
  pthread_mutex_lock(&lock);
  last_error = enter(device, &before);
  if (!last_error) {
    last_error = allocate((size_t)size, device, &address);
    leave(device, before);
  }
  pthread_mutex_unlock(&lock);
  return (void *)(uintptr_t)address;
}

void sb_free(void *pointer, ptrdiff_t size, int device, void *stream) {
  (void)size, (void)device, (void)stream;
  CUdeviceptr address = (CUdeviceptr)(uintptr_t)pointer;
  pthread_mutex_lock(&lock);
  Extent *e = containing(address);
  for (size_t i = 0; e && i < e->n_pieces; i++)
    if (e->address + e->pieces[i].offset == address) {
      memmove(e->pieces + i, e->pieces + i + 1, (--e->n_pieces - i) * sizeof *e->pieces);
      e->generation++;
      /* Its bytes may be on their way: the end of the transition deletes it. */
      if (!e->n_pieces && !is_busy(e->space)) delete_extent(e);
      break;
    }
  pthread_mutex_unlock(&lock);
}

/* ---- what Python asks ---- */

int sb_new_space(void) {
  pthread_mutex_lock(&lock);
  int space = ++last_space;
  pthread_mutex_unlock(&lock);
  return space;
}

/* The space and tag of what this thread allocates from now on; 0, 0 for none of ours. */
void sb_enter_tag(int space, int tag) { current_space = space, current_tag = tag; }
void sb_current_tag(int *space, int *tag) { *space = current_space, *tag = current_tag; }

/* What the last failed allocation of this thread failed with. */
int sb_last_error(void) { return last_error; }

/* While a space is busy its extents are neither deleted nor given new pieces. */
int sb_begin(int space) {
  static size_t capacity;
  pthread_mutex_lock(&lock);
  int ok = grow(&busy_spaces, sizeof *busy_spaces, n_busy, &capacity);
  if (ok) busy_spaces[n_busy++] = space;
  pthread_mutex_unlock(&lock);
  return ok ? 0 : ERR_NO_HOST_MEMORY;
}

void sb_end(int space) {
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < n_busy; i++)
    if (busy_spaces[i] == space) {
      busy_spaces[i] = busy_spaces[--n_busy];
      break;
    }
  if (!is_busy(space))
    for (size_t i = n_extents; i-- > 0;)
      if (extents[i]->space == space && !extents[i]->n_pieces) delete_extent(extents[i]);
  pthread_mutex_unlock(&lock);
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
      out[n] = (ExtentInfo){e->id, e->generation, e->address, e->size, live, e->device, e->tag, e->mapped, 0};
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

/* Do one step of a transition to one extent; a driver error, or one of ours. */
int sb_step(uint64_t id, int step) {
  CUcontext before;
  pthread_mutex_lock(&lock);
  Extent *e = by_id(id);
  CUresult r = e ? enter(e->device, &before) : ERR_UNKNOWN;
  if (!r) {
    if (step == CREATE) r = e->mapped ? ERR_STATE : create_handle(e);
    else if (step == RELEASE && !e->mapped) release_handle(e);
    else if (step == MAP) r = e->mapped || !e->handle ? ERR_STATE : map_extent(e);
    else if (step == UNMAP) r = e->mapped ? unmap_extent(e) : ERR_STATE;
    else r = ERR_STATE;
    leave(e->device, before);
  }
  pthread_mutex_unlock(&lock);
  return r;
}
