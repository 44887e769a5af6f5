/* Addresses: reserving them, mapping physical memory there, and who may touch it.
 *
 * A reserved address with no accessible memory behind it really faults when the CPU touches it.
 */
#include "sim.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

static void *pages(CUdeviceptr at)
{
    return (void *)(uintptr_t)at;
}

/* ------------------------------------------------------------------------------- addresses */

static const int untouchable = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

static void *reserve_at(size_t size, CUdeviceptr wanted)
{
    void *at = mmap(pages(wanted), size, PROT_NONE, untouchable | MAP_FIXED_NOREPLACE, -1, 0);

    if (at == MAP_FAILED || at == pages(wanted))
        return at == MAP_FAILED ? NULL : at;
    munmap(at, size); /* kernels before 4.17 take the address as a hint */
    return NULL;
}

static void *reserve_anywhere(size_t size, size_t alignment)
{
    if (size > SIZE_MAX - alignment)
        return NULL;
    char *start = mmap(NULL, size + alignment, PROT_NONE, untouchable, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    char *at = start + (alignment - (uintptr_t)start % alignment) % alignment;
    if (at != start)
        munmap(start, (size_t)(at - start));
    munmap(at + size, alignment - (size_t)(at - start));
    return at;
}

/* `wanted` is a wish, as in the driver's interface. */
void *reserve_pages(size_t size, size_t alignment, CUdeviceptr wanted)
{
    void *at = wanted && wanted % alignment == 0 ? reserve_at(size, wanted) : NULL;

    if (!at)
        at = reserve_anywhere(size, alignment);
    if (at)
        madvise(at, size, MADV_DONTFORK); /* a child cannot see it, as on a real device */
    return at;
}

API CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr hint,
                                 unsigned long long flags)
{
    CUresult result = enter(CALL_cuMemAddressReserve, NEEDS_CONTEXT);

    if (result)
        return result;
    size_t unit = sim.granularity[current_context()->device];
    if (!out || !size || size % unit || alignment & (alignment - 1) || flags)
        return leave(INVALID_VALUE);
    void *at = reserve_pages(size, alignment > unit ? alignment : unit, hint);
    if (!at)
        return leave(OUT_OF_MEMORY);
    struct reservation *reservation = need(malloc(sizeof *reservation));
    *reservation = (struct reservation){{(uintptr_t)at, size}, false};
    spans_insert(&sim.reservations, &reservation->span);
    *out = (uintptr_t)at;
    return leave(SUCCESS);
}

API CUresult cuMemAddressFree(CUdeviceptr at, size_t size)
{
    CUresult result = enter(CALL_cuMemAddressFree, NEEDS_CONTEXT);

    if (result)
        return result;
    struct reservation *reservation = (struct reservation *)spans_at(&sim.reservations, at);
    if (!reservation || reservation->plain || reservation->span.at != at ||
        reservation->span.size != size || spans_overlap(&sim.mappings, at, size))
        return leave(INVALID_VALUE);
    munmap(pages(at), size);
    spans_remove(&sim.reservations, &reservation->span);
    free(reservation);
    return leave(SUCCESS);
}

/* Whether any of these addresses is the driver's, mapped or not. */
bool touches_device(CUdeviceptr at, size_t size)
{
    return spans_overlap(&sim.reservations, at, size);
}

/* -------------------------------------------------------------------------------- mappings */

API CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset,
                      CUmemGenericAllocationHandle number, unsigned long long flags)
{
    CUresult result = enter(CALL_cuMemMap, NEEDS_CONTEXT);

    if (result)
        return result;
    struct handle *handle = table_get(&sim.handles, number);
    if (!handle)
        violated(UNKNOWN_HANDLE);
    if (!handle || !handle->references || offset || flags || size != handle->size)
        return leave(INVALID_VALUE);
    struct reservation *reservation = (struct reservation *)spans_at(&sim.reservations, at);
    if (!reservation || reservation->plain || !span_holds(&reservation->span, at, size) ||
        at % sim.granularity[handle->device] || spans_overlap(&sim.mappings, at, size))
        return leave(INVALID_VALUE);
    if (mmap(pages(at), size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
             sim.files[handle->device], handle->offset) == MAP_FAILED)
        return leave(OUT_OF_MEMORY);
    madvise(pages(at), size, MADV_DONTFORK);
    struct mapping *mapping = need(malloc(sizeof *mapping));
    *mapping = (struct mapping){{at, size}, handle, {0}};
    spans_insert(&sim.mappings, &mapping->span);
    handle->mappings++;
    return leave(SUCCESS);
}

/* Whether a range is made of whole mappings, with no gap; `first` is the index of the first. */
static bool whole_mappings(CUdeviceptr at, size_t size, size_t *first)
{
    CUdeviceptr next = at;

    *first = spans_after(&sim.mappings, at);
    for (size_t i = *first; next - at < size; i++) {
        if (i == sim.mappings.count || sim.mappings.items[i]->at != next)
            return false;
        next += sim.mappings.items[i]->size;
    }
    return next - at == size;
}

