"""The page of the server, its feed, and its documentation."""
