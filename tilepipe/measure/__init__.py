"""How a number is taken and how sure it is: contenders, gate, intervals.

Knows nothing of kernels, files or what an operation means.
"""
