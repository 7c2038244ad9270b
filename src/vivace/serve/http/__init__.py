"""The routes: HTTP, its checks, and the OpenAI images API."""
