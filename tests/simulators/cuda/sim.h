/* What the files of the simulated CUDA driver share.
 *
 * One lock guards all state. Only bytes move without it: a worker looks up where they are, drops
 * the lock, moves one chunk, and looks again, so that memory taken away meanwhile is noticed.
 */
#ifndef SIM_H
#define SIM_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "calls.h"

#define API __attribute__((visibility("default")))

#define MAX_DEVICES 16
#define MAX_CONTEXT_DEPTH 32
#define ATTRIBUTE_COUNT 192
#define MIN_GRANULARITY_BYTES (64u << 10) /* whole pages wherever this runs */
#define CHUNK_BYTES (256u << 10)
#define DEFAULT_GRANULARITY_BYTES (2u << 20)
#define DEFAULT_TOTAL_BYTES (8ull << 30)
#define DEFAULT_STALE_BYTE 0xd7
#define DRIVER_VERSION 13000

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct context *CUcontext;
typedef uintptr_t CUstream; /* opaque numbers, never reused: a stale one is told apart */
typedef uintptr_t CUevent;
typedef uintptr_t CUmodule;
typedef uintptr_t CUfunction;
typedef void (*CUhostFn)(void *);

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    CONTEXT_IS_DESTROYED = 709,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    UNKNOWN = 999
};

enum { LOCATION_DEVICE = 1, ALLOCATION_PINNED = 1 };
enum { ACCESS_NONE = 0, ACCESS_READ = 1, ACCESS_READ_WRITE = 3 };

struct location {
    int type, id;
};

struct allocation_prop {
    int type, requested_handle_types;
    struct location location;
    void *win32;
    struct {
        unsigned char compression, rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
};

struct access_desc {
    struct location location;
    int flags;
};

/* ---------------------------------------------------------------- spans.c: address ranges */

struct span {
    CUdeviceptr at;
    size_t size;
};

/* Sorted by address, never overlapping. */
struct spans {
    struct span **items;
    size_t count, room;
};

size_t spans_after(const struct spans *spans, CUdeviceptr address);
struct span *spans_at(const struct spans *spans, CUdeviceptr address);
bool spans_overlap(const struct spans *spans, CUdeviceptr at, size_t size);
bool span_holds(const struct span *span, CUdeviceptr at, size_t size);
bool ranges_overlap(CUdeviceptr a, size_t a_size, CUdeviceptr b, size_t b_size);
void spans_insert(struct spans *spans, struct span *span);
void spans_remove(struct spans *spans, const struct span *span);
void spans_clear(struct spans *spans);

/* Objects by a number that is never given out twice, across resets too. */
struct table {
    void **items;
    size_t count, room;
    uint64_t first;
};

uint64_t table_add(struct table *table, void *item);
void *table_get(const struct table *table, uint64_t number);
void table_clear(struct table *table);

void *need(void *memory); /* the simulator cannot go on without memory of its own */

/* ------------------------------------------------------------------------ the objects */

struct handle { /* physical memory */
    uint64_t number;
    int device;
    size_t size;
    off_t offset; /* of its bytes in the device's file */
    int references, mappings, movers;
    uint64_t takes, releases;
    bool backed;
};

struct reservation {
    struct span span;
    bool plain; /* made by cuMemAlloc, so only cuMemFree may take it apart */
};

struct mapping {
    struct span span;
    struct handle *handle;
    unsigned char access[MAX_DEVICES];
};

struct host_range {
    struct span span;
    unsigned flags;
    bool owned; /* made by cuMemHostAlloc */
};

struct context { /* a device's primary context; there are no others */
    int device;
    int references;
    CUresult sticky; /* what every call answers once a queued operation went wrong */
    struct stream *legacy;
};

struct transfer {
    CUdeviceptr to, from;
    size_t size;
    bool to_device, from_device;
    void *staged; /* host bytes taken at the call, because pageable sources may change after it */
};

struct fill {
    CUdeviceptr to;
    size_t size;
    uint32_t value;
};

enum kernel { CARRY, FINGERPRINT, SURVEY, COUNT, TALLY, PREFIX, PACK, UNPACK, KERNEL_COUNT };

struct launch {
    struct module *module;
    enum kernel kernel;
    CUdeviceptr from, to; /* tables of rows, or bytes before and after they are packed or unpacked */
    size_t from_size, to_size;
    unsigned count, blocks_per_span; /* where there are tables */
    unsigned layout;
};

enum operation_kind {
    OPERATION_COPY,
    OPERATION_FILL,
    OPERATION_LAUNCH,
    OPERATION_CALL,
    OPERATION_RECORD,
    OPERATION_WAIT
};

struct operation {
    struct operation *next;
    enum operation_kind kind;
    uint64_t sequence;
    union {
        struct transfer copy;
        struct fill fill;
        struct launch launch;
        struct {
            CUhostFn function;
            void *data;
        } call;
        struct event *event;
        struct {
            struct stream *stream;
            uint64_t sequence;
        } wait;
    };
};

struct stream {
    uint64_t number;
    struct context *context;
    unsigned flags;
    bool retired; /* destroyed by its user; what was queued still runs */
    struct operation *head, *tail;
    uint64_t queued, done;
    uint64_t demanded; /* somebody waits for everything up to here */
    pthread_cond_t wake;
};

struct event {
    uint64_t number;
    struct context *context;
    unsigned flags;
    bool retired;
    struct stream *stream; /* of the latest record; NULL before the first */
    uint64_t sequence;
    uint64_t done_ns;
};

enum violation {
    DOUBLE_RELEASE,
    UNKNOWN_HANDLE,
    UNMAP_IN_USE,
    UNMAP_NOTHING,
    QUEUED_COPY_FAULTED,
    HOST_RELEASED_IN_USE,
    HOST_BYTES_GONE,
    CALL_IN_CALLBACK,
    UNLOAD_IN_USE,
    CAPTURE_LOST,
    VIOLATION_COUNT
};

struct simulator {
    pthread_mutex_t lock;
    pthread_cond_t progress; /* an operation finished, or a worker ended */

