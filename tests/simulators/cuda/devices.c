/* The driver itself, its errors and its devices. */
#include "sim.h"
#include "symbols.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------------ the driver */

static uint64_t setting(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);

    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

/* Before cuInit too, as management tools ask. */
int device_count(void)
{
    return sim.device_count < 0 ? (int)setting("SIMULATED_CUDA_DEVICES", 1) : sim.device_count;
}

API CUresult cuInit(unsigned flags)
{
    CUresult result = enter(CALL_cuInit, NEEDS_NOTHING);

    if (result)
        return result;
    if (flags)
        return leave(INVALID_VALUE);
    if (sim.initialised)
        return leave(SUCCESS);
    sim.device_count = device_count();
    if (sim.device_count < 1 || sim.device_count > MAX_DEVICES)
        return leave(NO_DEVICE);
    pool_open();
    for (int device = 0; device < MAX_DEVICES; device++)
        sim.contexts[device] = (struct context){.device = device};
    sim.initialised = true;
    return leave(SUCCESS);
}

API CUresult cuDriverGetVersion(int *version)
{
    CUresult result = enter(CALL_cuDriverGetVersion, NEEDS_NOTHING);

    if (result)
        return result;
    if (!version)
        return leave(INVALID_VALUE);
    *version = DRIVER_VERSION;
    return leave(SUCCESS);
}

static CUresult look_up(const char *name, void **address, int version, int *status)
{
    CUresult result = enter(CALL_cuGetProcAddress, NEEDS_NOTHING);
    int too_old = 0;

    if (result)
        return result;
    if (!name || !address)
        return leave(INVALID_VALUE);
    entry_point found = find_symbol(name, version, &too_old);
    memcpy(address, &found, sizeof found);
    if (status)
        *status = found ? 0 : too_old ? 2 : 1;
    return leave(found ? SUCCESS : NOT_FOUND);
}

API CUresult cuGetProcAddress(const char *name, void **address, int version, uint64_t flags)
{
    (void)flags;
    return look_up(name, address, version, NULL);
}

API CUresult cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags,
                                 int *status)
{
    (void)flags;
    return look_up(name, address, version, status);
}

/* NVRTC asks a loaded driver for tables of its own, and crashes where it cannot even ask. */
API CUresult cuGetExportTable(const void **table, const void *id)
{
    CUresult result = enter(CALL_cuGetExportTable, NEEDS_NOTHING);

    if (result)
        return result;
    if (!table || !id)
        return leave(INVALID_VALUE);
    *table = NULL;
    return leave(NOT_FOUND);
}

/* ------------------------------------------------------------------------------ its errors */

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "the driver is not initialised"},
    {4, "CUDA_ERROR_DEINITIALIZED", "the driver is shutting down"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "there is no device"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "no such device"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable memory error"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "the image cannot be loaded"},
    {OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "an operating system call failed"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid handle"},
    {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "not possible in this state"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "no such symbol"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "not finished yet"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "access to an illegal address"},
    {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "the context was destroyed"},
    {HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "host memory is registered already"},
    {HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "host memory is not registered"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "a launch failed"},
    {NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "not permitted here"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "not supported"},
    {UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static CUresult describe(enum call call, CUresult code, bool as_name, const char **out)
{
    CUresult result = enter(call, NEEDS_NOTHING);

    if (result)
        return result;
    if (!out)
        return leave(INVALID_VALUE);
    *out = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code)
            *out = as_name ? errors[i].name : errors[i].text;
    return leave(*out ? SUCCESS : INVALID_VALUE);
}

API CUresult cuGetErrorName(CUresult code, const char **name)
{
    return describe(CALL_cuGetErrorName, code, true, name);
}

API CUresult cuGetErrorString(CUresult code, const char **text)
{
    return describe(CALL_cuGetErrorString, code, false, text);
}

/* ----------------------------------------------------------------------------- its devices */

bool is_device(int device)
{
    return device >= 0 && device < sim.device_count;
}

uint64_t total_bytes(int device)
{
    if (sim.total[device])
        return sim.total[device];
    return setting("SIMULATED_CUDA_TOTAL_BYTES", DEFAULT_TOTAL_BYTES);
}

static CUresult device_enter(enum call call, const void *out, int device)
{
    CUresult result = enter(call, NEEDS_INIT);

    if (result)
        return result;
    if (!out)
        return leave(INVALID_VALUE);
    return is_device(device) ? SUCCESS : leave(INVALID_DEVICE);
}

API CUresult cuDeviceGetCount(int *count)
{
    CUresult result = enter(CALL_cuDeviceGetCount, NEEDS_INIT);

    if (result)
        return result;
    if (!count)
        return leave(INVALID_VALUE);
    *count = sim.device_count;
    return leave(SUCCESS);
}

API CUresult cuDeviceGet(CUdevice *out, int ordinal)
{
    CUresult result = device_enter(CALL_cuDeviceGet, out, ordinal);

    if (result)
        return result;
    *out = ordinal;
    return leave(SUCCESS);
}

API CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    CUresult result = device_enter(CALL_cuDeviceGetName, name, device);

    if (result)
        return result;
    if (length < 1)
        return leave(INVALID_VALUE);
    snprintf(name, (size_t)length, "Simulated GPU");
    return leave(SUCCESS);
}

/* The same in every process, as a real device's is. */
void uuid_of(unsigned char *uuid, int device)
{
    memcpy(uuid, "simulated-gpu-\0\0", 16);
    uuid[15] = (unsigned char)device;
}

API CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice device)
{
    CUresult result = device_enter(CALL_cuDeviceGetUuid, uuid, device);

    if (result)
        return result;
    uuid_of(uuid, device);
    return leave(SUCCESS);
}

API CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice device)
{
    CUresult result = device_enter(CALL_cuDeviceGetPCIBusId, id, device);

    if (result)
        return result;
    if (length < 13)
        return leave(INVALID_VALUE);
    snprintf(id, (size_t)length, "0000:%02X:00.0", (unsigned)(0x10 + device) & 0xff);
    return leave(SUCCESS);
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    CUresult result = device_enter(CALL_cuDeviceTotalMem, bytes, device);

    if (result)
        return result;
    *bytes = total_bytes(device);
    return leave(SUCCESS);
}

/* By their numbers in the driver's interface. */
enum attribute {
    MAX_THREADS_PER_BLOCK = 1,
    WARP_SIZE = 10,
    MULTIPROCESSOR_COUNT = 16,
    INTEGRATED = 18,
    CAN_MAP_HOST_MEMORY = 19,
    PCI_BUS_ID = 33,
    PCI_DEVICE_ID = 34,
    ASYNC_ENGINE_COUNT = 40,
    UNIFIED_ADDRESSING = 41,
    PCI_DOMAIN_ID = 50,
    COMPUTE_CAPABILITY_MAJOR = 75,
    COMPUTE_CAPABILITY_MINOR = 76,
    CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
    HOST_REGISTER_SUPPORTED = 99,
    VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
    GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
    READ_ONLY_HOST_REGISTER_SUPPORTED = 113,
    GPU_DIRECT_RDMA_SUPPORTED = 116
};

static int attribute_value(int attribute, int device)
{
    if (sim.attribute_set[device][attribute])
        return sim.attributes[device][attribute];
    switch (attribute) {
    case MAX_THREADS_PER_BLOCK:
        return 1024;
    case WARP_SIZE:
        return 32;
    case MULTIPROCESSOR_COUNT:
        return 132;
    case PCI_BUS_ID:
        return 0x10 + device;
    case ASYNC_ENGINE_COUNT:
        return 3;
    case COMPUTE_CAPABILITY_MAJOR:
        return 9;
    case CAN_MAP_HOST_MEMORY:
    case UNIFIED_ADDRESSING:
    case CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case HOST_REGISTER_SUPPORTED:
    case VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
    case READ_ONLY_HOST_REGISTER_SUPPORTED:
    case GPU_DIRECT_RDMA_SUPPORTED:
        return 1;
    default: /* what the simulated device cannot do, and PCI numbers that are zero */
        return 0;
    }
}

bool can_map_memory(int device)
{
    return attribute_value(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) != 0;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    CUresult result = device_enter(CALL_cuDeviceGetAttribute, value, device);

    if (result)
        return result;
    if (attribute < 1 || attribute >= ATTRIBUTE_COUNT)
        return leave(INVALID_VALUE);
    *value = attribute_value(attribute, device);
    return leave(SUCCESS);
}
