"""CPU and GPU kernels of this project, and their references in torch."""
