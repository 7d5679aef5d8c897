"""Pages about clusters and datasets, for a browser."""
