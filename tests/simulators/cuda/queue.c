/* Streams as queues, each run in order by a worker thread of its own, after the call returned. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { NON_BLOCKING = 1 };

/* ------------------------------------------------------------------------------ the worker */

static bool runnable(const struct stream *stream)
{
    return stream->head && (!sim.on_demand || stream->head->sequence <= stream->demanded);
}

static uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void call_host(const struct operation *operation)
{
    pthread_mutex_unlock(&sim.lock);
    in_callback = true;
    operation->call.function(operation->call.data);
    in_callback = false;
    pthread_mutex_lock(&sim.lock);
}

/* With the lock held, which everything that takes time drops meanwhile. */
static void run(struct stream *stream, struct operation *operation)
{
    struct context *context = stream->context;
    CUresult result = SUCCESS;

    switch (operation->kind) {
    case OPERATION_WAIT:
        wait_for(operation->wait.stream, operation->wait.sequence);
        return;
    case OPERATION_RECORD:
        if (operation->event->stream == stream && operation->event->sequence == operation->sequence)
            operation->event->done_ns = now_ns();
        return;
    default:
        break;
    }
    if (context->sticky)
        return; /* nothing runs in a broken context any more */
    if (operation->kind == OPERATION_CALL)
        call_host(operation);
    else if (operation->kind == OPERATION_FILL)
        result = run_fill(stream, &operation->fill);
    else if (operation->kind == OPERATION_LAUNCH)
        result = run_launch(stream, &operation->launch);
    else if (!(result = injected(CALL_queuedCopy)))
        result = run_copy(stream, &operation->copy);
    if (result && !context->sticky)
        context->sticky = result;
}

static void discard(struct stream *stream)
{
    struct operation *operation = stream->head;

    stream->head = operation->next;
    if (!stream->head)
        stream->tail = NULL;
    if (operation->kind == OPERATION_COPY)
        free(operation->copy.staged);
    free(operation);
}

static void *work(void *argument)
{
    struct stream *stream = argument;

    pthread_mutex_lock(&sim.lock);
    for (;;) {
        while (!sim.stopping && !runnable(stream) && !(stream->retired && !stream->head))
            pthread_cond_wait(&stream->wake, &sim.lock);
        if (sim.stopping || !stream->head)
            break;
        run(stream, stream->head);
        stream->done = stream->head->sequence;
        discard(stream);
        pthread_cond_broadcast(&sim.progress);
    }
    while (stream->head)
        discard(stream);
    sim.workers--;
    pthread_cond_broadcast(&sim.progress);
    pthread_mutex_unlock(&sim.lock);
    return NULL;
}

/* Ends all queues where they are. Only for a reset: streams and events are freed here too. */
void stop_workers(void)
{
    sim.stopping = true;
    for (size_t i = 0; i < sim.streams.count; i++)
        pthread_cond_broadcast(&((struct stream *)sim.streams.items[i])->wake);
    pthread_cond_broadcast(&sim.progress);
    while (sim.workers)
        pthread_cond_wait(&sim.progress, &sim.lock);
    for (size_t i = 0; i < sim.streams.count; i++)
        pthread_cond_destroy(&((struct stream *)sim.streams.items[i])->wake);
    table_clear(&sim.streams);
    table_clear(&sim.events);
    sim.stopping = false;
}

/* --------------------------------------------------------------------------------- streams */

struct stream *make_stream(struct context *context, unsigned flags)
{
    struct stream *stream = need(calloc(1, sizeof *stream));
    pthread_attr_t detached;
    pthread_t thread;

    stream->context = context;
    stream->flags = flags;
    pthread_cond_init(&stream->wake, NULL);
    stream->number = table_add(&sim.streams, stream);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    bool started = !pthread_create(&thread, &detached, work, stream);
    pthread_attr_destroy(&detached);
    if (started)
        sim.workers++;
    stream->retired = !started;
    return started ? stream : NULL;
}

/* Of the current context for the default stream; NULL for a number that is no stream (any more). */
struct stream *find_stream(CUstream handle)
{
    enum { DEFAULT = 0, LEGACY = 1 };

