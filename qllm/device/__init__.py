"""Scheduler, rings and loop in C++, one source for host and device (docs/design/device-loop.md)."""
