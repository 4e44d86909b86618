"""What the operations mean, in FP32 NumPy; no executor imports it."""
