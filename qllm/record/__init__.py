"""What a run leaves behind: traces, metrics, timelines for Perfetto."""
