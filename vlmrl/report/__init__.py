"""What a run reports: its log, metrics, trackers, reward curve, console progress and trajectory page."""
