"""Grouped GEMM on Hopper: what it is compiled for, its tiles, its device code and its launches."""
