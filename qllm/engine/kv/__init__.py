"""The cached KV as the engine's loop sees it: which page is where, decided without a clock."""
