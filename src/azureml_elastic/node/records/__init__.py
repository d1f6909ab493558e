"""What a node writes down of the run into files and the table, and how others read that."""
