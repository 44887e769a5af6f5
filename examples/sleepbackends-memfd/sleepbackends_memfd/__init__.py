"""A sleep-mode backend that keeps sleeping memory in sealed files, for other processes to take."""
