"""Operation of the server: probes, metrics of a fleet, banner, supervisor, and the server's run."""
