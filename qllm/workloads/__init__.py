"""Requests with arrival times: named workloads, trace files, and clients that send them."""
