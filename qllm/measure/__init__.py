"""A demo, benchmarks and plots that are installed with the package."""
