"""Process groups of the ranks that train together, and agreement between the ranks."""
