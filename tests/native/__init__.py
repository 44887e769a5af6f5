"""The native library, compiled by the tests from the source as it is."""
