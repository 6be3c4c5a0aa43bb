"""Model families: the parts of a Hugging Face model, and how its layers are run."""
