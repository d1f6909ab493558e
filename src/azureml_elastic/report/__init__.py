"""The summary of a run for people: in the terminal and as an HTML page."""
