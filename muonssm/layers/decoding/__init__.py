"""Decoding of whole models in one native call per token; docs/design/decoding.md describes it."""
