"""A tool that makes a MoE model from a dense one, and trains its routers: `qllm upcycle`."""
