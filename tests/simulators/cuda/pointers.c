/* What the driver says about an address. */
#include "sim.h"

#include <string.h>

enum { MEMORY_HOST = 1, MEMORY_DEVICE = 2 };

enum attribute {
    CONTEXT = 1,
    MEMORY_TYPE = 2,
    DEVICE_POINTER = 3,
    HOST_POINTER = 4,
    BUFFER_ID = 7,
    IS_MANAGED = 8,
    DEVICE_ORDINAL = 9,
    RANGE_START_ADDR = 11,
    RANGE_SIZE = 12,
    MAPPED = 13
};

/* Of memory the driver knows; `mapping` and `host` say which, and one of them is NULL. */
static CUresult attribute_of(void *out, int attribute, CUdeviceptr at,
                             const struct mapping *mapping, const struct host_range *host)
{
    const struct span *span = mapping ? &mapping->span : &host->span;
    int number = 0;

    switch (attribute) {
    case DEVICE_POINTER:
        memcpy(out, &at, sizeof at);
        return SUCCESS;
    case HOST_POINTER:
        if (mapping)
            return INVALID_VALUE;
        memcpy(out, &at, sizeof at);
        return SUCCESS;
    case CONTEXT: { /* mapped memory and host memory belong to no context */
        const struct reservation *reservation =
            (const struct reservation *)spans_at(&sim.reservations, at);
        const struct context *context =
            reservation && reservation->plain ? &sim.contexts[mapping->handle->device] : NULL;
        memcpy(out, &context, sizeof context);
        return SUCCESS;
    }
    case BUFFER_ID: {
        uint64_t id = mapping ? mapping->handle->number : (uint64_t)(uintptr_t)host;
        memcpy(out, &id, sizeof id);
        return SUCCESS;
    }
    case RANGE_START_ADDR:
        memcpy(out, &span->at, sizeof span->at);
        return SUCCESS;
    case RANGE_SIZE:
        memcpy(out, &span->size, sizeof span->size);
        return SUCCESS;
    case IS_MANAGED:
        memset(out, 0, 1); /* one byte wide in the interface */
        return SUCCESS;
    case MAPPED:
        memset(out, 1, 1);
        return SUCCESS;
    case MEMORY_TYPE:
        number = mapping ? MEMORY_DEVICE : MEMORY_HOST;
        break;
    case DEVICE_ORDINAL:
        number = mapping ? mapping->handle->device : current_context()->device;
        break;
    default:
        return INVALID_VALUE;
    }
    memcpy(out, &number, sizeof number);
    return SUCCESS;
}

API CUresult cuPointerGetAttribute(void *out, int attribute, CUdeviceptr at)
{
    CUresult result = enter(CALL_cuPointerGetAttribute, NEEDS_CONTEXT);

    if (result)
        return result;
    const struct mapping *mapping = (const struct mapping *)spans_at(&sim.mappings, at);
    const struct host_range *host = (const struct host_range *)spans_at(&sim.host_ranges, at);
    if (!out || (!mapping && !host))
        return leave(INVALID_VALUE);
    return leave(attribute_of(out, attribute, at, mapping, host));
}

static size_t width_of(int attribute)
{
    switch (attribute) {
    case IS_MANAGED:
    case MAPPED:
        return 1;
    case MEMORY_TYPE:
    case DEVICE_ORDINAL:
        return sizeof(int);
    default:
        return sizeof(uint64_t);
    }
}

/* An address the driver does not know is no error here: every answer is zero, or -2 for the
 * device. */
API CUresult cuPointerGetAttributes(unsigned count, const int *attributes, void **out,
                                    CUdeviceptr at)
{
    CUresult result = enter(CALL_cuPointerGetAttributes, NEEDS_CONTEXT);
    const int no_device = -2;

    if (result)
        return result;
    if (!count || !attributes || !out)
        return leave(INVALID_VALUE);
    const struct mapping *mapping = (const struct mapping *)spans_at(&sim.mappings, at);
    const struct host_range *host = (const struct host_range *)spans_at(&sim.host_ranges, at);
    for (unsigned i = 0; i < count; i++) {
        if ((mapping || host) && !attribute_of(out[i], attributes[i], at, mapping, host))
            continue;
        memset(out[i], 0, width_of(attributes[i]));
        if (attributes[i] == DEVICE_ORDINAL)
            memcpy(out[i], &no_device, sizeof no_device);
    }
    return leave(SUCCESS);
}
