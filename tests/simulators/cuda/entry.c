/* Every call's way in and out: counters, injected faults, what the call needs. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

struct simulator sim = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .progress = PTHREAD_COND_INITIALIZER,
    .handles = {.first = 0x4000000},
    .streams = {.first = 0x5000000},
    .events = {.first = 0x6000000},
    .modules = {.first = 0x7000000},
    .functions = {.first = 0x8000000},
};

/* From call number `first` to before `last`, counted from the reset. */
struct fault {
    struct fault *next;
    int call;
    uint64_t first, last;
    CUresult result;
};

static struct fault *faults;
static uint64_t calls[CALL_COUNT];

/* Set in the child of a fork, whose copy of the driver is of no use, as the real one's. */
static volatile bool forked;

static void in_child(void)
{
    forked = true;
}

__attribute__((constructor)) static void loaded(void)
{
    for (int device = 0; device < MAX_DEVICES; device++)
        sim.files[device] = -1;
    set_defaults();
    pthread_atfork(NULL, NULL, in_child);
}

CUresult injected(enum call call)
{
    uint64_t number = ++calls[call];

    for (struct fault **at = &faults; *at; at = &(*at)->next) {
        struct fault *fault = *at;
        if (fault->call != (int)call || number < fault->first || number >= fault->last)
            continue;
        CUresult result = fault->result;
        if (number + 1 == fault->last) {
            *at = fault->next;
            free(fault);
        }
        return result;
    }
    return SUCCESS;
}

CUresult enter(enum call call, int needs)
{
    if (forked)
        return NOT_INITIALIZED;
    if (needs != NEEDS_NOTHING)
        pool_wait_until_running();
    pthread_mutex_lock(&sim.lock);
    CUresult result = injected(call);
    if (!result && needs != NEEDS_NOTHING) {
        if (!sim.initialised) {
            result = NOT_INITIALIZED;
        } else if (in_callback) {
            violated(CALL_IN_CALLBACK);
            result = NOT_PERMITTED;
        } else if (ends_capture(call)) {
            violated(CAPTURE_LOST);
            result = STREAM_CAPTURE_UNSUPPORTED;
        } else if (needs == NEEDS_CONTEXT) {
            result = current_state();
        }
    }
    if (result)
        pthread_mutex_unlock(&sim.lock);
    return result;
}

CUresult leave(CUresult result)
{
    pthread_mutex_unlock(&sim.lock);
    return result;
}

void violated(enum violation kind)
{
    sim.violations[kind]++;
}

/* The number of a name that callers ask for, or -1. */
static int call_number(const char *name)
{
#define CALL_NAME(name, since, symbol) #name,
    static const char *const names[CALL_COUNT] = {CALLS(CALL_NAME) "queuedCopy",
                                                   "queuedKernel"};
#undef CALL_NAME

    for (int call = 0; call < CALL_COUNT; call++)
        if (!strcmp(names[call], name))
            return call;
    return -1;
}

/* ------------------------------------------------------------- counters and faults, for tests */

/* Let calls number `nth` to `nth + times - 1` from now of a function answer `result` and do
 * nothing else. -1: no such function, or a count of zero. */
API int sim_fail(const char *name, uint64_t nth, uint64_t times, int result)
{
    int call = call_number(name);

    if (call < 0 || !nth || !times || !result)
        return -1;
    struct fault *fault = need(malloc(sizeof *fault));
    pthread_mutex_lock(&sim.lock);
    uint64_t first = calls[call] + nth;
    uint64_t last = times > UINT64_MAX - first ? UINT64_MAX : first + times;
    *fault = (struct fault){faults, call, first, last, result};
    faults = fault;
    pthread_mutex_unlock(&sim.lock);
    return 0;
}

static void drop_faults(void)
{
    while (faults) {
        struct fault *next = faults->next;
        free(faults);
        faults = next;
    }
}

API void sim_clear_faults(void)
{
    pthread_mutex_lock(&sim.lock);
    drop_faults();
    pthread_mutex_unlock(&sim.lock);
}

/* Faults that have calls left to fail. */
API uint64_t sim_pending_faults(void)
{
    uint64_t count = 0;

    pthread_mutex_lock(&sim.lock);
    for (const struct fault *fault = faults; fault; fault = fault->next)
        count++;
    pthread_mutex_unlock(&sim.lock);
    return count;
}

/* How often a function was called since the reset, or -1 if there is none of that name. */
API int64_t sim_calls(const char *name)
{
    int call = call_number(name);

    if (call < 0)
        return -1;
    pthread_mutex_lock(&sim.lock);
    int64_t count = (int64_t)calls[call];
    pthread_mutex_unlock(&sim.lock);
    return count;
}

void reset_calls(void)
{
    drop_faults();
    memset(calls, 0, sizeof calls);
}
