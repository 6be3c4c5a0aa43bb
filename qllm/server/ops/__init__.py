"""What an operator sees and starts: probes, banner, supervisor, the run of a server."""
