"""One model on several ranks, with the bits of one rank."""
