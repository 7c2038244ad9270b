"""Recipes applied to pipelines. `Session` is the only caller of a technique's `apply`."""
