/* How many bytes of each device are in use: by this process, and by others that share a file.
 *
 * The file holds what struct pool says, little-endian. Whoever reads or changes it holds flock.
 * A process that ended, in whatever way, is found by its number and start time and its bytes are
 * given back, so nothing needs to run at exit.
 */
#include "sim.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_PROCESSES 64
#define MAGIC "SBSIM\0\0\2"

struct pool {
    char magic[8];
    uint64_t budget[MAX_DEVICES];
    struct slot slots[MAX_PROCESSES];
};

static struct pool own, *pool; /* NULL until something asks */
static struct slot *registered; /* this process's, once it has a context */
static int file = -1;

static uint64_t used_by_all(int device);
static uint64_t available(int device);

static void fail(const char *what)
{
    perror(what);
    abort();
}

/* Threads of one process share what flock holds, so they need a lock of their own. */
static pthread_mutex_t threads = PTHREAD_MUTEX_INITIALIZER;

static void lock_file(int operation)
{
    if (operation == LOCK_EX)
        pthread_mutex_lock(&threads);
    while (file >= 0 && flock(file, operation))
        if (errno != EINTR)
            fail("simulated CUDA driver: flock");
    if (operation == LOCK_UN)
        pthread_mutex_unlock(&threads);
}

/* 0 for a process that has ended, even if nobody has waited for it yet. */
static uint64_t start_time(uint64_t process)
{
    char path[64], text[1024];
    unsigned long long started = 0;
    char state = 'X';

    snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)process);
    int stat = open(path, O_RDONLY | O_CLOEXEC);
    if (stat < 0)
        return 0;
    ssize_t length = read(stat, text, sizeof text - 1);
    close(stat);
    if (length <= 0)
        return 0;
    text[length] = 0;
    const char *after_name = strrchr(text, ')'); /* the name may hold anything, spaces too */
    if (!after_name ||
        sscanf(after_name + 1,
               " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
               &state, &started) != 2)
        return 0;
    return state == 'Z' || state == 'X' ? 0 : started;
}

static void initialise(struct pool *at)
{
    memset(at, 0, sizeof *at);
    memcpy(at->magic, MAGIC, sizeof at->magic);
    for (int device = 0; device < MAX_DEVICES; device++)
        at->budget[device] = UINT64_MAX;
}

void pool_open(void)
{
    const char *path = getenv("SIMULATED_CUDA_SHARED");
    struct stat status;

    if (pool)
        return;
    if (!path || !*path) {
        initialise(&own);
        pool = &own;
        return;
    }
    file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0)
        fail(path);
    lock_file(LOCK_EX);
    if (fstat(file, &status) ||
        (status.st_size < (off_t)sizeof *pool && ftruncate(file, sizeof *pool)))
        fail(path);
    pool = mmap(NULL, sizeof *pool, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (pool == MAP_FAILED)
        fail(path);
    if (memcmp(pool->magic, MAGIC, sizeof pool->magic))
        initialise(pool);
    lock_file(LOCK_UN);
}

static struct slot *my_slot(void)
{
    static uint64_t me, started;
    struct slot *empty = NULL;

    if (file < 0) {
        own.slots[0].process = (uint64_t)getpid();
        return &own.slots[0];
    }
    if (!me) {
        me = (uint64_t)getpid();
        started = start_time(me);
    }
    for (struct slot *slot = pool->slots; slot < pool->slots + MAX_PROCESSES; slot++) {
        if (slot->process == me && slot->started == started)
            return slot;
        if (slot->process && start_time(slot->process) != slot->started)
            memset(slot, 0, sizeof *slot);
        if (!slot->process && !empty)
            empty = slot;
    }
    if (empty)
        *empty = (struct slot){.process = me, .started = started};
    return empty;
}

void pool_close(void)
{
    if (file >= 0) {
        lock_file(LOCK_EX);
        struct slot *mine = my_slot();
        if (mine)
            memset(mine, 0, sizeof *mine);
        munmap(pool, sizeof *pool);
        close(file); /* which lets go of its lock */
        file = -1;
        lock_file(LOCK_UN);
    }
    pool = NULL;
    __atomic_store_n(&registered, NULL, __ATOMIC_RELEASE);
}

/* ---------------------------------------------------------------- processes, for checkpoints */

/* This process has a context from now on, so that it can be checkpointed. */
void pool_register(void)
{
    lock_file(LOCK_EX);
    struct slot *mine = my_slot();
    if (mine)
        mine->has_context = 1;
    lock_file(LOCK_UN);
    __atomic_store_n(&registered, mine, __ATOMIC_RELEASE);
}

