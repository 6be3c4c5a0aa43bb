"""The native scheduler: one source for the host and the device (see docs/device-scheduler.md)."""
