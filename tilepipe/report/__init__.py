"""From a results folder to a page of figures and tables.

Knows nothing of how points are run, of torch or of Hydra; matplotlib is loaded in here only.
"""
