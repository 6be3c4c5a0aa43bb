"""What `make test` leaves to `make test-all` and `make test-outside`."""
