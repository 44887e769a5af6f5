/* The calls about streams and events. */
#include "sim.h"

#include <stdlib.h>

enum { STREAM_FLAGS = 1, EVENT_FLAGS = 7, EVENT_DISABLE_TIMING = 2 };

/* --------------------------------------------------------------------------------- streams */

static CUresult create_stream(enum call call, CUstream *out, unsigned flags)
{
    CUresult result = enter(call, NEEDS_CONTEXT);

    if (result)
        return result;
    if (!out || flags & ~(unsigned)STREAM_FLAGS)
        return leave(INVALID_VALUE);
    struct stream *stream = make_stream(current_context(), flags);
    if (!stream)
        return leave(OUT_OF_MEMORY);
    *out = stream->number;
    return leave(SUCCESS);
}

API CUresult cuStreamCreate(CUstream *out, unsigned flags)
{
    return create_stream(CALL_cuStreamCreate, out, flags);
}

/* Priorities change nothing here: a worker per stream has no order to choose. */
API CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority)
{
    (void)priority;
    return create_stream(CALL_cuStreamCreateWithPriority, out, flags);
}

/* Returns at once; what was queued still runs. */
API CUresult cuStreamDestroy_v2(CUstream handle)
{
    CUresult result = enter(CALL_cuStreamDestroy, NEEDS_CONTEXT);

    if (result)
        return result;
    struct stream *stream = table_get(&sim.streams, handle) ? find_stream(handle) : NULL;
    if (!stream)
        return leave(INVALID_HANDLE);
    stream->retired = true;
    demand(stream, stream->queued);
    pthread_cond_broadcast(&stream->wake);
    return leave(SUCCESS);
}

/* With the lock held, or an answer to return. */
static CUresult stream_enter(enum call call, CUstream handle, struct stream **stream)
{
    CUresult result = enter(call, NEEDS_CONTEXT);

    if (result)
        return result;
    *stream = find_stream(handle);
    return *stream ? SUCCESS : leave(INVALID_HANDLE);
}

API CUresult cuStreamSynchronize(CUstream handle)
{
    struct stream *stream;
    CUresult result = stream_enter(CALL_cuStreamSynchronize, handle, &stream);

    if (result)
        return result;
    wait_for(stream, stream->queued);
    return leave(stream->context->sticky);
}

/* Asking counts as wanting, or a caller that polls would never see the end. */
static CUresult progress_of(struct stream *stream, uint64_t sequence)
{
    if (stream->done < sequence) {
        demand(stream, sequence);
        return NOT_READY;
    }
    return stream->context->sticky;
}

API CUresult cuStreamQuery(CUstream handle)
{
    struct stream *stream;
    CUresult result = stream_enter(CALL_cuStreamQuery, handle, &stream);

    return result ? result : leave(progress_of(stream, stream->queued));
}

API CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned flags)
{
    struct stream *stream;
    CUresult result = stream_enter(CALL_cuStreamWaitEvent, handle, &stream);

    if (result)
        return result;
    struct event *event = find_event(event_handle);
    if (!event)
        return leave(INVALID_HANDLE);
    if (flags > 1)
        return leave(INVALID_VALUE);
    if (!event->stream)
        return leave(SUCCESS);
    struct operation *operation = need(calloc(1, sizeof *operation));
    operation->kind = OPERATION_WAIT;
    operation->wait.stream = event->stream;
    operation->wait.sequence = event->sequence;
    enqueue(stream, operation);
    return leave(SUCCESS);
}

API CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data)
{
    struct stream *stream;
    CUresult result = stream_enter(CALL_cuLaunchHostFunc, handle, &stream);

    if (result)
        return result;
    if (!function)
        return leave(INVALID_VALUE);
    struct operation *operation = need(calloc(1, sizeof *operation));
    operation->kind = OPERATION_CALL;
    operation->call.function = function;
    operation->call.data = data;
    enqueue(stream, operation);
    return leave(SUCCESS);
}

/* ---------------------------------------------------------------------------------- events */

API CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    CUresult result = enter(CALL_cuEventCreate, NEEDS_CONTEXT);

    if (result)
        return result;
    if (!out || flags & ~(unsigned)EVENT_FLAGS)
        return leave(INVALID_VALUE);
    struct event *event = need(calloc(1, sizeof *event));
    event->context = current_context();
    event->flags = flags;
    event->number = table_add(&sim.events, event);
    *out = event->number;
    return leave(SUCCESS);
}

static CUresult event_enter(enum call call, CUevent handle, struct event **event)
{
    CUresult result = enter(call, NEEDS_CONTEXT);

    if (result)
        return result;
    *event = find_event(handle);
    return *event ? SUCCESS : leave(INVALID_HANDLE);
}

/* The object stays until the reset, as queued work may still name it. */
API CUresult cuEventDestroy_v2(CUevent handle)
{
    struct event *event;
    CUresult result = event_enter(CALL_cuEventDestroy, handle, &event);

    if (result)
        return result;
    event->retired = true;
    return leave(SUCCESS);
}

API CUresult cuEventRecord(CUevent handle, CUstream stream_handle)
{
    struct event *event;
    CUresult result = event_enter(CALL_cuEventRecord, handle, &event);

    if (result)
        return result;
    struct stream *stream = find_stream(stream_handle);
    if (!stream || stream->context != event->context)
        return leave(INVALID_HANDLE);
    struct operation *operation = need(calloc(1, sizeof *operation));
    operation->kind = OPERATION_RECORD;
    operation->event = event;
    enqueue(stream, operation);
    event->stream = stream;
    event->sequence = operation->sequence;
    return leave(SUCCESS);
}

/* An event that was never recorded counts as done. */
API CUresult cuEventQuery(CUevent handle)
{
    struct event *event;
    CUresult result = event_enter(CALL_cuEventQuery, handle, &event);

    if (result)
        return result;
    return leave(event->stream ? progress_of(event->stream, event->sequence) : SUCCESS);
}

API CUresult cuEventSynchronize(CUevent handle)
{
    struct event *event;
    CUresult result = event_enter(CALL_cuEventSynchronize, handle, &event);

    if (result)
        return result;
    if (!event->stream)
        return leave(SUCCESS);
    wait_for(event->stream, event->sequence);
    return leave(event->context->sticky);
}

API CUresult cuEventElapsedTime(float *out_ms, CUevent start_handle, CUevent end_handle)
{
    struct event *start;
    CUresult result = event_enter(CALL_cuEventElapsedTime, start_handle, &start);

    if (result)
        return result;
    struct event *end = find_event(end_handle);
    if (!out_ms)
        return leave(INVALID_VALUE);
    if (!end || !start->stream || !end->stream ||
        (start->flags | end->flags) & EVENT_DISABLE_TIMING)
        return leave(INVALID_HANDLE);
    if (start->stream->done < start->sequence || end->stream->done < end->sequence)
        return leave(NOT_READY);
    *out_ms = (float)((double)(int64_t)(end->done_ns - start->done_ns) / 1e6);
    return leave(SUCCESS);
}
