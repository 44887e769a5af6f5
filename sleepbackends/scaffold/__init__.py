"""What ``sleepbackends new`` writes: a package with a backend in it that passes at once."""
