"""MoE expert-parallel communication, measured and explained.

Knows nothing; imports nothing, so that every entry point starts fast.
"""

__version__ = "0.1.0"
