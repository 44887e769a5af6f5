from tests.native.fixtures import native_library, simulator

__all__ = ["native_library", "simulator"]
