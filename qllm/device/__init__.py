"""Scheduler, rings and loop in C++, one source for host and device (docs/device-scheduler.md)."""
