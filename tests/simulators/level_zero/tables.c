/* The tables of functions that the loader asks for, by the position of each function in them.
 *
 * The loader refuses a driver that lacks any table it knows, so all are there, most of them
 * empty. Tables only grow, and an older loader's are shorter: what is written past its end would
 * overwrite other memory, so each function says since which version it is there.
 */
#include "sim.h"

#define VERSION(minor) (1u << 16 | (minor))

#define FUNCTIONS(X)                                                                                              \
  X(zeInit) X(zeInitDrivers) X(zeDriverGet) X(zeDriverGetApiVersion) X(zeDriverGetProperties)                     \
  X(zeDriverGetExtensionProperties) X(zeDriverGetExtensionFunctionAddress) X(zeDeviceGet)                         \
  X(zeDeviceGetSubDevices) X(zeDeviceGetProperties) X(zeDeviceGetCommandQueueGroupProperties)                     \
  X(zeDeviceGetMemoryProperties) X(zeDeviceGetRootDevice) X(zeContextCreate) X(zeContextCreateEx)                 \
  X(zeContextDestroy) X(zeVirtualMemReserve) X(zeVirtualMemFree) X(zeVirtualMemQueryPageSize) X(zeVirtualMemMap)  \
  X(zeVirtualMemUnmap) X(zeVirtualMemSetAccessAttribute) X(zePhysicalMemCreate) X(zePhysicalMemDestroy)           \
  X(zeMemGetAllocProperties) X(zeCommandListCreateImmediate) X(zeCommandListDestroy)                              \
  X(zeCommandListAppendBarrier) X(zeCommandListAppendMemoryCopy) X(zeCommandListAppendMemoryFill)                 \
  X(zeEventPoolCreate) X(zeEventPoolDestroy) X(zeEventCreate) X(zeEventDestroy) X(zeEventHostSynchronize)         \
  X(zeEventQueryStatus) X(zeEventHostReset) X(zeEventHostSignal) X(zesInit) X(zesDriverGet) X(zesDeviceGet)                            \
  X(zeDeviceGetCacheProperties) X(zeDeviceCanAccessPeer) X(nothing_to_say)              \
  X(zesDeviceGetProperties) X(zesDeviceEnumMemoryModules) X(zesMemoryGetState)

#define DECLARE(name) extern Result name(void);
#pragma GCC diagnostic ignored "-Wstrict-prototypes"
FUNCTIONS(DECLARE)

typedef struct { size_t position; Result (*function)(void); uint32_t since; } Slot;

static Result give(uint32_t version, Result (**table)(void), const Slot *slots, size_t count) {
  if (!table) return INVALID_NULL_POINTER;
  for (size_t i = 0; i < count; i++)
    if (version >= slots[i].since) table[slots[i].position] = slots[i].function;
  return SUCCESS;
}

#define OLD(position, name) {position, name, 0}
#define SINCE(minor, position, name) {position, name, VERSION(minor)}
#define TABLE(name, ...)                                                             \
  EXPORT Result name(uint32_t version, Result (**table)(void)) {                     \
    static const Slot slots[] = {__VA_ARGS__};                                       \
    return give(version, table, slots, sizeof slots / sizeof *slots);                \
  }
#define EMPTY(name)                                                                  \
  EXPORT Result name(uint32_t version, void *table) {                                \
    (void)version;                                                                   \
    return table ? SUCCESS : INVALID_NULL_POINTER;                                   \
  }

TABLE(zeGetGlobalProcAddrTable, OLD(0, zeInit), SINCE(10, 1, zeInitDrivers))
TABLE(zeGetDriverProcAddrTable, OLD(0, zeDriverGet), OLD(1, zeDriverGetApiVersion), OLD(2, zeDriverGetProperties),
      OLD(4, zeDriverGetExtensionProperties), OLD(5, zeDriverGetExtensionFunctionAddress))
TABLE(zeGetDeviceProcAddrTable, OLD(0, zeDeviceGet), OLD(1, zeDeviceGetSubDevices), OLD(2, zeDeviceGetProperties),
      OLD(3, nothing_to_say), OLD(4, nothing_to_say), OLD(5, zeDeviceGetCommandQueueGroupProperties),
      OLD(6, zeDeviceGetMemoryProperties), OLD(7, nothing_to_say), OLD(8, zeDeviceGetCacheProperties),
      OLD(9, nothing_to_say), OLD(10, nothing_to_say), OLD(11, nothing_to_say), OLD(12, zeDeviceCanAccessPeer),
      OLD(13, nothing_to_say),
      SINCE(7, 18, zeDeviceGetRootDevice))
TABLE(zeGetContextProcAddrTable, OLD(0, zeContextCreate), OLD(1, zeContextDestroy), SINCE(1, 8, zeContextCreateEx))
TABLE(zeGetVirtualMemProcAddrTable, OLD(0, zeVirtualMemReserve), OLD(1, zeVirtualMemFree),
      OLD(2, zeVirtualMemQueryPageSize), OLD(3, zeVirtualMemMap), OLD(4, zeVirtualMemUnmap),
      OLD(5, zeVirtualMemSetAccessAttribute))
