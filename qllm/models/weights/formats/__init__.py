"""How published checkpoints hold quantised weights: one module per method."""
