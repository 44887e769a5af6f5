/* Host memory that the driver knows: registered by its user, or allocated here. */
#include "sim.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PORTABLE = 1, DEVICE_MAP = 2, READ_ONLY = 8, WRITE_COMBINED = 4 };

enum pinned pinned_state(CUdeviceptr at, size_t size)
{
    const struct span *span = spans_at(&sim.host_ranges, at);

    if (!span)
        return PAGEABLE;
    return span_holds(span, at, size) ? PINNED : SPANS_REGISTRATIONS;
}

static bool may_pin(size_t size)
{
    return size <= sim.pinned_limit_bytes && sim.pinned_bytes <= sim.pinned_limit_bytes - size;
}

static void pin(CUdeviceptr at, size_t size, unsigned flags, bool owned)
{
    struct host_range *range = need(malloc(sizeof *range));

    *range = (struct host_range){{at, size}, flags, owned};
    spans_insert(&sim.host_ranges, &range->span);
    sim.pinned_bytes += size;
}

static void unpin(struct host_range *range)
{
    sim.pinned_bytes -= range->span.size;
    spans_remove(&sim.host_ranges, &range->span);
    free(range);
}

/* Whether something is mapped at every address, which the kernel says page by page. */
static bool is_present(CUdeviceptr at, size_t size)
{
    unsigned char pages[1024];
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE), most = sizeof pages * page_bytes;
    CUdeviceptr first = at / page_bytes * page_bytes;
    size_t left = at + size - first;

    while (left) {
        size_t part = left < most ? left : most;
        if (mincore((void *)(uintptr_t)first, part, pages))
            return false;
        first += part;
        left -= part;
    }
    return true;
}

API CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned flags)
{
    CUresult result = enter(CALL_cuMemHostRegister, NEEDS_CONTEXT);
    CUdeviceptr at = (uintptr_t)address;

    if (result)
        return result;
    if (!at || !size || flags & ~(unsigned)(PORTABLE | DEVICE_MAP | READ_ONLY) ||
        size > UINT64_MAX - at || touches_device(at, size) || !is_present(at, size))
        return leave(INVALID_VALUE);
    if (spans_overlap(&sim.host_ranges, at, size))
        return leave(HOST_MEMORY_ALREADY_REGISTERED);
    if (!may_pin(size))
        return leave(OUT_OF_MEMORY);
    pin(at, size, flags, false);
    return leave(SUCCESS);
}

API CUresult cuMemHostUnregister(void *address)
{
    CUresult result = enter(CALL_cuMemHostUnregister, NEEDS_CONTEXT);
    CUdeviceptr at = (uintptr_t)address;

    if (result)
        return result;
    struct host_range *range = (struct host_range *)spans_at(&sim.host_ranges, at);
    if (!range || range->owned || range->span.at != at)
        return leave(HOST_MEMORY_NOT_REGISTERED);
    if (queued_use(at, range->span.size))
        violated(HOST_RELEASED_IN_USE);
    unpin(range);
    return leave(SUCCESS);
}

API CUresult cuMemHostAlloc(void **out, size_t size, unsigned flags)
{
    CUresult result = enter(CALL_cuMemHostAlloc, NEEDS_CONTEXT);

    if (result)
        return result;
    if (!out || !size || flags & ~(unsigned)(PORTABLE | DEVICE_MAP | WRITE_COMBINED))
        return leave(INVALID_VALUE);
    if (!may_pin(size))
        return leave(OUT_OF_MEMORY);
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return leave(OUT_OF_MEMORY);
    pin((uintptr_t)at, size, flags, true);
    *out = at;
    return leave(SUCCESS);
}

/* Waits for the device, as the real one does. */
API CUresult cuMemFreeHost(void *address)
{
    CUresult result = enter(CALL_cuMemFreeHost, NEEDS_CONTEXT);
    CUdeviceptr at = (uintptr_t)address;

    if (result)
        return result;
    drain(current_context());
    struct host_range *range = (struct host_range *)spans_at(&sim.host_ranges, at);
    if (!range || !range->owned || range->span.at != at)
        return leave(INVALID_VALUE);
    if (queued_use(at, range->span.size)) /* by another device */
        violated(HOST_RELEASED_IN_USE);
    munmap(address, range->span.size);
    unpin(range);
    return leave(SUCCESS);
}

/* One address space for both, so the address is the same. */
API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *address, unsigned flags)
{
    CUresult result = enter(CALL_cuMemHostGetDevicePointer, NEEDS_CONTEXT);
    CUdeviceptr at = (uintptr_t)address;

    if (result)
        return result;
    if (!out || flags || !spans_at(&sim.host_ranges, at))
        return leave(INVALID_VALUE);
    *out = at;
    return leave(SUCCESS);
}

void release_host_ranges(void)
{
    for (size_t i = 0; i < sim.host_ranges.count; i++) {
        const struct host_range *range = (const struct host_range *)sim.host_ranges.items[i];
        if (range->owned)
            munmap((void *)(uintptr_t)range->span.at, range->span.size);
    }
    spans_clear(&sim.host_ranges);
    sim.pinned_bytes = 0;
}
