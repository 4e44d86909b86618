"""Compare the times of two results folders: `python -m tilepipe.compare A B`."""
