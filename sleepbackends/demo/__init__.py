"""The scenario of ``sleepbackends demo``: what is done and checked, apart from its printing."""
