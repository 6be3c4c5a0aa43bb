"""The routes of OpenAI's and Anthropic's interfaces, and qllm's own routes for requests and KV."""
