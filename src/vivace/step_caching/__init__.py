"""What step caches share: schedules, states, fits."""
