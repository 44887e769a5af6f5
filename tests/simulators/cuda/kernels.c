/* Modules and launches. Kernels are known by their names, whatever the image, and computed in C. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

#include "fingerprint.h"

enum { ROW_BYTES = 16 };

/* What the real kernels are written for, and what they take: pointers, sizes of 64 bits, and words. */
static const struct {
    const char *name;
    unsigned threads;
    int parameters;
} kernels[KERNEL_COUNT] = {
    [CARRY] = {"carry", 256, 3},   [FINGERPRINT] = {"fingerprint", 256, 4},
    [SURVEY] = {"survey", 512, 3}, [COUNT] = {"count", 512, 4},
    [TALLY] = {"tally", 512, 4},   [PREFIX] = {"prefix", 512, 5},
    [PACK] = {"pack", 512, 5},     [UNPACK] = {"unpack", 512, 4},
};

struct module {
    struct context *context;
    bool unloaded;
};

struct function {
    struct module *module;
    enum kernel kernel;
};

/* -------------------------------------------------------------------------------- modules */

static CUresult load(enum call call, CUmodule *out, const void *image)
{
    CUresult result = enter(call, NEEDS_CONTEXT);

    if (result)
        return result;
    if (!out || !image)
        return leave(INVALID_VALUE);
    struct module *module = need(calloc(1, sizeof *module));
    module->context = current_context();
    *out = table_add(&sim.modules, module);
    return leave(SUCCESS);
}

/* Any image will do: its code is for a device. */
API CUresult cuModuleLoadData(CUmodule *out, const void *image)
{
    return load(CALL_cuModuleLoadData, out, image);
}

API CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned count, int *options,
                                void **values)
{
    (void)count, (void)options, (void)values;
    return load(CALL_cuModuleLoadDataEx, out, image);
}

/* With the lock held, or an answer to return. */
static CUresult module_enter(enum call call, CUmodule handle, struct module **module)
{
    CUresult result = enter(call, NEEDS_CONTEXT);

    if (result)
        return result;
    *module = table_get(&sim.modules, handle);
    return *module && !(*module)->unloaded ? SUCCESS : leave(INVALID_HANDLE);
}

/* Its functions end with it. A real one may still be running; that is told as a misuse. */
API CUresult cuModuleUnload(CUmodule handle)
{
    struct module *module;
    CUresult result = module_enter(CALL_cuModuleUnload, handle, &module);

    if (result)
        return result;
    if (queued_launches(module))
        violated(UNLOAD_IN_USE);
    module->unloaded = true;
    return leave(SUCCESS);
}

API CUresult cuModuleGetFunction(CUfunction *out, CUmodule handle, const char *name)
{
    struct module *module;
    CUresult result = module_enter(CALL_cuModuleGetFunction, handle, &module);

    if (result)
        return result;
    if (!out || !name)
        return leave(INVALID_VALUE);
    enum kernel kernel = 0;
    while (kernel < KERNEL_COUNT && strcmp(name, kernels[kernel].name))
        kernel++;
    if (kernel == KERNEL_COUNT)
        return leave(NOT_FOUND);
    struct function *function = need(calloc(1, sizeof *function));
    *function = (struct function){module, kernel};
    *out = table_add(&sim.functions, function);
    return leave(SUCCESS);
}

uint64_t live_modules(void)
{
    uint64_t count = 0;

    for (size_t i = 0; i < sim.modules.count; i++)
        count += !((const struct module *)sim.modules.items[i])->unloaded;
    return count;
}

/* What a context ends with. */
void unload_modules(const struct context *context)
{
    for (size_t i = 0; i < sim.modules.count; i++) {
        struct module *module = sim.modules.items[i];
        module->unloaded |= module->context == context;
    }
}

void clear_modules(void)
{
    table_clear(&sim.functions);
    table_clear(&sim.modules);
}

/* ------------------------------------------------------------------------------- launches */

struct span_row {
    uint64_t address, size_bytes;
};

#define READ(number, to) memcpy(&(to), parameters[number], sizeof(to))

/* The parameters, by their order in the kernel. */
static bool read_parameters(void **parameters, struct launch *launch)
{
    enum kernel kernel = launch->kernel;
    int count = kernels[kernel].parameters;

    if (!parameters)
        return false;
    for (int i = 0; i < count; i++)
        if (!parameters[i])
            return false;
    READ(0, launch->from);
    if (kernel < TALLY) {
        READ(1, launch->count);
        if (count == 4)
            READ(2, launch->blocks_per_span);
        READ(count - 1, launch->to);
        launch->from_size = launch->to_size = launch->count * (size_t)ROW_BYTES;
        return true;
    }
    READ(1, launch->from_size);
    if (kernel == UNPACK) {
        READ(2, launch->to);
        READ(3, launch->to_size);
        return true;
    }
    READ(2, launch->layout);
    READ(3, launch->to);
    if (count == 5)
        READ(4, launch->to_size);
    return true;
}

