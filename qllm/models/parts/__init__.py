"""Parts of a model, recognised by their results: the trials, the formulas, and tested digests."""
