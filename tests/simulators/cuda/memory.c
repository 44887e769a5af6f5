/* Physical memory: handles, their bytes in a file of each device, and plain allocations. */
#include "sim.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ------------------------------------------------------------------- the bytes of a handle */

static bool open_device_file(int device)
{
    if (sim.files[device] >= 0)
        return true;
    int file = memfd_create("simulated-gpu", MFD_CLOEXEC);
    if (file < 0)
        return false;
    /* Sparse, and far larger than all that is ever created, as offsets only grow. */
    if (ftruncate(file, (off_t)1 << 50)) {
        close(file);
        return false;
    }
    sim.files[device] = file;
    sim.file_end[device] = 0;
    return true;
}

void release_device_files(void)
{
    for (int device = 0; device < MAX_DEVICES; device++) {
        if (sim.files[device] >= 0)
            close(sim.files[device]);
        sim.files[device] = -1;
    }
}

static bool fill_with(int file, off_t offset, size_t size, int byte)
{
    unsigned char chunk[CHUNK_BYTES];

    memset(chunk, byte, sizeof chunk);
    for (size_t done = 0; done < size;) {
        size_t part = size - done < sizeof chunk ? size - done : sizeof chunk;
        ssize_t written = pwrite(file, chunk, part, offset + (off_t)done);
        if (written <= 0)
            return false;
        done += (size_t)written;
    }
    return true;
}

static void drop_bytes(const struct handle *handle)
{
    /* Best effort: the pages go with the file at the latest. */
    (void)!fallocate(sim.files[handle->device], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                     handle->offset, (off_t)handle->size);
}

/* With the lock held, which it drops while it writes the stale bytes. */
CUresult create_memory(size_t size, int device, struct handle **made)
{
    if (!pool_take(device, size))
        return OUT_OF_MEMORY;
    if (!open_device_file(device)) {
        pool_give(device, size);
        return OPERATING_SYSTEM;
    }
    struct handle *handle = need(malloc(sizeof *handle));
    *handle = (struct handle){.device = device, .size = size, .references = 1, .takes = 1,
                              .offset = sim.file_end[device], .backed = true};
    sim.file_end[device] += (off_t)size;
    int file = sim.files[device], stale = sim.stale_byte;
    bool filled = true;
    if (stale >= 0) {
        pthread_mutex_unlock(&sim.lock);
        filled = fill_with(file, handle->offset, size, stale);
        pthread_mutex_lock(&sim.lock);
    }
    if (!filled) {
        drop_bytes(handle);
        pool_give(device, size);
        free(handle);
        return OPERATING_SYSTEM;
    }
    handle->number = table_add(&sim.handles, handle);
    *made = handle;
    return SUCCESS;
}

/* The record stays, so that a second release is told from a wrong number. */
void release_if_unused(struct handle *handle)
{
    if (!handle->backed || handle->references || handle->mappings || handle->movers)
        return;
    drop_bytes(handle);
    handle->backed = false;
    pool_give(handle->device, handle->size);
}

/* --------------------------------------------------------------------------------- handles */

static bool is_aligned(size_t size, int device)
{
    return size && size % sim.granularity[device] == 0;
}

static CUresult check_prop(const struct allocation_prop *prop)
{
    if (!prop || prop->type != ALLOCATION_PINNED || prop->location.type != LOCATION_DEVICE)
        return INVALID_VALUE;
    return is_device(prop->location.id) ? SUCCESS : INVALID_DEVICE;
}

