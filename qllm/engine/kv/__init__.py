"""The cached KV as the engine's loop sees it: the place of each page, decided without a clock."""
