"""The xpu backend on a simulated driver, through Intel's real loader."""
