"""The live page of the server, its feed, and the page of the routes."""
