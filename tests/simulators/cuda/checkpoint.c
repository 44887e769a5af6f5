/* Checkpoints of processes: the six calls, with their states, time limits and failures.
 *
 * The state of a process is in the file of shared devices, so that another process can act on
 * it, and one that dies in the middle leaves the target where it was. A checkpoint takes the
 * target's bytes from the devices' account; a restore takes them back, or fails for good where
 * they do not fit. Calls of a locked process wait, but for these.
 *
 * A fault of a step is a word that tests write into the target's record: what happens in the low
 * half, how often in the high half.
 */
#include "sim.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

enum fault {
    NO_FAULT = 0,
    /* smaller: a CUresult, and UNKNOWN moves the process to FAILED */
    HANGS = 0x10000,
    CALLER_DIES_BEFORE,
    CALLER_DIES_AFTER,
    TARGET_DIES,
    TAKES_50_MS
};

struct lock_args {
    unsigned timeout_ms, reserved0;
    uint64_t reserved1[7];
};

struct restore_args {
    void *pairs;
    unsigned count;
};

static void sleep_ms(long ms)
{
    struct timespec span = {ms / 1000, ms % 1000 * 1000000};

    nanosleep(&span, NULL);
}

static void hang(void)
{
    for (;;)
        pause();
}

/* With the process held. */
static unsigned take_fault(struct slot *slot, enum step step)
{
    uint64_t word = slot->faults[step], times = word >> 32;

    if (!times)
        return NO_FAULT;
    slot->faults[step] = times == UINT32_MAX ? word : word - (1ull << 32);
    return (unsigned)word;
}

/* Count the call, answer what a test injected, and hold the process where there is none. */
static CUresult begin(enum call call, enum step step, int pid, struct slot **held, unsigned *fault)
{
    CUresult result = enter(call, NEEDS_NOTHING);

    if (result)
        return result;
    bool initialised = sim.initialised;
    leave(SUCCESS);
    if (!initialised)
        return NOT_INITIALIZED;
    struct slot *slot = pool_hold(pid, &result);
    if (!slot)
        return result;
    slot->steps[step]++;
    *fault = take_fault(slot, step);
    if (*fault == CALLER_DIES_BEFORE)
        raise(SIGKILL);
    if (*fault == TARGET_DIES) {
        kill(pid, SIGKILL);
        pool_let_go();
        hang(); /* the call never returns */
    }
    if (*fault == HANGS || *fault == TAKES_50_MS) {
        pool_let_go();
        if (*fault == HANGS)
            hang();
        sleep_ms(50);
        *fault = NO_FAULT;
        if (!(slot = pool_hold(pid, &result)))
            return result;
    }
    *held = slot;
    return SUCCESS;
}

/* Let the process go in its new state, unless the step fails. */
static CUresult end(struct slot *slot, unsigned fault, CUresult result, enum process_state to)
{
    if (!result && fault && fault < HANGS) {
        result = (CUresult)fault;
        if (result == UNKNOWN)
            __atomic_store_n(&slot->state, FAILED, __ATOMIC_RELEASE);
    }
    if (!result)
        __atomic_store_n(&slot->state, to, __ATOMIC_RELEASE);
    pool_let_go();
    if (fault == CALLER_DIES_AFTER)
        raise(SIGKILL);
    return result;
}

static bool has_work(const struct slot *slot)
{
    bool queued = false;

    if (slot->process == (uint64_t)getpid()) {
        pthread_mutex_lock(&sim.lock);
        queued = queued_operations() > 0;
        pthread_mutex_unlock(&sim.lock);
    }
    return queued || __atomic_load_n(&slot->busy, __ATOMIC_ACQUIRE);
}

