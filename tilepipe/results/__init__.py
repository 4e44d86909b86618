"""What is kept of a point: tables, files, provenance, reductions.

Knows nothing of Hydra, torch or how a number was measured.
"""
