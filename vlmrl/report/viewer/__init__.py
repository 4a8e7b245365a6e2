"""Look at what the agent saw and did: :func:`write_page` makes one HTML file of trajectories."""

from vlmrl.report.viewer.page import write_page

__all__ = ["write_page"]
