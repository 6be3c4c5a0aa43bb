"""Operation of the server: probes, metrics of a fleet, banner, supervisor, start and stop."""
