/* The few calls of the management library (libnvidia-ml) that ask what is in use of a device.
 *
 * In the real world they are another library, which needs no context and no cuInit. Whoever opens
 * this file under that name finds them here. A process that is locked or checkpointed waits in them,
 * as in the driver's own calls.
 */
#include "sim.h"

#include <stdio.h>
#include <string.h>

enum { NVML_SUCCESS = 0, NVML_INVALID_ARGUMENT = 2, NVML_INSUFFICIENT_SIZE = 7 };

struct memory {
    unsigned long long total, free, used;
};

struct process_info {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

/* A handle is the device's number and one, so that none is NULL. */
static int number(const void *device)
{
    return (int)(uintptr_t)device - 1;
}

API int nvmlInit_v2(void)
{
    pool_wait_until_running();
    return NVML_SUCCESS;
}

API int nvmlSystemGetDriverVersion(char *text, unsigned length)
{
    return snprintf(text, length, "580.0.1") < (int)length ? NVML_SUCCESS : NVML_INSUFFICIENT_SIZE;
}

API int nvmlDeviceGetCount_v2(unsigned *count)
{
    pool_wait_until_running();
    *count = (unsigned)device_count();
    return NVML_SUCCESS;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    if (index >= (unsigned)device_count())
        return NVML_INVALID_ARGUMENT;
    *device = (void *)(uintptr_t)(index + 1);
    return NVML_SUCCESS;
}

API int nvmlDeviceGetUUID(void *device, char *text, unsigned length)
{
    unsigned char uuid[16];
    char hex[33];

    uuid_of(uuid, number(device));
    for (int i = 0; i < 16; i++)
        snprintf(hex + 2 * i, 3, "%02x", uuid[i]);
    int needed = snprintf(text, length, "GPU-%.8s-%.4s-%.4s-%.4s-%.12s", hex, hex + 8, hex + 12,
                          hex + 16, hex + 20);
    return needed < (int)length ? NVML_SUCCESS : NVML_INSUFFICIENT_SIZE;
}

API int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending)
{
    (void)device;
    *current = *pending = 0;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetMemoryInfo(void *device, struct memory *out)
{
    struct process_use rows[64];
    int index = number(device);

    pool_wait_until_running();
    pthread_mutex_lock(&sim.lock);
    size_t count = pool_processes(index, rows, 64);
    *out = (struct memory){.total = total_bytes(index)};
    for (size_t i = 0; i < count && i < 64; i++)
        out->used += rows[i].bytes;
    uint64_t budget = pool_budget(index), limit = budget < out->total ? budget : out->total;
    out->free = out->used < limit ? limit - out->used : 0;
    pthread_mutex_unlock(&sim.lock);
    return NVML_SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count,
                                                struct process_info *out)
{
    struct process_use rows[64];

    pool_wait_until_running();
    pthread_mutex_lock(&sim.lock);
    unsigned found = (unsigned)pool_processes(number(device), rows, 64);
    pthread_mutex_unlock(&sim.lock);
    bool fits = found <= *count;
    for (unsigned i = 0; fits && i < found; i++)
        out[i] = (struct process_info){(unsigned)rows[i].process, rows[i].bytes, 0, 0};
    *count = found;
    return fits ? NVML_SUCCESS : NVML_INSUFFICIENT_SIZE;
}
