/* Uses the simulated driver from many threads at once, for the compiler's checkers to watch.
 *
 * Each thread maps, fills, copies, hashes and frees memory of its own; all share one stream and one
 * lasting allocation. Exits with 1 and a line for the first thing that is not as promised.
 */
#include "../sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fingerprint.h"
#include "packing.h"

#define THREADS 6
#define ROUNDS 8
#define DEVICES 2
#define BYTES ((size_t)2 << 20)

CUresult cuInit(unsigned flags);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxSynchronize(void);
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total);
CUresult cuMemAddressReserve(CUdeviceptr *at, size_t size, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags);
CUresult cuMemAddressFree(CUdeviceptr at, size_t size);
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                     const struct allocation_prop *prop, unsigned long long flags);
CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags);
CUresult cuMemUnmap(CUdeviceptr at, size_t size);
CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const struct access_desc *desc, size_t count);
CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t size);
CUresult cuMemFree_v2(CUdeviceptr at);
CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned flags);
CUresult cuMemHostUnregister(void *address);
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream);
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream);
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream);
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuStreamDestroy_v2(CUstream stream);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
CUresult cuEventCreate(CUevent *event, unsigned flags);
CUresult cuEventDestroy_v2(CUevent event);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuEventSynchronize(CUevent event);
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data);
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleUnload(CUmodule module);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                        CUstream stream, void **parameters, void **extra);
void sim_reset(void);
int sim_set_devices(int count);
uint64_t sim_violations(int kind);

static struct context *contexts[DEVICES];
static CUstream shared_streams[DEVICES];
static CUdeviceptr lasting[DEVICES];
static CUfunction kernels[DEVICES], packers[DEVICES][4];
static const char *const packing[] = {"tally", "prefix", "pack", "unpack"};

