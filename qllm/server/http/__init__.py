"""HTTP itself: connections, keys, limits, headers, and the form of errors."""
