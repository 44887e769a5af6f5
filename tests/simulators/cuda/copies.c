/* The calls that copy and fill: checked when called, done later by the stream's worker. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

enum { ON_HOST = 1, ON_DEVICE = 2, ANYWHERE = 3 };
enum { DURING_CALL = 2 }; /* srcAccessOrder: the source may change once the call returned */

/* ---------------------------------------------------------------------- checking, when called */

/* Find out whether a range is device memory that the device may use so, or host memory. */
static bool classify(CUdeviceptr at, size_t size, int device, int access, bool *on_device)
{
    if (!at || size > UINT64_MAX - at)
        return false;
    *on_device = touches_device(at, size);
    if (*on_device)
        return accessible(at, size, device, access);
    return pinned_state(at, size) != SPANS_REGISTRATIONS;
}

static bool side_fits(int allowed, bool on_device, const struct transfer *copy, CUdeviceptr at)
{
    if (allowed & (on_device ? ON_DEVICE : ON_HOST))
        return true;
    /* Registered host memory has a device address too: its own. */
    return !on_device && pinned_state(at, copy->size) == PINNED;
}

static bool check_copy(struct transfer *copy, int device, int to, int from)
{
    return classify(copy->to, copy->size, device, ACCESS_READ_WRITE, &copy->to_device) &&
           classify(copy->from, copy->size, device, ACCESS_READ, &copy->from_device) &&
           side_fits(to, copy->to_device, copy, copy->to) &&
           side_fits(from, copy->from_device, copy, copy->from);
}

static bool is_pageable(CUdeviceptr at, size_t size, bool on_device)
{
    return !on_device && pinned_state(at, size) == PAGEABLE;
}

/* Take the source's bytes now. Drops the lock meanwhile. */
static void stage(struct transfer *copy)
{
    copy->staged = need(malloc(copy->size));
    pthread_mutex_unlock(&sim.lock);
    memcpy(copy->staged, (const void *)(uintptr_t)copy->from, copy->size);
    pthread_mutex_lock(&sim.lock);
}

static void enqueue_copy(struct stream *stream, const struct transfer *copy)
{
    struct operation *operation = need(calloc(1, sizeof *operation));

    operation->kind = OPERATION_COPY;
    operation->copy = *copy;
    enqueue(stream, operation);
}

/* Queue a checked copy. True: the caller must wait, as its destination is pageable. */
static bool queue_copy(struct stream *stream, struct transfer *copy, bool take_source)
{
    bool from_pageable = is_pageable(copy->from, copy->size, copy->from_device);
    bool to_pageable = is_pageable(copy->to, copy->size, copy->to_device);

    if (from_pageable || to_pageable)
        sim.pageable_copy_bytes += copy->size;
    if (from_pageable || (take_source && !copy->from_device))
        stage(copy);
    enqueue_copy(stream, copy);
    return to_pageable;
}

/* ----------------------------------------------------------------------------- single copies */

enum wait { NO_WAIT, WAIT };

static CUresult copy(enum call call, CUdeviceptr to, CUdeviceptr from, size_t size, int to_side,
                     int from_side, CUstream handle, enum wait wait)
{
    CUresult result = enter(call, NEEDS_CONTEXT);
    struct transfer transfer = {.to = to, .from = from, .size = size};

    if (result)
        return result;
    struct stream *stream = find_stream(handle);
    if (!stream)
        return leave(INVALID_HANDLE);
    if (!size)
        return leave(SUCCESS);
    if (!check_copy(&transfer, stream->context->device, to_side, from_side))
        return leave(INVALID_VALUE);
    if (queue_copy(stream, &transfer, false) || wait == WAIT) {
        wait_for(stream, stream->queued);
        return leave(stream->context->sticky);
    }
    return leave(SUCCESS);
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size)
{
    return copy(CALL_cuMemcpyHtoD, to, (uintptr_t)from, size, ON_DEVICE, ON_HOST, 0, WAIT);
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size)
{
    return copy(CALL_cuMemcpyDtoH, (uintptr_t)to, from, size, ON_HOST, ON_DEVICE, 0, WAIT);
}

/* Between device memory the host is not kept waiting, though the call has no stream. */
API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    return copy(CALL_cuMemcpyDtoD, to, from, size, ON_DEVICE, ON_DEVICE, 0, NO_WAIT);
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream)
{
    return copy(CALL_cuMemcpyHtoDAsync, to, (uintptr_t)from, size, ON_DEVICE, ON_HOST, stream,
                NO_WAIT);
}

API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream)
{
    return copy(CALL_cuMemcpyDtoHAsync, (uintptr_t)to, from, size, ON_HOST, ON_DEVICE, stream,
                NO_WAIT);
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    return copy(CALL_cuMemcpyDtoDAsync, to, from, size, ON_DEVICE, ON_DEVICE, stream, NO_WAIT);
}

