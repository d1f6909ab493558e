"""Workers forked from a preload server, which has imported the modules of the script."""
