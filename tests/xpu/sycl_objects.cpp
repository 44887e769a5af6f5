// Real SYCL objects for tests of the ways to their native handles, with the symbols that torch's
// library has for its own. Compiled for the host against the headers of intel-sycl-rt.
#include <sycl/sycl.hpp>

#include <cstdint>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
constexpr auto level_zero = sycl::backend::ext_oneapi_level_zero;

std::vector<sycl::device> &devices() {
  static std::vector<sycl::device> all = [] {
    std::vector<sycl::device> found;
    for (const auto &device : sycl::device::get_devices(sycl::info::device_type::gpu))
      if (device.get_backend() == level_zero) found.push_back(device);
    return found;
  }();
  return all;
}

sycl::context &context() {
  static sycl::context one = devices()[0].get_platform().khr_get_default_context();
  return one;
}
} // namespace

EXPORT int count_devices() { return static_cast<int>(devices().size()); }
EXPORT std::uintptr_t make_queue(int device) {
  return reinterpret_cast<std::uintptr_t>(new sycl::queue(context(), devices()[device]));
}
EXPORT std::uintptr_t make_stray_queue(int device) {
  return reinterpret_cast<std::uintptr_t>(new sycl::queue(sycl::context(devices()[device]), devices()[device]));
}

// What SYCL itself says the native handles are.
EXPORT std::uintptr_t native_context() {
  return reinterpret_cast<std::uintptr_t>(sycl::get_native<level_zero>(context()));
}
EXPORT std::uintptr_t native_device(int device) {
  return reinterpret_cast<std::uintptr_t>(sycl::get_native<level_zero>(devices()[device]));
}

namespace c10::xpu {
__attribute__((visibility("default"))) sycl::context &get_device_context() { return context(); }
__attribute__((visibility("default"))) sycl::device &get_raw_device(signed char device) { return devices()[device]; }
__attribute__((visibility("default"))) void syncStreamsOnDevice(signed char) {}
} // namespace c10::xpu
