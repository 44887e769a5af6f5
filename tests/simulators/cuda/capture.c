/* What a capture elsewhere in the process forbids. Graphs are not captured here: tests say when. */
#include "sim.h"

enum { GLOBAL, THREAD_LOCAL, RELAXED };

static __thread struct {
    int mode;
    unsigned epoch;
} local;

static int mode(void)
{
    return local.epoch == sim.epoch ? local.mode : GLOBAL;
}

API CUresult cuThreadExchangeStreamCaptureMode(int *inout)
{
    CUresult result = enter(CALL_cuThreadExchangeStreamCaptureMode, NEEDS_INIT);

    if (result)
        return result;
    if (!inout || *inout < GLOBAL || *inout > RELAXED)
        return leave(INVALID_VALUE);
    int before = mode();
    local.mode = *inout;
    local.epoch = sim.epoch;
    *inout = before;
    return leave(SUCCESS);
}

/* Whether another thread's capture, in the mode that is the default, would be lost by the call: what a
 * driver 580 answers. It also says that a wait for the whole context is never allowed. */
bool ends_capture(enum call call)
{
    if (!sim.capturing)
        return false;
    if (call == CALL_cuCtxSynchronize)
        return true;
    if (mode() != GLOBAL)
        return false;
    switch (call) {
    case CALL_cuMemAlloc:
    case CALL_cuMemFree:
    case CALL_cuMemHostAlloc:
    case CALL_cuMemFreeHost:
    case CALL_cuMemHostRegister:
    case CALL_cuMemHostUnregister:
    case CALL_cuModuleUnload:
    case CALL_cuEventQuery:
    case CALL_cuEventSynchronize:
    case CALL_cuStreamQuery:
    case CALL_cuStreamSynchronize:
        return true;
    default:
        return false;
    }
}

API int sim_set_capturing(int on)
{
    pthread_mutex_lock(&sim.lock);
    sim.capturing = on != 0;
    pthread_mutex_unlock(&sim.lock);
    return 0;
}
