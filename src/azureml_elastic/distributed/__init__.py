"""The ranks that train together: process groups, agreement between ranks, and how a broken group is let go."""
