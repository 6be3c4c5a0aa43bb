"""The bytes of cached KV: pages of a runner, the file, and the threads that copy them."""
