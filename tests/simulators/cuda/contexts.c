/* Primary contexts, which one is current in each thread, and the memory it sees. */
#include "sim.h"

__thread bool in_callback;

static __thread struct {
    struct context *contexts[MAX_CONTEXT_DEPTH];
    int depth;
    unsigned epoch;
} stack;

/* A reset makes every thread's stack void, and it cannot reach them. */
static void refresh_stack(void)
{
    if (stack.epoch != sim.epoch) {
        stack.epoch = sim.epoch;
        stack.depth = 0;
    }
}

struct context *current_context(void)
{
    refresh_stack();
    return stack.depth ? stack.contexts[stack.depth - 1] : NULL;
}

static CUresult state_of(const struct context *context)
{
    if (!context)
        return INVALID_CONTEXT;
    if (!context->references)
        return CONTEXT_IS_DESTROYED;
    return context->sticky;
}

CUresult current_state(void)
{
    return state_of(current_context());
}

static bool is_context(const struct context *context)
{
    for (int device = 0; device < sim.device_count; device++)
        if (context == &sim.contexts[device])
            return true;
    return false;
}

/* ------------------------------------------------------------------------ primary contexts */

API CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    CUresult result = enter(CALL_cuDevicePrimaryCtxRetain, NEEDS_INIT);

    if (result)
        return result;
    if (!out)
        return leave(INVALID_VALUE);
    if (!is_device(device))
        return leave(INVALID_DEVICE);
    struct context *context = &sim.contexts[device];
    if (context->sticky)
        return leave(context->sticky);
    context->references++;
    pool_register();
    *out = context;
    return leave(SUCCESS);
}

/* The last release ends its queues and what cuMemAlloc took; mapped memory belongs to nobody. */
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    CUresult result = enter(CALL_cuDevicePrimaryCtxRelease, NEEDS_INIT);

    if (result)
        return result;
    if (!is_device(device))
        return leave(INVALID_DEVICE);
    struct context *context = &sim.contexts[device];
    if (!context->references)
        return leave(INVALID_CONTEXT);
    if (context->references == 1) {
        drain(context);
        for (size_t i = 0; i < sim.streams.count; i++) {
            struct stream *stream = sim.streams.items[i];
            if (stream->context == context) {
                stream->retired = true;
                pthread_cond_broadcast(&stream->wake);
            }
        }
        context->legacy = NULL;
        free_plain_memory(device);
        unload_modules(context);
        context->sticky = SUCCESS;
    }
    context->references--;
    return leave(SUCCESS);
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    CUresult result = enter(CALL_cuDevicePrimaryCtxGetState, NEEDS_INIT);

    if (result)
        return result;
    if (!flags || !active)
        return leave(INVALID_VALUE);
    if (!is_device(device))
        return leave(INVALID_DEVICE);
    *flags = 0;
    *active = sim.contexts[device].references > 0;
    return leave(SUCCESS);
}

/* ------------------------------------------------------------------------ current contexts */

API CUresult cuCtxGetCurrent(CUcontext *out)
{
    CUresult result = enter(CALL_cuCtxGetCurrent, NEEDS_INIT);

    if (result)
        return result;
    if (!out)
        return leave(INVALID_VALUE);
    *out = current_context();
    return leave(SUCCESS);
}

API CUresult cuCtxSetCurrent(CUcontext context)
{
    CUresult result = enter(CALL_cuCtxSetCurrent, NEEDS_INIT);

    if (result)
        return result;
    if (context && !is_context(context))
        return leave(INVALID_CONTEXT);
    if (context && !context->references)
        return leave(CONTEXT_IS_DESTROYED);
    refresh_stack();
    if (stack.depth)
        stack.depth--;
    if (context)
        stack.contexts[stack.depth++] = context;
    return leave(SUCCESS);
}

API CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    CUresult result = enter(CALL_cuCtxPushCurrent, NEEDS_INIT);

    if (result)
        return result;
    if (!is_context(context))
        return leave(INVALID_CONTEXT);
    if (!context->references)
        return leave(CONTEXT_IS_DESTROYED);
    refresh_stack();
    if (stack.depth == MAX_CONTEXT_DEPTH)
        return leave(INVALID_VALUE);
    stack.contexts[stack.depth++] = context;
    return leave(SUCCESS);
}

API CUresult cuCtxPopCurrent_v2(CUcontext *out)
{
    CUresult result = enter(CALL_cuCtxPopCurrent, NEEDS_INIT);

    if (result)
        return result;
    struct context *context = current_context();
    if (!context)
        return leave(INVALID_CONTEXT);
    stack.depth--;
    if (out)
        *out = context;
    return leave(SUCCESS);
}

static CUresult device_of(CUdevice *out, const struct context *context)
{
    if (!out)
        return INVALID_VALUE;
    if (!context)
        return INVALID_CONTEXT;
    *out = context->device;
    return SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *out)
{
    CUresult result = enter(CALL_cuCtxGetDevice, NEEDS_INIT);

    return result ? result : leave(device_of(out, current_context()));
}

API CUresult cuCtxGetDevice_v2(CUdevice *out, CUcontext context)
{
    CUresult result = enter(CALL_cuCtxGetDevice, NEEDS_INIT);

    if (result)
        return result;
    if (context && !is_context(context))
        return leave(INVALID_CONTEXT);
    return leave(device_of(out, context ? context : current_context()));
}

static CUresult synchronise(struct context *context)
{
    CUresult result = state_of(context);

    if (result)
        return result;
    drain(context);
    return context->sticky;
}

API CUresult cuCtxSynchronize(void)
{
    CUresult result = enter(CALL_cuCtxSynchronize, NEEDS_INIT);

    return result ? result : leave(synchronise(current_context()));
}

API CUresult cuCtxSynchronize_v2(CUcontext context)
{
    CUresult result = enter(CALL_cuCtxSynchronize, NEEDS_INIT);

    if (result)
        return result;
    if (context && !is_context(context))
        return leave(INVALID_CONTEXT);
    return leave(synchronise(context ? context : current_context()));
}

/* ---------------------------------------------------------------------------- device bytes */

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    CUresult result = enter(CALL_cuMemGetInfo, NEEDS_CONTEXT);
    uint64_t available, mine;

    if (result)
        return result;
    if (!free_bytes || !total)
        return leave(INVALID_VALUE);
    int device = current_context()->device;
    pool_usage(device, &available, &mine);
    *free_bytes = available;
    *total = total_bytes(device);
    return leave(SUCCESS);
}
