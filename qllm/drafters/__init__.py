"""Drafters: sources of next tokens that the model then verifies, several in one step."""