API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    return copy(CALL_cuMemcpyAsync, to, from, size, ANYWHERE, ANYWHERE, stream, NO_WAIT);
}

/* ---------------------------------------------------------------------------- batches of copies */

struct copy_attributes {
    int source_access_order;
    struct location source_hint, destination_hint;
    unsigned flags;
};

static bool check_attributes(const struct copy_attributes *attributes, const size_t *starts,
                             size_t attribute_count, size_t count)
{
    if (!attributes || !starts || !attribute_count || attribute_count > count || starts[0])
        return false;
    for (size_t i = 0; i < attribute_count; i++) {
        if (attributes[i].source_access_order < 1 || attributes[i].source_access_order > 3)
            return false;
        if (i && (starts[i] <= starts[i - 1] || starts[i] >= count))
            return false;
    }
    return true;
}

static CUresult check_batch(struct transfer *copies, const CUdeviceptr *to, const CUdeviceptr *from,
                            const size_t *sizes, size_t count, int device)
{
    for (size_t i = 0; i < count; i++) {
        copies[i] = (struct transfer){.to = to[i], .from = from[i], .size = sizes[i]};
        if (!sizes[i] || !check_copy(&copies[i], device, ANYWHERE, ANYWHERE))
            return INVALID_VALUE;
    }
    return SUCCESS;
}

/* A batch promises no order within itself, so it runs backwards: who relied on one notices. */
API CUresult cuMemcpyBatchAsync_v2(const CUdeviceptr *to, const CUdeviceptr *from,
                                   const size_t *sizes, size_t count,
                                   const struct copy_attributes *attributes, const size_t *starts,
                                   size_t attribute_count, CUstream handle)
{
    CUresult result = enter(CALL_cuMemcpyBatchAsync, NEEDS_CONTEXT);
    bool wait = false;

    if (result)
        return result;
    if (handle <= 1) /* the default stream is refused */
        return leave(INVALID_VALUE);
    struct stream *stream = find_stream(handle);
    if (!stream)
        return leave(INVALID_HANDLE);
    if (!to || !from || !sizes || !count ||
        !check_attributes(attributes, starts, attribute_count, count))
        return leave(INVALID_VALUE);
    struct transfer *copies = need(calloc(count, sizeof *copies));
    result = check_batch(copies, to, from, sizes, count, stream->context->device);
    for (size_t i = count, a = attribute_count - 1; !result && i-- > 0;) {
        while (starts[a] > i)
            a--;
        bool take_source = attributes[a].source_access_order == DURING_CALL;
        wait |= queue_copy(stream, &copies[i], take_source);
    }
    free(copies);
    if (!result && wait) {
        wait_for(stream, stream->queued);
        result = stream->context->sticky;
    }
    return leave(result);
}

/* What callers built for CUDA 12 ask for: the same, with a place for the index of a bad copy. */
API CUresult cuMemcpyBatchAsync(const CUdeviceptr *to, const CUdeviceptr *from, const size_t *sizes,
                                size_t count, const struct copy_attributes *attributes,
                                const size_t *starts, size_t attribute_count, size_t *bad,
                                CUstream handle)
{
    if (bad)
        *bad = SIZE_MAX;
    return cuMemcpyBatchAsync_v2(to, from, sizes, count, attributes, starts, attribute_count,
                                 handle);
}

/* ---------------------------------------------------------------------------------------- fills */

static CUresult fill(enum call call, CUdeviceptr to, uint32_t value, size_t count, size_t width,
                     CUstream handle)
{
    CUresult result = enter(call, NEEDS_CONTEXT);
    bool on_device;

    if (result)
        return result;
    struct stream *stream = find_stream(handle);
    if (!stream)
        return leave(INVALID_HANDLE);
    if (!count)
        return leave(SUCCESS);
    if (count > SIZE_MAX / width || to % width ||
        !classify(to, count * width, stream->context->device, ACCESS_READ_WRITE, &on_device) ||
        !on_device)
        return leave(INVALID_VALUE);
    struct operation *operation = need(calloc(1, sizeof *operation));
    operation->kind = OPERATION_FILL;
    operation->fill = (struct fill){to, count * width, value};
    enqueue(stream, operation);
    return leave(SUCCESS);
}

static uint32_t four_times(unsigned char value)
{
    return value * 0x01010101u;
}

/* As for copies between device memory: these do not keep the host waiting either. */
API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count)
{
    return fill(CALL_cuMemsetD8, to, four_times(value), count, 1, 0);
}

API CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count)
{
    return fill(CALL_cuMemsetD32, to, value, count, 4, 0);
}

API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream)
{
    return fill(CALL_cuMemsetD8Async, to, four_times(value), count, 1, stream);
}

API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream)
{
    return fill(CALL_cuMemsetD32Async, to, value, count, 4, stream);
}
