"""A small but real language model and its engine, which use the public interface alone.

``model_config`` reads what a checkpoint is, ``tiny_model`` computes, ``tiny_engine`` serves
and can be put to sleep, ``default_weights`` makes a checkpoint where there is none, and
``unselective`` is a backend that can do less than the one it stands on.
"""