API CUresult cuMemGetAllocationGranularity(size_t *out, const struct allocation_prop *prop,
                                           int option)
{
    CUresult result = enter(CALL_cuMemGetAllocationGranularity, NEEDS_INIT);

    if (result)
        return result;
    if (!out || option < 0 || option > 1)
        return leave(INVALID_VALUE);
    if ((result = check_prop(prop)))
        return leave(result);
    *out = sim.granularity[prop->location.id];
    return leave(SUCCESS);
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size,
                         const struct allocation_prop *prop, unsigned long long flags)
{
    CUresult result = enter(CALL_cuMemCreate, NEEDS_CONTEXT);
    struct handle *handle;

    if (result)
        return result;
    if (!out || flags)
        return leave(INVALID_VALUE);
    if ((result = check_prop(prop)))
        return leave(result);
    int device = prop->location.id;
    if (!can_map_memory(device))
        return leave(NOT_SUPPORTED);
    if (!is_aligned(size, device))
        return leave(INVALID_VALUE);
    if (!(result = create_memory(size, device, &handle)))
        *out = handle->number;
    return leave(result);
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle number)
{
    CUresult result = enter(CALL_cuMemRelease, NEEDS_CONTEXT);

    if (result)
        return result;
    struct handle *handle = table_get(&sim.handles, number);
    if (!handle) {
        violated(UNKNOWN_HANDLE);
        return leave(INVALID_VALUE);
    }
    handle->releases++;
    if (!handle->references) {
        violated(DOUBLE_RELEASE);
        return leave(INVALID_VALUE);
    }
    handle->references--;
    release_if_unused(handle);
    return leave(SUCCESS);
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address)
{
    CUresult result = enter(CALL_cuMemRetainAllocationHandle, NEEDS_CONTEXT);

    if (result)
        return result;
    struct mapping *mapping =
        (struct mapping *)spans_at(&sim.mappings, (CUdeviceptr)(uintptr_t)address);
    if (!out || !mapping)
        return leave(INVALID_VALUE);
    mapping->handle->references++;
    mapping->handle->takes++;
    *out = mapping->handle->number;
    return leave(SUCCESS);
}

/* ----------------------------------------------------------------------- plain allocations */

static CUresult map_plain(void *at, size_t size, int device)
{
    struct handle *handle;
    CUresult result = create_memory(size, device, &handle);

    if (result)
        return result;
    handle->releases = 1; /* nobody else has its number */
    handle->references = 0;
    if (mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
             sim.files[device], handle->offset) == MAP_FAILED) {
        release_if_unused(handle);
        return OPERATING_SYSTEM;
    }
    madvise(at, size, MADV_DONTFORK);
    struct reservation *reservation = need(malloc(sizeof *reservation));
    struct mapping *mapping = need(malloc(sizeof *mapping));
    *reservation = (struct reservation){{(uintptr_t)at, size}, true};
    *mapping = (struct mapping){{(uintptr_t)at, size}, handle, {0}};
    mapping->access[device] = ACCESS_READ_WRITE;
    handle->mappings = 1;
    spans_insert(&sim.reservations, &reservation->span);
    spans_insert(&sim.mappings, &mapping->span);
    return SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t size)
{
    CUresult result = enter(CALL_cuMemAlloc, NEEDS_CONTEXT);

    if (result)
        return result;
    if (!out || !size)
        return leave(INVALID_VALUE);
    int device = current_context()->device;
    size_t unit = sim.granularity[device];
    if (size > SIZE_MAX - unit)
        return leave(OUT_OF_MEMORY);
    size = (size + unit - 1) / unit * unit;
    void *at = reserve_pages(size, unit, 0);
    if (!at)
        return leave(OUT_OF_MEMORY);
    if ((result = map_plain(at, size, device)))
        munmap(at, size);
    else
        *out = (uintptr_t)at;
    return leave(result);
}

static void free_plain(struct reservation *reservation)
{
    struct mapping *mapping = (struct mapping *)spans_at(&sim.mappings, reservation->span.at);

    munmap((void *)(uintptr_t)reservation->span.at, reservation->span.size);
    spans_remove(&sim.mappings, &mapping->span);
    spans_remove(&sim.reservations, &reservation->span);
    mapping->handle->mappings = 0;
    release_if_unused(mapping->handle);
    free(mapping);
    free(reservation);
}

/* What its context ends with. */
void free_plain_memory(int device)
{
    for (size_t i = sim.reservations.count; i-- > 0;) {
        struct reservation *reservation = (struct reservation *)sim.reservations.items[i];
        if (!reservation->plain)
            continue;
        struct mapping *mapping = (struct mapping *)spans_at(&sim.mappings, reservation->span.at);
        if (mapping->handle->device == device)
            free_plain(reservation);
    }
}

/* Waits for the device, as the real one does. */
API CUresult cuMemFree_v2(CUdeviceptr at)
{
    CUresult result = enter(CALL_cuMemFree, NEEDS_CONTEXT);

    if (result)
        return result;
    if (!at)
        return leave(SUCCESS);
    drain(current_context());
    struct reservation *reservation = (struct reservation *)spans_at(&sim.reservations, at);
    if (!reservation || !reservation->plain || reservation->span.at != at)
        return leave(INVALID_VALUE);
    free_plain(reservation);
    return leave(SUCCESS);
}
