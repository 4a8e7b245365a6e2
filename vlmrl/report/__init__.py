"""What a run reports: metrics, progress on the console, the trajectory page."""
