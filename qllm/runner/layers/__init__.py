"""The components of one layer, computed by transformers' modules or by this project's kernels."""
