"""What arrives when: named workloads, trace files, and their replay."""