#define CHECK(what)                                                     \
    do {                                                                \
        CUresult answer = (what);                                       \
        if (answer) {                                                   \
            fprintf(stderr, "line %d: %s: %d\n", __LINE__, #what, answer); \
            exit(1);                                                    \
        }                                                               \
    } while (0)

static void expect(bool held, const char *what)
{
    if (!held) {
        fprintf(stderr, "not so: %s\n", what);
        exit(1);
    }
}

static void count_up(void *data)
{
    __atomic_add_fetch((int *)data, 1, __ATOMIC_SEQ_CST);
}

static CUdeviceptr map_one(int device, CUmemGenericAllocationHandle *handle)
{
    struct allocation_prop prop = {.type = ALLOCATION_PINNED,
                                   .location = {LOCATION_DEVICE, device}};
    struct access_desc access = {{LOCATION_DEVICE, device}, ACCESS_READ_WRITE};
    CUdeviceptr at;

    CHECK(cuMemAddressReserve(&at, BYTES, 0, 0, 0));
    CHECK(cuMemCreate(handle, BYTES, &prop, 0));
    CHECK(cuMemMap(at, BYTES, 0, *handle, 0));
    CHECK(cuMemSetAccess(at, BYTES, &access, 1));
    return at;
}

static void unmap_one(CUdeviceptr at, CUmemGenericAllocationHandle handle)
{
    CHECK(cuMemUnmap(at, BYTES));
    CHECK(cuMemRelease(handle));
    CHECK(cuMemAddressFree(at, BYTES));
}

/* Of memory full of one value, with room for the kernel's tables elsewhere. */
static void hash(int device, CUdeviceptr at, unsigned value, CUdeviceptr tables, CUstream stream)
{
    CUdeviceptr spans = tables, sums = tables + 64;
    uint64_t span[2] = {at, BYTES}, found[2] = {0, 0};
    FingerprintWord expected[2] = {0, 0}, word = value | (FingerprintWord)value << 32;
    unsigned count = 1, blocks = 8;
    void *parameters[] = {&spans, &count, &blocks, &sums};

    CHECK(cuMemcpyHtoD_v2(spans, span, sizeof span));
    CHECK(cuMemcpyHtoD_v2(sums, found, sizeof found));
    CHECK(cuLaunchKernel(kernels[device], blocks, 1, 1, 256, 1, 1, 0, stream, parameters, NULL));
    CHECK(cuStreamSynchronize(stream));
    CHECK(cuMemcpyDtoH_v2(found, sums, sizeof found));
    for (size_t i = 0; i < BYTES / 8; i++)
        fingerprint_add(word, fingerprint_place(i), &expected[0], &expected[1]);
    expect(found[0] == expected[0] && found[1] == expected[1], "the sums are those of the bytes");
}

/* A part of memory full of one value, and back from what it was packed to. */
static void pack(int device, CUdeviceptr at, unsigned value, CUdeviceptr packed, CUstream stream)
{
    PackingSize size = BYTES / 8, room = BYTES;
    unsigned layout = packing_layout(2, 3, value >> 7 & 255), found[4];
    const unsigned tiles = (unsigned)size / 2 / (8 * PACKING_OCTETS);
    void *before[] = {&at, &size, &layout, &packed, &room}, *after[] = {&packed, &room, &at, &size};
    CUfunction *of = packers[device];

    CHECK(cuLaunchKernel(of[0], tiles, 1, 1, 512, 1, 1, 0, stream, before, NULL));
    CHECK(cuLaunchKernel(of[1], 1, 1, 1, 512, 1, 1, 0, stream, before, NULL));
    CHECK(cuLaunchKernel(of[2], tiles, 1, 1, 512, 1, 1, 0, stream, before, NULL));
    CHECK(cuMemsetD32Async(at, ~value, size / 4, stream));
    CHECK(cuLaunchKernel(of[3], tiles, 1, 1, 512, 1, 1, 0, stream, after, NULL));
    CHECK(cuStreamSynchronize(stream));
    for (size_t i = 0; i < size; i += size / 8) {
        CHECK(cuMemcpyDtoH_v2(found, at + i, sizeof found));
        expect(found[0] == value && found[3] == value, "what was packed comes back");
    }
}

static void one_round(int device, unsigned value, unsigned *host, CUstream stream, CUevent event)
{
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at = map_one(device, &handle), plain;
    int calls = 0;

    CHECK(cuMemAlloc_v2(&plain, BYTES));
    CHECK(cuMemsetD32Async(at, value, BYTES / 4, stream));
    CHECK(cuEventRecord(event, stream));
    CHECK(cuStreamWaitEvent(shared_streams[device], event, 0));
    CHECK(cuMemcpyDtoDAsync_v2(plain, at, BYTES, shared_streams[device]));
    CHECK(cuMemcpyDtoDAsync_v2(lasting[device], at, BYTES, shared_streams[device]));
    CHECK(cuMemcpyDtoHAsync_v2(host, plain, BYTES, shared_streams[device]));
    CHECK(cuLaunchHostFunc(shared_streams[device], count_up, &calls));
    CHECK(cuEventRecord(event, shared_streams[device]));
    CHECK(cuEventSynchronize(event));
    expect(__atomic_load_n(&calls, __ATOMIC_SEQ_CST) == 1, "the host function ran once");
    for (size_t i = 0; i < BYTES / 4; i++)
        if (host[i] != value)
            expect(false, "the copy holds what was filled in");
    hash(device, at, value, plain, stream);
    pack(device, at, value, plain, stream);
    host[0]++;
    CHECK(cuMemcpyHtoD_v2(at, host, BYTES));
    CHECK(cuMemFree_v2(plain));
    unmap_one(at, handle);
}

static void *use(void *argument)
{
    int number = (int)(intptr_t)argument, device = number % DEVICES;
    unsigned *host = malloc(BYTES);
    CUstream stream;
    CUevent event;

    CHECK(cuCtxSetCurrent(contexts[device]));
    CHECK(cuMemHostRegister_v2(host, BYTES, 0));
    CHECK(cuStreamCreate(&stream, 1));
    CHECK(cuEventCreate(&event, 0));
    for (unsigned round = 0; round < ROUNDS; round++)
        one_round(device, 1000u * (unsigned)number + round, host, stream, event);
    CHECK(cuEventDestroy_v2(event));
    CHECK(cuStreamDestroy_v2(stream));
    CHECK(cuCtxSynchronize());
    CHECK(cuMemHostUnregister(host));
    free(host);
    return NULL;
}

int main(void)
{
    CUmemGenericAllocationHandle handles[DEVICES];
    CUmodule modules[DEVICES];
    pthread_t threads[THREADS];
    size_t before[DEVICES], after, total;

    expect(!sim_set_devices(DEVICES), "the number of devices is accepted");
    CHECK(cuInit(0));
    for (int device = 0; device < DEVICES; device++) {
        CHECK(cuDevicePrimaryCtxRetain(&contexts[device], device));
        CHECK(cuCtxSetCurrent(contexts[device]));
        CHECK(cuMemGetInfo_v2(&before[device], &total));
        CHECK(cuStreamCreate(&shared_streams[device], 1));
        lasting[device] = map_one(device, &handles[device]);
        CHECK(cuModuleLoadData(&modules[device], "any image"));
        CHECK(cuModuleGetFunction(&kernels[device], modules[device], "fingerprint"));
        for (int i = 0; i < 4; i++)
            CHECK(cuModuleGetFunction(&packers[device][i], modules[device], packing[i]));
    }
    for (intptr_t i = 0; i < THREADS; i++)
        expect(!pthread_create(&threads[i], NULL, use, (void *)i), "a thread starts");
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    for (int device = 0; device < DEVICES; device++) {
        CHECK(cuCtxSetCurrent(contexts[device]));
        CHECK(cuStreamSynchronize(shared_streams[device]));
        unmap_one(lasting[device], handles[device]);
        CHECK(cuModuleUnload(modules[device]));
        CHECK(cuMemGetInfo_v2(&after, &total));
        expect(after == before[device], "all memory came back");
        CHECK(cuDevicePrimaryCtxRelease_v2(device));
    }
    for (int kind = 0; kind < VIOLATION_COUNT; kind++)
        expect(!sim_violations(kind), "nothing was done wrong");
    sim_reset();
    puts("done");
    return 0;
}
