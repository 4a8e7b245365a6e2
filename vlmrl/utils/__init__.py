"""Helpers that know nothing of the other packages: threads, HTTP requests, files."""
