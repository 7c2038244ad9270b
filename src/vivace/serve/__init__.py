"""Serve a model and its recipe behind the OpenAI images API. Needs the extra `serve`.

This process serves HTTP and does not import torch. One resident worker process for each GPU keeps a session and draws.
"""
