/* Stands in for Intel's SYCL library: what is looked up in it of queues, contexts and devices.
 *
 * Objects are what the stand-in for libc10_xpu says: a native handle. A queue is three words.
 */
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef struct { uintptr_t context, device, backend; } Queue;

/* sycl::queue::get_context() const and get_device() const: their objects are 16 bytes, returned in
 * memory of the caller's. */
EXPORT void *_ZNK4sycl3_V15queue11get_contextEv(uintptr_t *result, const Queue *queue) {
  result[0] = queue->context, result[1] = 0;
  return result;
}

EXPORT void *_ZNK4sycl3_V15queue10get_deviceEv(uintptr_t *result, const Queue *queue) {
  result[0] = queue->device, result[1] = 0;
  return result;
}

/* sycl::queue::get_backend() const */
EXPORT signed char _ZNK4sycl3_V15queue11get_backendEv(const Queue *queue) { return (signed char)queue->backend; }

/* sycl::context::getNative() const and sycl::device::getNative() const */
EXPORT uintptr_t _ZNK4sycl3_V17context9getNativeEv(const uintptr_t *context) { return *context; }
EXPORT uintptr_t _ZNK4sycl3_V16device9getNativeEv(const uintptr_t *device) { return *device; }
