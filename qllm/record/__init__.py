"""Records of a run: traces, metrics and timelines for Perfetto."""
