/* Stands in for torch's C++ library of XPU devices: the three functions that are looked up in it.
 *
 * A "SYCL object" here is the native handle and nothing else; the stand-in for libsycl agrees.
 */
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

static uintptr_t context, devices[8];
static void (*engine_wait)(int);

/* What a test sets: the handles, and what waits for kernels. */
EXPORT void stand_in_set(uintptr_t of_context, int device, uintptr_t handle, void (*wait)(int)) {
  context = of_context;
  devices[device] = handle;
  engine_wait = wait;
}

/* c10::xpu::get_device_context() and c10::xpu::get_raw_device(signed char) */
EXPORT void *_ZN3c103xpu18get_device_contextEv(void) { return &context; }
EXPORT void *_ZN3c103xpu14get_raw_deviceEa(signed char device) { return &devices[(int)device]; }

/* c10::xpu::syncStreamsOnDevice(signed char) */
EXPORT void _ZN3c103xpu19syncStreamsOnDeviceEa(signed char device) { engine_wait(device); }
