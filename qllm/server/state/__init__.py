"""The state that outlives the server: files, batches, responses."""
