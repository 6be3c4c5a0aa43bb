"""What arrives when: named workloads, trace files, and how they are sent."""
