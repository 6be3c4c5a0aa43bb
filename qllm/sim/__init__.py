"""A simulator: measured or computed costs, runs on a virtual clock, capacity planning."""