    if (handle == DEFAULT || handle == LEGACY) {
        struct context *context = current_context();
        if (!context->legacy)
            context->legacy = make_stream(context, 0);
        return context->legacy;
    }
    struct stream *stream = table_get(&sim.streams, handle);
    return stream && !stream->retired && stream != stream->context->legacy ? stream : NULL;
}

struct event *find_event(CUevent handle)
{
    struct event *event = table_get(&sim.events, handle);

    return event && !event->retired ? event : NULL;
}

static void append(struct stream *stream, struct operation *operation)
{
    operation->sequence = ++stream->queued;
    operation->next = NULL;
    if (stream->tail)
        stream->tail->next = operation;
    else
        stream->head = operation;
    stream->tail = operation;
    pthread_cond_broadcast(&stream->wake);
}

static void append_wait(struct stream *stream, struct stream *other)
{
    if (!other || other == stream || other->done == other->queued)
        return;
    struct operation *wait = need(calloc(1, sizeof *wait));
    wait->kind = OPERATION_WAIT;
    wait->wait.stream = other;
    wait->wait.sequence = other->queued;
    append(stream, wait);
}

/* The default stream comes after all blocking streams, and they after it. */
void enqueue(struct stream *stream, struct operation *operation)
{
    struct stream *legacy = stream->context->legacy;

    if (stream == legacy) {
        for (size_t i = 0; i < sim.streams.count; i++) {
            struct stream *other = sim.streams.items[i];
            if (other->context == stream->context && !(other->flags & NON_BLOCKING))
                append_wait(stream, other);
        }
    } else if (!(stream->flags & NON_BLOCKING)) {
        append_wait(stream, legacy);
    }
    append(stream, operation);
}

void demand(struct stream *stream, uint64_t sequence)
{
    if (stream->demanded < sequence) {
        stream->demanded = sequence;
        pthread_cond_broadcast(&stream->wake);
    }
}

void wait_for(struct stream *stream, uint64_t sequence)
{
    demand(stream, sequence);
    while (!sim.stopping && stream->done < sequence)
        pthread_cond_wait(&sim.progress, &sim.lock);
}

/* Wait for everything that a context's streams have been given so far. */
void drain(struct context *context)
{
    for (size_t i = 0; i < sim.streams.count; i++) {
        struct stream *stream = sim.streams.items[i];
        if (stream->context == context)
            demand(stream, stream->queued);
    }
    for (size_t i = 0; i < sim.streams.count; i++) {
        struct stream *stream = sim.streams.items[i];
        if (stream->context == context)
            wait_for(stream, stream->queued);
    }
}

/* ---------------------------------------------------------------------- what is still to do */

static bool uses(const struct operation *operation, CUdeviceptr at, size_t size)
{
    const struct transfer *copy = &operation->copy;

    switch (operation->kind) {
    case OPERATION_COPY:
        return ranges_overlap(copy->to, copy->size, at, size) ||
               (!copy->staged && ranges_overlap(copy->from, copy->size, at, size));
    case OPERATION_FILL:
        return ranges_overlap(operation->fill.to, operation->fill.size, at, size);
    case OPERATION_LAUNCH: { /* what the rows of a table are about is known only once it runs, and is noticed then */
        const struct launch *launch = &operation->launch;
        return ranges_overlap(launch->from, launch->from_size, at, size) ||
               ranges_overlap(launch->to, launch->to_size, at, size);
    }
    default:
        return false;
    }
}

bool queued_use(CUdeviceptr at, size_t size)
{
    for (size_t i = 0; i < sim.streams.count; i++) {
        const struct stream *stream = sim.streams.items[i];
        for (const struct operation *o = stream->head; o; o = o->next)
            if (uses(o, at, size))
                return true;
    }
    return false;
}

bool queued_launches(const struct module *module)
{
    for (size_t i = 0; i < sim.streams.count; i++) {
        const struct stream *stream = sim.streams.items[i];
        for (const struct operation *o = stream->head; o; o = o->next)
            if (o->kind == OPERATION_LAUNCH && o->launch.module == module)
                return true;
    }
    return false;
}

size_t queued_operations(void)
{
    size_t count = 0;

    for (size_t i = 0; i < sim.streams.count; i++) {
        const struct stream *stream = sim.streams.items[i];
        count += stream->queued - stream->done;
    }
    return count;
}
