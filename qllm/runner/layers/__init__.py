"""The parts of one layer, each as transformers computes it or with kernels of our own."""