    bool initialised, stopping;
    unsigned epoch; /* contexts made current before a reset do not count after it */
    int device_count;
    uint64_t total[MAX_DEVICES];
    size_t granularity[MAX_DEVICES];
    int attributes[MAX_DEVICES][ATTRIBUTE_COUNT];
    bool attribute_set[MAX_DEVICES][ATTRIBUTE_COUNT];
    int files[MAX_DEVICES];      /* behind the devices' memory */
    off_t file_end[MAX_DEVICES]; /* only grows: a stale offset reads nothing of others */

    struct context contexts[MAX_DEVICES];
    struct spans reservations, mappings, host_ranges;
    struct table handles, streams, events, modules, functions;
    int workers;

    int stale_byte; /* negative: new memory is left zero, and untouched */
    bool on_demand; /* queues run only as far as somebody waits for them */
    bool capturing; /* some thread captures a graph */
    uint64_t copy_bytes_per_s, pinned_limit_bytes, pinned_bytes, pageable_copy_bytes;
    uint64_t violations[VIOLATION_COUNT];
};

extern struct simulator sim;

/* ------------------------------------------------------- entry.c: on the way in and out */

enum { NEEDS_NOTHING, NEEDS_INIT, NEEDS_CONTEXT };

/* Count the call, answer an injected fault, check what it needs. The lock is held after SUCCESS
 * only, and leave() drops it. */
CUresult enter(enum call call, int needs);
CUresult leave(CUresult result);
CUresult injected(enum call call);
void reset_calls(void);
void violated(enum violation kind);

/* -------------------------------------------------------------- capture.c: graphs of others */

bool ends_capture(enum call call);

/* ----------------------------------------------------------- control.c: what tests may set */

void set_defaults(void);

/* ---------------------------------------------------------------- pool.c: bytes of a device */

void pool_open(void);
void pool_close(void);
bool pool_take(int device, uint64_t size);
void pool_give(int device, uint64_t size);
void pool_usage(int device, uint64_t *free_bytes, uint64_t *mine);
void pool_set_budget(int device, uint64_t budget);
uint64_t pool_budget(int device);

enum process_state { RUNNING, LOCKED, CHECKPOINTED, FAILED };
enum step { STEP_LOCK, STEP_CHECKPOINT, STEP_RESTORE, STEP_UNLOCK, STEP_GET_STATE, STEP_COUNT };

/* What all processes know of one; the file of shared devices is made of these. */
struct slot {
    uint64_t process, started, used[MAX_DEVICES];
    uint64_t saved[MAX_DEVICES]; /* what a checkpoint took from the devices */
    uint64_t has_context, state, locking, wedged;
    uint64_t busy;               /* set by tests: work that does not end */
    uint64_t migrations;         /* pairs of devices that the last restore was given */
    uint64_t steps[STEP_COUNT];  /* how often each was asked for */
    uint64_t faults[STEP_COUNT]; /* set by tests; see checkpoint.c */
};

struct process_use {
    uint64_t process, bytes;
};

void pool_register(void);
void pool_wait_until_running(void);
struct slot *pool_hold(int process, CUresult *why_not);
void pool_let_go(void);
void pool_save(struct slot *slot);
bool pool_restore(struct slot *slot);
size_t pool_processes(int device, struct process_use *rows, size_t room);

/* --------------------------------------------------------------- devices.c and contexts.c */

bool is_device(int device);
int device_count(void);
void uuid_of(unsigned char *uuid, int device);
uint64_t total_bytes(int device);
bool can_map_memory(int device);
struct context *current_context(void);
CUresult current_state(void);
extern __thread bool in_callback;

/* ------------------------------------------------------------ memory.c, mapping.c, host.c */

CUresult create_memory(size_t size, int device, struct handle **made);
void release_if_unused(struct handle *handle);
void release_device_files(void);
void free_plain_memory(int device);
void unmap_everything(void);
void *reserve_pages(size_t size, size_t alignment, CUdeviceptr hint);
bool accessible(CUdeviceptr at, size_t size, int device, int access);
bool touches_device(CUdeviceptr at, size_t size);

enum pinned { PAGEABLE, PINNED, SPANS_REGISTRATIONS };
enum pinned pinned_state(CUdeviceptr at, size_t size);
void release_host_ranges(void);

/* -------------------------------------------------------- queue.c: what streams do, later */

struct stream *make_stream(struct context *context, unsigned flags);
struct stream *find_stream(CUstream handle);
struct event *find_event(CUevent handle);
void enqueue(struct stream *stream, struct operation *operation);
void wait_for(struct stream *stream, uint64_t sequence);
void demand(struct stream *stream, uint64_t sequence);
void drain(struct context *context);
bool queued_use(CUdeviceptr at, size_t size);
bool queued_launches(const struct module *module);
size_t queued_operations(void);
void stop_workers(void);

/* ------------------------------------------------------------ transfer.c: moving the bytes */

CUresult run_copy(const struct stream *stream, const struct transfer *copy);
CUresult run_fill(const struct stream *stream, const struct fill *fill);
CUresult read_memory(const struct stream *stream, CUdeviceptr from, void *out, size_t size);
CUresult write_memory(const struct stream *stream, CUdeviceptr to, void *in, size_t size);

/* ------------------------------------------------------------ kernels.c: modules, launches */

uint64_t live_modules(void);
void unload_modules(const struct context *context);
void clear_modules(void);
CUresult run_launch(const struct stream *stream, const struct launch *launch);

/* --------------------------------------------------------------------- packing_kernels.c */

uint64_t packing_blocks(const struct launch *launch);
CUresult run_survey(const struct stream *stream, const struct launch *launch);
CUresult run_count(const struct stream *stream, const struct launch *launch);
CUresult run_tally(const struct stream *stream, const struct launch *launch);
CUresult run_prefix(const struct stream *stream, const struct launch *launch);
CUresult run_pack(const struct stream *stream, const struct launch *launch);
CUresult run_unpack(const struct stream *stream, const struct launch *launch);

#endif