/* The calls close first; then what was submitted has to end. */
API CUresult cuCheckpointProcessLock(int pid, const struct lock_args *args)
{
    struct slot *slot;
    unsigned fault = NO_FAULT, timeout_ms = args ? args->timeout_ms : 0;
    CUresult result = begin(CALL_cuCheckpointProcessLock, STEP_LOCK, pid, &slot, &fault);

    if (result)
        return result;
    if (args && args->reserved0)
        return end(slot, fault, INVALID_VALUE, LOCKED);
    if (slot->state != RUNNING || slot->locking)
        return end(slot, fault, ILLEGAL_STATE, LOCKED);
    for (unsigned waited_ms = 0; has_work(slot); waited_ms++) {
        slot->locking = 1;
        pool_let_go();
        sleep_ms(1);
        if (!(slot = pool_hold(pid, &result)))
            return result;
        if (timeout_ms && waited_ms >= timeout_ms) {
            result = NOT_READY;
            break;
        }
    }
    result = end(slot, fault, result, LOCKED);
    /* After the state, so that no call of the process slips in between. */
    __atomic_store_n(&slot->locking, 0, __ATOMIC_RELEASE);
    return result;
}

API CUresult cuCheckpointProcessCheckpoint(int pid, const void *args)
{
    struct slot *slot;
    unsigned fault = NO_FAULT;
    CUresult result =
        begin(CALL_cuCheckpointProcessCheckpoint, STEP_CHECKPOINT, pid, &slot, &fault);

    (void)args;
    if (result)
        return result;
    result = slot->state == LOCKED ? SUCCESS : ILLEGAL_STATE;
    if (!result && (!fault || fault >= HANGS))
        pool_save(slot);
    return end(slot, fault, result, CHECKPOINTED);
}

/* A restore that runs out of memory wedges the process: every later one fails. */
API CUresult cuCheckpointProcessRestore(int pid, const struct restore_args *args)
{
    struct slot *slot;
    unsigned fault = NO_FAULT, count = args ? args->count : 0;
    CUresult result = begin(CALL_cuCheckpointProcessRestore, STEP_RESTORE, pid, &slot, &fault);

    if (result)
        return result;
    if (slot->state != CHECKPOINTED)
        result = ILLEGAL_STATE;
    else if (slot->wedged)
        result = OPERATING_SYSTEM;
    else if (count && count != (unsigned)device_count())
        result = INVALID_VALUE;
    else if ((!fault || fault >= HANGS) && !pool_restore(slot))
        result = OUT_OF_MEMORY;
    else
        slot->migrations = count;
    if (result == OUT_OF_MEMORY || (!result && fault == OUT_OF_MEMORY))
        slot->wedged = 1;
    return end(slot, fault, result, LOCKED);
}

API CUresult cuCheckpointProcessUnlock(int pid, const void *args)
{
    struct slot *slot;
    unsigned fault = NO_FAULT;
    CUresult result = begin(CALL_cuCheckpointProcessUnlock, STEP_UNLOCK, pid, &slot, &fault);

    (void)args;
    if (result)
        return result;
    return end(slot, fault, slot->state == LOCKED ? SUCCESS : ILLEGAL_STATE, RUNNING);
}

API CUresult cuCheckpointProcessGetState(int pid, int *state)
{
    struct slot *slot;
    unsigned fault = NO_FAULT;
    CUresult result = begin(CALL_cuCheckpointProcessGetState, STEP_GET_STATE, pid, &slot, &fault);

    if (result)
        return result;
    if (!state)
        result = INVALID_VALUE;
    else
        *state = (int)slot->state;
    if (fault && fault < HANGS)
        result = (CUresult)fault;
    pool_let_go();
    if (fault == CALLER_DIES_AFTER)
        raise(SIGKILL);
    return result;
}

API CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *thread)
{
    CUresult result = enter(CALL_cuCheckpointProcessGetRestoreThreadId, NEEDS_NOTHING);

    if (result)
        return result;
    leave(SUCCESS);
    if (!thread)
        return INVALID_VALUE;
    if (!pool_hold(pid, &result))
        return result;
    pool_let_go();
    *thread = pid;
    return SUCCESS;
}