/* Calls of a process that is locked wait; so do they while it is being locked. */
void pool_wait_until_running(void)
{
    struct slot *mine;

    while ((mine = __atomic_load_n(&registered, __ATOMIC_ACQUIRE)) &&
           (__atomic_load_n(&mine->state, __ATOMIC_ACQUIRE) != RUNNING ||
            __atomic_load_n(&mine->locking, __ATOMIC_ACQUIRE)))
        usleep(500);
}

/* Look a process up and hold its record still: NULL, and an answer, if there is none. */
struct slot *pool_hold(int process, CUresult *why_not)
{
    struct slot *found = NULL;

    pool_open();
    lock_file(LOCK_EX);
    for (struct slot *slot = pool->slots; slot < pool->slots + MAX_PROCESSES; slot++)
        if (slot->process == (uint64_t)process && slot->has_context &&
            (file < 0 || slot->started == start_time(slot->process)))
            found = slot;
    *why_not = found                              ? SUCCESS
               : start_time((uint64_t)process)    ? NOT_INITIALIZED
                                                  : OPERATING_SYSTEM;
    if (!found)
        lock_file(LOCK_UN);
    return found;
}

void pool_let_go(void)
{
    lock_file(LOCK_UN);
}

/* With the process held: its bytes leave the devices. */
void pool_save(struct slot *slot)
{
    for (int device = 0; device < MAX_DEVICES; device++) {
        slot->saved[device] = slot->used[device];
        slot->used[device] = 0;
    }
}

/* With the process held: its bytes come back, all or none. */
bool pool_restore(struct slot *slot)
{
    for (int device = 0; device < MAX_DEVICES; device++)
        if (slot->saved[device] > available(device))
            return false;
    for (int device = 0; device < MAX_DEVICES; device++) {
        slot->used[device] += slot->saved[device];
        slot->saved[device] = 0;
    }
    return true;
}

/* What a device's processes use: at most `room` rows, answers how many there are. */
size_t pool_processes(int device, struct process_use *rows, size_t room)
{
    size_t count = 0;

    pool_open();
    lock_file(LOCK_EX);
    used_by_all(device); /* forgets those that ended */
    for (struct slot *slot = pool->slots; slot < pool->slots + MAX_PROCESSES; slot++) {
        if (!slot->process || !slot->used[device])
            continue;
        if (count < room)
            rows[count] = (struct process_use){slot->process, slot->used[device]};
        count++;
    }
    lock_file(LOCK_UN);
    return count;
}

/* ---------------------------------------------------------------------------- bytes in use */

/* With the file locked. */
static uint64_t used_by_all(int device)
{
    uint64_t used = 0;

    if (file < 0)
        return own.slots[0].used[device];
    for (struct slot *slot = pool->slots; slot < pool->slots + MAX_PROCESSES; slot++) {
        if (slot->process && start_time(slot->process) != slot->started)
            memset(slot, 0, sizeof *slot);
        used += slot->used[device];
    }
    return used;
}

static uint64_t available(int device)
{
    uint64_t used = used_by_all(device), limit = total_bytes(device);

    if (pool->budget[device] < limit)
        limit = pool->budget[device];
    return used < limit ? limit - used : 0;
}

bool pool_take(int device, uint64_t size)
{
    lock_file(LOCK_EX);
    struct slot *mine = my_slot();
    bool fits = mine && size <= available(device);
    if (fits)
        mine->used[device] += size;
    lock_file(LOCK_UN);
    return fits;
}

void pool_give(int device, uint64_t size)
{
    lock_file(LOCK_EX);
    struct slot *mine = my_slot();
    if (mine)
        mine->used[device] -= size;
    lock_file(LOCK_UN);
}

void pool_usage(int device, uint64_t *free_bytes, uint64_t *mine)
{
    pool_open();
    lock_file(LOCK_EX);
    struct slot *slot = my_slot();
    *free_bytes = available(device);
    *mine = slot ? slot->used[device] : 0;
    lock_file(LOCK_UN);
}

void pool_set_budget(int device, uint64_t budget)
{
    pool_open();
    lock_file(LOCK_EX);
    pool->budget[device] = budget;
    lock_file(LOCK_UN);
}

uint64_t pool_budget(int device)
{
    pool_open();
    lock_file(LOCK_EX);
    uint64_t budget = pool->budget[device];
    lock_file(LOCK_UN);
    return budget;
}
