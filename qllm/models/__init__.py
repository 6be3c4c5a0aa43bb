"""Model families: what is found in a Hugging Face model and how its layers are driven."""
