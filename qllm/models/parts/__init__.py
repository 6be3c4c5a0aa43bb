"""Parts of a model, known by what they compute: the trials, the formulas, and tested digests."""
