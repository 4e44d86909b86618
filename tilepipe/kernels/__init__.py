"""CuTe DSL kernels.

Knows nothing of configuration files, results or the oracle.
"""
