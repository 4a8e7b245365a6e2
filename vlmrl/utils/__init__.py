"""Helpers without a subject of their own: threads and event loops."""
