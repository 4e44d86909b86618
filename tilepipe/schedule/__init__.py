"""The Plan: what is sent where, in which order, and what a consumer waits for.

Pure NumPy; knows nothing of executors, clocks or memory order.
"""
