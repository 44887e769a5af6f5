from tests.native.fixtures import kernel_images, native_library, no_fingerprints, simulator

__all__ = ["kernel_images", "native_library", "no_fingerprints", "simulator"]
