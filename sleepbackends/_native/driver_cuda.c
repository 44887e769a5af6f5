/* Device memory of address_space.c over the CUDA driver, found with dlopen: no CUDA headers. */
#include "driver.h"

#include <string.h>

typedef void *CUcontext;

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
  Result (*init)(unsigned);
  Result (*ctx_get)(CUcontext *);
  Result (*ctx_set)(CUcontext);
  Result (*ctx_sync)(void);
  Result (*primary_retain)(CUcontext *, int);
  Result (*attribute)(int *, int, int);
  Result (*memory_info)(size_t *, size_t *);
  Result (*granularity)(size_t *, const AllocationProp *, int);
  Result (*reserve)(Address *, size_t, size_t, Address, unsigned long long);
  Result (*release_range)(Address, size_t);
  Result (*create)(Handle *, size_t, const AllocationProp *, unsigned long long);
  Result (*release)(Handle);
  Result (*map)(Address, size_t, size_t, Handle, unsigned long long);
  Result (*unmap)(Address, size_t);
  Result (*set_access)(Address, size_t, const AccessDesc *, size_t);
} cu;

static struct { CUcontext context; AllocationProp prop; size_t granularity; } devices[MAX_DEVICES];

const Result DRIVER_NO_ROOM = 2; /* CUDA_ERROR_OUT_OF_MEMORY */

Result driver_load(const char *library) {
  const Wanted wanted[] = {
      {&cu.init, "cuInit"},
      {&cu.ctx_get, "cuCtxGetCurrent"},
      {&cu.ctx_set, "cuCtxSetCurrent"},
      {&cu.ctx_sync, "cuCtxSynchronize"},
      {&cu.primary_retain, "cuDevicePrimaryCtxRetain"},
      {&cu.attribute, "cuDeviceGetAttribute"},
      {&cu.memory_info, "cuMemGetInfo_v2"},
      {&cu.granularity, "cuMemGetAllocationGranularity"},
      {&cu.reserve, "cuMemAddressReserve"},
      {&cu.release_range, "cuMemAddressFree"},
      {&cu.create, "cuMemCreate"},
      {&cu.release, "cuMemRelease"},
      {&cu.map, "cuMemMap"},
      {&cu.unmap, "cuMemUnmap"},
      {&cu.set_access, "cuMemSetAccess"},
  };
  Result r = find_symbols(library, wanted, sizeof wanted / sizeof *wanted);
  return r ? r : cu.init(0);
}

/* Learn a device once: its primary context, whether GPUDirect RDMA wants a flag, the granularity. */
static Result learn(int device) {
  if (devices[device].context) return 0;
  AllocationProp prop;
  memset(&prop, 0, sizeof prop);
  prop.type = 1;          /* CU_MEM_ALLOCATION_TYPE_PINNED */
  prop.location.type = 1; /* CU_MEM_LOCATION_TYPE_DEVICE */
  prop.location.id = device;
  int rdma = 0; /* CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED; absent is no failure */
  if (!cu.attribute(&rdma, 110, device) && rdma) prop.flags.rdma = 1;
  size_t granularity = 0;
  Result r = cu.granularity(&granularity, &prop, 0 /* minimum */);
  CUcontext context;
  if (!r) r = cu.primary_retain(&context, device);
  if (r) return r;
  devices[device].prop = prop;
  devices[device].granularity = granularity;
  devices[device].context = context;
  return 0;
}

/* The device's primary context is made current. */
Result driver_enter(int device, void **before) {
  if (device < 0 || device >= MAX_DEVICES) return 101; /* CUDA_ERROR_INVALID_DEVICE */
  Result r = learn(device);
  if (!r) r = cu.ctx_get(before);
  return r || *before == devices[device].context ? r : cu.ctx_set(devices[device].context);
}

void driver_leave(int device, void *before) {
  if (before != devices[device].context) cu.ctx_set(before);
}

size_t driver_granule(int device) { return devices[device].granularity; }

size_t driver_extent_size(int device, size_t size) {
  size_t unit = devices[device].granularity, rounded = (size + unit - 1) / unit * unit;
  return rounded < size ? 0 : rounded;
}

Result driver_reserve(int device, Address *address, size_t size) {
  (void)device;
  return cu.reserve(address, size, 0, 0, 0);
}

Result driver_release_range(int device, Address address, size_t size) {
  (void)device;
  return cu.release_range(address, size);
}

Result driver_create(int device, Handle *handle, size_t size) {
  return cu.create(handle, size, &devices[device].prop, 0);
}

Result driver_release(int device, Handle handle, size_t size) {
  (void)device, (void)size;
  return cu.release(handle);
}

Result driver_map(int device, Address address, size_t size, Handle handle) {
  (void)device;
  return cu.map(address, size, 0, handle, 0);
}

Result driver_allow(int device, Address address, size_t size) {
  AccessDesc access = {devices[device].prop.location, 3 /* read and write */};
  return cu.set_access(address, size, &access, 1);
}

Result driver_unmap(int device, Address address, size_t size) {
  (void)device;
  return cu.unmap(address, size);
}

Result driver_wait(int device) {
  (void)device;
  return cu.ctx_sync();
}

Result driver_free_bytes(int device, size_t *available) {
  (void)device;
  size_t total;
  return cu.memory_info(available, &total);
}
