"""Helpers that import no other package of vlmrl: threads, HTTP requests, files."""
