"""The simulator: costs measured or computed, runs on a virtual clock, capacity planning."""