static uint64_t blocks_of(const struct launch *launch)
{
    switch (launch->kernel) {
    case CARRY:
        return ((uint64_t)launch->count + 255) / 256;
    case FINGERPRINT:
    case COUNT:
        return (uint64_t)launch->count * launch->blocks_per_span;
    case SURVEY:
        return launch->count;
    default:
        return launch->from % 16 || launch->to % 16 ? 0 : packing_blocks(launch);
    }
}

/* What the real kernel would compute wrongly, or what a device would refuse, is refused. */
static bool fits(const struct launch *launch, const unsigned grid[3], const unsigned block[3])
{
    uint64_t blocks = blocks_of(launch);

    return blocks && blocks == grid[0] && grid[0] <= INT32_MAX && grid[1] == 1 && grid[2] == 1 &&
           block[0] == kernels[launch->kernel].threads && block[1] == 1 && block[2] == 1;
}

API CUresult cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                            unsigned block_x, unsigned block_y, unsigned block_z,
                            unsigned shared_bytes, CUstream stream_handle, void **parameters,
                            void **extra)
{
    CUresult result = enter(CALL_cuLaunchKernel, NEEDS_CONTEXT);
    const unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
    struct launch launch = {0};

    if (result)
        return result;
    struct function *function = table_get(&sim.functions, handle);
    struct stream *stream = find_stream(stream_handle);
    if (!function || function->module->unloaded || !stream ||
        stream->context != function->module->context)
        return leave(INVALID_HANDLE);
    launch.module = function->module;
    launch.kernel = function->kernel;
    if (extra || shared_bytes || !read_parameters(parameters, &launch) ||
        !fits(&launch, grid, block))
        return leave(INVALID_VALUE);
    struct operation *operation = need(calloc(1, sizeof *operation));
    operation->kind = OPERATION_LAUNCH;
    operation->launch = launch;
    enqueue(stream, operation);
    return leave(SUCCESS);
}

/* -------------------------------------------------------------------------- on the device */

/* Chunks are whole words, so only the last one of a span ends within a word. */
static CUresult add_span(const struct stream *stream, const struct span_row *span,
                         FingerprintWord sums[2])
{
    FingerprintWord words[CHUNK_BYTES / sizeof(FingerprintWord)];

    for (uint64_t done = 0; done < span->size_bytes;) {
        size_t left = span->size_bytes - done, size = left < CHUNK_BYTES ? left : CHUNK_BYTES;
        size_t count = (size + sizeof *words - 1) / sizeof *words;
        words[count - 1] = 0;
        CUresult result = read_memory(stream, span->address + done, words, size);
        if (result)
            return result;
        for (size_t i = 0; i < count; i++)
            fingerprint_add(words[i], fingerprint_place(done / sizeof *words + i), &sums[0],
                            &sums[1]);
        done += size;
    }
    return SUCCESS;
}

/* A table lies on a device or in host memory that the driver has pinned; nothing else is reached. */
static CUresult copy_table(const struct stream *stream, CUdeviceptr at, void *rows, size_t size,
                           bool writes)
{
    if (touches_device(at, size))
        return writes ? write_memory(stream, at, rows, size) : read_memory(stream, at, rows, size);
    if (pinned_state(at, size) != PINNED) {
        violated(QUEUED_COPY_FAULTED);
        return ILLEGAL_ADDRESS;
    }
    void *host = (void *)(uintptr_t)at;
    memcpy(writes ? host : rows, writes ? rows : host, size);
    return SUCCESS;
}

static CUresult run_carry(const struct stream *stream, const struct launch *launch)
{
    size_t size = launch->count * (size_t)ROW_BYTES;
    void *rows = need(malloc(size));
    CUresult result = copy_table(stream, launch->from, rows, size, false);

    if (!result)
        result = copy_table(stream, launch->to, rows, size, true);
    free(rows);
    return result;
}

/* Adds to the sums that are there, as the real one does: who has not set them to zero notices. */
static CUresult run_fingerprint(const struct stream *stream, const struct launch *launch)
{
    CUresult result = SUCCESS;

    for (unsigned i = 0; !result && i < launch->count; i++) {
        CUdeviceptr at = launch->to + i * 2 * sizeof(FingerprintWord);
        FingerprintWord added[2] = {0, 0}, sums[2];
        struct span_row span;

        if ((result = read_memory(stream, launch->from + i * sizeof span, &span, sizeof span)) ||
            (result = add_span(stream, &span, added)) ||
            (result = read_memory(stream, at, sums, sizeof sums)))
            break;
        sums[0] += added[0];
        sums[1] += added[1];
        result = write_memory(stream, at, sums, sizeof sums);
    }
    return result;
}

CUresult run_launch(const struct stream *stream, const struct launch *launch)
{
    static CUresult (*const run[KERNEL_COUNT])(const struct stream *, const struct launch *) = {
        [CARRY] = run_carry, [FINGERPRINT] = run_fingerprint, [SURVEY] = run_survey,
        [COUNT] = run_count, [TALLY] = run_tally,             [PREFIX] = run_prefix,
        [PACK] = run_pack,   [UNPACK] = run_unpack,
    };
    CUresult result = injected(CALL_queuedKernel);

    return result ? result : run[launch->kernel](stream, launch);
}
