"""The migration of a request, with its KV, from one engine to another."""
