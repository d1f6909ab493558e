"""Reports of runs: in the terminal and as an HTML page."""
