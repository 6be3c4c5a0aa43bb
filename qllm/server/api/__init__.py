"""The routes of OpenAI's and Anthropic's interfaces."""
