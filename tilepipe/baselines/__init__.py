"""Other ways to do what our kernels do, measured beside them as contenders of the same points."""
