"""HTTP itself: connections, API keys, limits, headers, and the shape of errors."""
