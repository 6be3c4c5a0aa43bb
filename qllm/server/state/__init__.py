"""What the server must not forget: files, batches, responses."""