TABLE(zeGetPhysicalMemProcAddrTable, OLD(0, zePhysicalMemCreate), OLD(1, zePhysicalMemDestroy))
TABLE(zeGetMemProcAddrTable, OLD(4, zeMemGetAllocProperties))
TABLE(zeGetCommandListProcAddrTable, OLD(1, zeCommandListCreateImmediate), OLD(2, zeCommandListDestroy),
      OLD(6, zeCommandListAppendBarrier), OLD(8, zeCommandListAppendMemoryCopy),
      OLD(9, zeCommandListAppendMemoryFill))
TABLE(zeGetEventPoolProcAddrTable, OLD(0, zeEventPoolCreate), OLD(1, zeEventPoolDestroy))
TABLE(zeGetEventProcAddrTable, OLD(0, zeEventCreate), OLD(1, zeEventDestroy), OLD(2, zeEventHostSignal), OLD(3, zeEventHostSynchronize),
      OLD(4, zeEventQueryStatus), OLD(5, zeEventHostReset))
TABLE(zesGetGlobalProcAddrTable, OLD(0, zesInit))
TABLE(zesGetDriverProcAddrTable, SINCE(5, 2, zesDriverGet))
TABLE(zesGetDeviceProcAddrTable, OLD(0, zesDeviceGetProperties), OLD(16, zesDeviceEnumMemoryModules),
      SINCE(5, 29, zesDeviceGet))
TABLE(zesGetMemoryProcAddrTable, OLD(1, zesMemoryGetState))

EMPTY(zeGetCommandListExpProcAddrTable) EMPTY(zeGetCommandQueueProcAddrTable) EMPTY(zeGetDeviceExpProcAddrTable)
EMPTY(zeGetDriverExpProcAddrTable) EMPTY(zeGetEventExpProcAddrTable) EMPTY(zeGetFabricEdgeExpProcAddrTable)
EMPTY(zeGetFabricVertexExpProcAddrTable) EMPTY(zeGetFenceProcAddrTable) EMPTY(zeGetImageExpProcAddrTable)
EMPTY(zeGetImageProcAddrTable) EMPTY(zeGetKernelExpProcAddrTable) EMPTY(zeGetKernelProcAddrTable)
EMPTY(zeGetMemExpProcAddrTable) EMPTY(zeGetModuleBuildLogProcAddrTable) EMPTY(zeGetModuleProcAddrTable)
EMPTY(zeGetRTASBuilderExpProcAddrTable) EMPTY(zeGetRTASParallelOperationExpProcAddrTable)
EMPTY(zeGetSamplerProcAddrTable)

EMPTY(zesGetDeviceExpProcAddrTable) EMPTY(zesGetDiagnosticsProcAddrTable) EMPTY(zesGetDriverExpProcAddrTable)
EMPTY(zesGetEngineProcAddrTable) EMPTY(zesGetFabricPortProcAddrTable) EMPTY(zesGetFanProcAddrTable)
EMPTY(zesGetFirmwareExpProcAddrTable) EMPTY(zesGetFirmwareProcAddrTable) EMPTY(zesGetFrequencyProcAddrTable)
EMPTY(zesGetLedProcAddrTable) EMPTY(zesGetOverclockProcAddrTable) EMPTY(zesGetPerformanceFactorProcAddrTable)
EMPTY(zesGetPowerProcAddrTable) EMPTY(zesGetPsuProcAddrTable) EMPTY(zesGetRasExpProcAddrTable)
EMPTY(zesGetRasProcAddrTable) EMPTY(zesGetSchedulerProcAddrTable) EMPTY(zesGetStandbyProcAddrTable)
EMPTY(zesGetTemperatureProcAddrTable) EMPTY(zesGetVFManagementExpProcAddrTable)

EMPTY(zetGetCommandListProcAddrTable) EMPTY(zetGetContextProcAddrTable) EMPTY(zetGetDebugProcAddrTable)
EMPTY(zetGetDeviceExpProcAddrTable) EMPTY(zetGetDeviceProcAddrTable) EMPTY(zetGetKernelProcAddrTable)
EMPTY(zetGetMetricDecoderExpProcAddrTable) EMPTY(zetGetMetricExpProcAddrTable)
EMPTY(zetGetMetricGroupExpProcAddrTable) EMPTY(zetGetMetricGroupProcAddrTable) EMPTY(zetGetMetricProcAddrTable)
EMPTY(zetGetMetricProgrammableExpProcAddrTable) EMPTY(zetGetMetricQueryPoolProcAddrTable)
EMPTY(zetGetMetricQueryProcAddrTable) EMPTY(zetGetMetricStreamerProcAddrTable)
EMPTY(zetGetMetricTracerExpProcAddrTable) EMPTY(zetGetModuleProcAddrTable) EMPTY(zetGetTracerExpProcAddrTable)
