"""Workloads: requests with arrival times.

Named workloads, trace files, and clients that send both.
"""