static void unmap_one(struct mapping *mapping)
{
    /* Replaced rather than unmapped, so that nothing else can move into the reserved range. */
    mmap(pages(mapping->span.at), mapping->span.size, PROT_NONE,
         untouchable | MAP_FIXED, -1, 0);
    madvise(pages(mapping->span.at), mapping->span.size, MADV_DONTFORK);
    spans_remove(&sim.mappings, &mapping->span);
    mapping->handle->mappings--;
    release_if_unused(mapping->handle);
    free(mapping);
}

/* Does not wait for queued work, as the real one does not; work that needs the range is noticed. */
API CUresult cuMemUnmap(CUdeviceptr at, size_t size)
{
    CUresult result = enter(CALL_cuMemUnmap, NEEDS_CONTEXT);
    size_t first;

    if (result)
        return result;
    struct reservation *reservation = (struct reservation *)spans_at(&sim.reservations, at);
    if (!size || !reservation || reservation->plain || !span_holds(&reservation->span, at, size))
        return leave(INVALID_VALUE);
    if (!spans_overlap(&sim.mappings, at, size)) {
        violated(UNMAP_NOTHING);
        return leave(SUCCESS);
    }
    if (!whole_mappings(at, size, &first))
        return leave(INVALID_VALUE);
    if (queued_use(at, size))
        violated(UNMAP_IN_USE);
    while (first < sim.mappings.count && sim.mappings.items[first]->at < at + size)
        unmap_one((struct mapping *)sim.mappings.items[first]);
    return leave(SUCCESS);
}

void unmap_everything(void)
{
    for (size_t i = 0; i < sim.reservations.count; i++)
        munmap(pages(sim.reservations.items[i]->at), sim.reservations.items[i]->size);
    spans_clear(&sim.mappings);
    spans_clear(&sim.reservations);
}

/* ---------------------------------------------------------------------------------- access */

static int cpu_protection(const struct mapping *mapping)
{
    int protection = PROT_NONE;

    for (int device = 0; device < MAX_DEVICES; device++)
        if (mapping->access[device])
            protection |= mapping->access[device] == ACCESS_READ ? PROT_READ
                                                                 : PROT_READ | PROT_WRITE;
    return protection;
}

static CUresult check_access(const struct access_desc *desc)
{
    if (desc->location.type != LOCATION_DEVICE ||
        (desc->flags != ACCESS_NONE && desc->flags != ACCESS_READ &&
         desc->flags != ACCESS_READ_WRITE))
        return INVALID_VALUE;
    return is_device(desc->location.id) ? SUCCESS : INVALID_DEVICE;
}

API CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const struct access_desc *desc,
                            size_t count)
{
    CUresult result = enter(CALL_cuMemSetAccess, NEEDS_CONTEXT);
    size_t first;

    if (result)
        return result;
    if (!size || !desc || !count || !whole_mappings(at, size, &first))
        return leave(INVALID_VALUE);
    for (size_t i = 0; i < count; i++)
        if ((result = check_access(&desc[i])))
            return leave(result);
    for (size_t m = first; m < sim.mappings.count && sim.mappings.items[m]->at < at + size; m++) {
        struct mapping *mapping = (struct mapping *)sim.mappings.items[m];
        for (size_t i = 0; i < count; i++)
            mapping->access[desc[i].location.id] = (unsigned char)desc[i].flags;
        if (mprotect(pages(mapping->span.at), mapping->span.size, cpu_protection(mapping)))
            return leave(OUT_OF_MEMORY);
    }
    return leave(SUCCESS);
}

API CUresult cuMemGetAccess(unsigned long long *flags, const struct location *location,
                            CUdeviceptr at)
{
    CUresult result = enter(CALL_cuMemGetAccess, NEEDS_CONTEXT);

    if (result)
        return result;
    const struct mapping *mapping = (const struct mapping *)spans_at(&sim.mappings, at);
    if (!flags || !location || location->type != LOCATION_DEVICE || !mapping)
        return leave(INVALID_VALUE);
    if (!is_device(location->id))
        return leave(INVALID_DEVICE);
    *flags = mapping->access[location->id];
    return leave(SUCCESS);
}

/* Whether a device may read or write all of a range: with its own access, or through the device
 * whose memory it is. */
bool accessible(CUdeviceptr at, size_t size, int device, int access)
{
    CUdeviceptr next = at;

    for (size_t i = spans_after(&sim.mappings, at); next - at < size; i++) {
        if (i == sim.mappings.count || sim.mappings.items[i]->at > next)
            return false;
        const struct mapping *mapping = (const struct mapping *)sim.mappings.items[i];
        if ((mapping->access[device] & access) != access &&
            (mapping->access[mapping->handle->device] & access) != access)
            return false;
        next = mapping->span.at + mapping->span.size;
    }
    return true;
}
