"""Typed configuration: schema, loading and the rules between settings. Imports nothing else of this package."""
