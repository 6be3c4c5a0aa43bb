"""A tool that makes a MoE model of a dense one, and trains its routers: `qllm upcycle`."""
