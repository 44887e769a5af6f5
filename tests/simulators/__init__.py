"""Stand-ins for device drivers, built by the tests that need them."""
